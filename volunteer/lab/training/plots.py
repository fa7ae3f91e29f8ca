"""Loss curves as a PNG: against tokens, and against what a worker sends.

Runs in: the lab, on the command line. matplotlib is the extra `plots`; nothing else imports it.

One line an arm, the mean over the seeds that all have, with a band from the lowest to the highest.
A seed makes first weights and data, which all its arms share; so seeds are first aligned, each
moved by what its reference arm ends above or below the mean. What is left is what differs. Colours
are Okabe and Ito's, told apart by all common kinds of colour vision; where they run out, the lines
are dashed, and every line is named at its end, with its last loss. An arm that leaves the frame (a
control that diverges) is named with its loss all the same.
"""

from __future__ import annotations

import importlib.util
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from volunteer.files import replace_file
from volunteer.lab.training.experiment import Experiment
from volunteer.lab.training.results import LabError, Outcomes, Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = (
    "#0072B2",  # blue
    "#D55E00",  # vermilion
    "#009E73",  # green
    "#CC79A7",  # purple
    "#E69F00",  # orange
    "#56B4E9",  # sky blue
    "#000000",
)
"""Okabe and Ito, Color Universal Design; without the yellow, which is faint on white."""
_DASHES: tuple[tuple[float, ...], ...] = ((), (5, 2), (1.5, 1.5))
_DPI = 100
_PALETTE_COLOURS = 128
_FRAME_FROM = 0.25
"""The frame's top is where the arms stood after this fraction of the tokens: what comes before is
the same steep fall for all, and would squeeze the rest."""
_NARROW = 100.0
"""Amounts that are closer together than this have marks at 2 and 5 as well."""
_LINE_HEIGHT_FRACTION = 0.042
"""Of the frame's height: how far two labels keep apart."""


class PlotsMissingError(LabError):
    """Plots need matplotlib, which is not installed."""

    hint = "`pipx inject allmende matplotlib`, or `pip install matplotlib`; the CSV is whole"


@dataclass(frozen=True, slots=True)
class _Curve:
    """An arm as it is drawn: one entry a point that all of its seeds have."""

    name: str
    tokens: tuple[float, ...]
    bytes_sent: tuple[float, ...]
    mean: tuple[float, ...]
    lowest: tuple[float, ...]
    highest: tuple[float, ...]


