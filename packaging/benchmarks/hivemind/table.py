"""The results: medians as a Markdown table, every repetition as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from swarm import Case, Exchange

COLUMNS = (
    *("system", "parameters_m", "peers", "killed", "seconds", "preparation_s", "cpu_s"),
    *("bytes_per_peer", "peak_bytes_per_peer", "differing", "bit_differing", "parts", "note"),
)


@dataclass(slots=True, kw_only=True)
class Row:
    """One exchange, measured."""

    system: str
    case: Case
    exchange: Exchange
    killed: bool
    bytes_per_peer: float
    """Sent, headers of TCP and IP included."""
    cpu_s: dict[str, float]
    """Of all processes of all peers, by role."""
    peak_bytes_per_peer: float = 0.0
    """Memory, what processes share counted once."""

    @property
    def said_cpu(self) -> str:
        """CPU seconds in words."""
        return ", ".join(f"{role} {seconds:.2f} s" for role, seconds in self.cpu_s.items())


def tell(rows: Sequence[Row]) -> None:
    """Print the tables."""
    cases = list(dict.fromkeys((row.case.parameters_m, row.case.peers) for row in rows))
    print("| M x peers | system | s | s with matchmaking | MB sent a peer | CPU s | MiB a peer |")
    print("|---|---|---|---|---|---|---|")
    for key in cases:
        for system, group in _groups(rows, key, killed=False).items():
            seconds = _median(group, lambda row: row.exchange.seconds)
            whole = _median(group, lambda row: row.exchange.seconds + row.exchange.preparation_s)
            print(
                f"| {key[0]} x {key[1]} | {system} | {seconds:.2f} | {whole:.2f} "
                f"| {_median(group, lambda row: row.bytes_per_peer) / 1e6:.1f} "
                f"| {_median(group, lambda row: sum(row.cpu_s.values())):.1f} "
                f"| {_median(group, lambda row: row.peak_bytes_per_peer) / 2**20:.0f} |"
            )
    print("\nSeconds after the close at which each part was over everywhere, medians:\n")
    for key in cases:
        for system, group in _groups(rows, key, killed=False).items():
            parts = {
                part: _median(group, lambda row, part=part: row.exchange.parts_s.get(part, 0.0))
                for part in group[0].exchange.parts_s
            }
            said = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())
            cpu = {
                role: _median(group, lambda row, role=role: row.cpu_s.get(role, 0.0))
                for role in group[0].cpu_s
            }
            cpu_said = ", ".join(f"{role} {seconds:.1f}" for role, seconds in cpu.items())
            print(f"- {key[0]} x {key[1]}, {system}: {said}; CPU s: {cpu_said}")
    if any(row.killed for row in rows):
        print("\n| SIGKILL of one | system | survivors done, s | differ | differ in a bit | |")
        print("|---|---|---|---|---|---|")
    for key in cases:
        for system, group in _groups(rows, key, killed=True).items():
            for row in group:
                found = row.exchange
                print(
                    f"| {key[0]} x {key[1]} | {system} | {found.seconds:.1f} "
                    f"| {100 * found.differing_fraction:.2f} % "
                    f"| {100 * found.bit_differing_fraction:.2f} % | {found.note} |"
                )


def _groups(rows: Sequence[Row], key: tuple[int, int], *, killed: bool) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if (row.case.parameters_m, row.case.peers) == key and row.killed == killed:
            groups.setdefault(row.system, []).append(row)
    return groups


def _median(rows: Sequence[Row], of: Callable[[Row], float]) -> float:
    return median(map(of, rows))


def write_csv(rows: Sequence[Row], file: Path) -> None:
    """Write every repetition."""
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        for row in rows:
            found = row.exchange
            parts = " ".join(f"{part}={seconds:.3f}" for part, seconds in found.parts_s.items())
            values = (
                *(row.system, row.case.parameters_m, row.case.peers, int(row.killed)),
                *(f"{found.seconds:.3f}", f"{found.preparation_s:.3f}", row.said_cpu),
                *(int(row.bytes_per_peer), int(row.peak_bytes_per_peer)),
                *(found.differing_fraction, found.bit_differing_fraction, parts, found.note),
            )
            writer.writerow(values)