def can_plot() -> bool:
    """Tell whether matplotlib is there, without loading it."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_experiment(file: Path, experiment: Experiment, points: Iterable[Point]) -> bool:
    """Draw loss against tokens and against bytes sent, side by side, and write a PNG.

    Args:
        file: where it goes; its folder exists. A file that is there is replaced.
        experiment: whose arms are drawn, in their order.
        points: of its file; arms that have not come to their end are left out.

    Returns:
        Whether there was something to draw; if not, nothing was written.

    Raises:
        PlotsMissingError: matplotlib is not installed; nothing was written.
        OSError: the file cannot be written.
    """
    if not can_plot():
        raise PlotsMissingError
    outcomes = Outcomes(points)
    names = [arm.name for arm in experiment.arms if outcomes.seeds(arm.name)]
    if not names:
        return False
    seeds = outcomes.seeds(*names)
    shifts = _shifts(outcomes, experiment.reference, seeds)
    curves = [
        _curve(name, outcomes, shifts or dict.fromkeys(outcomes.seeds(name), 0.0)) for name in names
    ]
    _draw_figure(file, curves, f"{experiment.title} ({_describe_seeds(len(shifts), experiment)})")
    return True


def _shifts(outcomes: Outcomes, reference: str, seeds: Sequence[int]) -> dict[int, float]:
    """Return how far each seed is moved; empty if no seed is finished for all arms."""
    if not seeds:
        return {}
    if any(seed not in outcomes.seeds(reference) for seed in seeds):
        return dict.fromkeys(seeds, 0.0)
    ends = {seed: outcomes.last(reference, seed).loss for seed in seeds}
    mean = _mean(tuple(ends.values()))
    return {seed: mean - end if math.isfinite(mean) else 0.0 for seed, end in ends.items()}


def _curve(name: str, outcomes: Outcomes, shifts: Mapping[int, float]) -> _Curve:
    """Average an arm over its seeds, as far as all of them go."""
    runs = [outcomes.curve(name, seed) for seed in shifts]
    rows = list(zip(*runs, strict=False))  # one that broke down is shorter
    losses = [
        [point.loss + shift for point, shift in zip(row, shifts.values(), strict=True)]
        for row in rows
    ]
    return _Curve(
        name=name,
        tokens=tuple(_mean([point.tokens / 1e6 for point in row]) for row in rows),
        bytes_sent=tuple(_mean([point.bytes_per_worker for point in row]) for row in rows),
        mean=tuple(map(_mean, losses)),
        lowest=tuple(map(min, losses)),
        highest=tuple(map(max, losses)),
    )


def _describe_seeds(num_seeds: int, experiment: Experiment) -> str:
    if num_seeds == 0:
        return "no seed is finished for all: each arm over its own"
    if num_seeds == 1:
        return "1 seed"
    return (
        f"mean of {num_seeds} seeds, aligned at the end of {experiment.reference};"
        " band: lowest to highest"
    )


def _draw_figure(file: Path, curves: Sequence[_Curve], title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bottom, top = _frame(curves)
    figure = Figure(figsize=(12.5, 5.0), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    by_tokens, by_bytes = figure.subplots(1, 2, sharey=True)
    for index, curve in enumerate(curves):
        _draw_line(by_tokens, index, curve.tokens, curve)
        if curve.bytes_sent[-1] > 0:
            sends = slice(next(i for i, sent in enumerate(curve.bytes_sent) if sent > 0), None)
            _draw_line(by_bytes, index, curve.bytes_sent, curve, sends)
        else:
            _draw_level(by_bytes, index, curve.mean[-1])
    by_tokens.set_ylim(bottom, top)
    by_tokens.set_ylabel("held-out loss, nats a byte")
    by_tokens.set_xlabel("tokens trained by all workers, millions")
    by_bytes.set_xlabel("bytes sent by a worker (level line: one that sends none)")
    _scale_bytes(by_bytes, [curve.bytes_sent for curve in curves])
    for axes in (by_tokens, by_bytes):
        axes.grid(color="0.9", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    _label_ends(by_bytes, curves, bottom, top)
    figure.suptitle(title, fontsize=11)
    _write(file, figure)


def _write(file: Path, figure: Figure) -> None:
    """Write the picture with a palette, which takes a third of the bytes."""
    from PIL import Image  # comes with matplotlib

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(_PALETTE_COLOURS).save(small, format="PNG", optimize=True)
    replace_file(file, [small.getvalue()], mode=0o644)


def _scale_bytes(axes: Axes, sent: Sequence[Sequence[float]]) -> None:
    """Make the axis logarithmic, with names as `5 MB`, few enough to be read."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    amounts = [amount for amounts in sent for amount in amounts if amount > 0]
    if not amounts:
        return
    axes.set_xscale("log")
    is_narrow = max(amounts) < _NARROW * min(amounts)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if is_narrow else (1.0,)))
    axes.xaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.xaxis.set_minor_formatter(NullFormatter())


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _frame(curves: Sequence[_Curve]) -> tuple[float, float]:
    """Return the lowest and highest loss that is shown."""
    bottom = min(min(curve.lowest) for curve in curves)
    starts = []
    for curve in curves:
        first = next(i for i, t in enumerate(curve.tokens) if t >= _FRAME_FROM * curve.tokens[-1])
        starts.append(curve.mean[first])
    top = sorted(starts)[len(starts) // 2]
    margin = max(0.03 * (top - bottom), 1e-3)
    return bottom - margin, top + margin


def _colour(index: int) -> str:
    return _COLOURS[index % len(_COLOURS)]


def _line(index: int) -> str | tuple[float, tuple[float, ...]]:
    """Return the line's style as matplotlib names it."""
    dashes = _DASHES[index // len(_COLOURS) % len(_DASHES)]
    return (0.0, dashes) if dashes else "solid"


def _draw_line(
    axes: Axes, index: int, x: Sequence[float], curve: _Curve, part: slice = slice(None)
) -> None:
    colour, style = _colour(index), _line(index)
    axes.plot(x[part], curve.mean[part], color=colour, linestyle=style, linewidth=1.6)
    lowest, highest = curve.lowest[part], curve.highest[part]
    axes.fill_between(x[part], lowest, highest, color=colour, alpha=0.15, linewidth=0)


def _draw_level(axes: Axes, index: int, loss: float) -> None:
    axes.axhline(loss, color=_colour(index), linestyle=_line(index), linewidth=1.0, alpha=0.7)


def _label_ends(axes: Axes, curves: Sequence[_Curve], bottom: float, top: float) -> None:
    """Name each line to the right, by height of its end, with its last loss, labels kept apart."""
    wanted = [min(max(curve.mean[-1], bottom), top) for curve in curves]
    height = (top - bottom) * _LINE_HEIGHT_FRACTION
    for index, y in enumerate(_spread(wanted, height, bottom, top)):
        at, colour = (y - bottom) / (top - bottom), _colour(index)
        axes.plot(
            (1.02, 1.07),
            (at, at),
            transform=axes.transAxes,
            clip_on=False,
            color=colour,
            linestyle=_line(index),
            linewidth=1.6,
        )
        axes.annotate(
            _label(curves[index], top),
            xy=(1.085, at),
            xycoords="axes fraction",
            fontsize=9,
            verticalalignment="center",
            annotation_clip=False,
        )


def _label(curve: _Curve, top: float) -> str:
    loss = curve.mean[-1]
    if not math.isfinite(loss):
        return f"{curve.name}: broke down"
    return f"{curve.name}: {loss:.3f}" + (" (above the frame)" if loss > top else "")


def _spread(wanted: Sequence[float], height: float, bottom: float, top: float) -> list[float]:
    """Return positions at least `height` apart, in the order of `wanted`, close to it."""
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    placed = [0.0] * len(wanted)
    lowest = bottom
    for index in order:
        placed[index] = max(wanted[index], lowest)
        lowest = placed[index] + height
    highest = max(top, bottom + height * (len(wanted) - 1))
    for index in reversed(order):
        placed[index] = min(placed[index], highest)
        highest = placed[index] - height
    return placed
