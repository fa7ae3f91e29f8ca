"""A machine made of stubs for install.sh: a PATH, an empty HOME, a pipx that only copies files."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "packaging" / "install.sh"
TOOLS = (
    "sh",
    "dirname",
    "uname",
    "awk",
    "df",
    "tr",
    "sed",
    "cat",
    "rm",
    "sort",
    "env",
    "mkdir",
    "cp",
)
PIPX = """
case "$*" in
  install*|uninstall*) for mark in "$HOME"/agent-*; do
    [ -e "$mark" ] && echo "an agent still runs" >>"$CALLS"
  done ;;
esac
case "$*" in
  --version) echo 1.18.4 ;;
  "environment --value PIPX_BIN_DIR") echo "$HOME/.local/bin" ;;
  "environment --value PIPX_LOCAL_VENVS") echo "$HOME/venvs" ;;
  install*)
    echo "with $PIPX_DEFAULT_PYTHON" >>"$CALLS"
    mkdir -p "$HOME/.local/bin" "$HOME/venvs/allmende/bin"
    rm -f "$HOME/venvs/allmende/bin/python"
    cp "$STUBS/allmende-program" "$HOME/.local/bin/allmende"
    cp "$STUBS/allmende-program" "$HOME/venvs/allmende/bin/allmende"
    cp "$STUBS/python3" "$HOME/venvs/allmende/bin/python" ;;
  "uninstall allmende") rm -r "$HOME/venvs/allmende" "$HOME/.local/bin/allmende" ;;
esac
"""
PROGRAM = """
case "$*" in
  "") echo "the dashboard" ;;
esac
"""
AGENT = """
trap 'rm -f "$mark"; exit 0' TERM
: >"$mark"
echo ready
while :; do read -r line; done
"""
STUBBORN_AGENT = """
trap '' TERM
: >"$mark"
echo ready
while :; do read -r line; done
"""


class Machine:
    """A PATH of stubs, an empty HOME, and a list of what was called."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        tools = folder / "tools"  # apart from the stubs: writing one must never follow a link
        self.home = folder / "a home"
        self.path = f"{self.bin}:{tools}"
        self.calls_file = folder / "calls"
        for made in (self.bin, tools, self.home):
            made.mkdir()
        self.calls_file.touch()
        for tool in TOOLS:
            (tools / tool).symlink_to(str(shutil.which(tool)))
        self.add("python3", f'exec "{sys.executable}" "$@"', is_recorded=False)
        self.add("gcc", "cat >/dev/null")  # accepts any source: every header is there
        self.add("id", "echo 1000", is_recorded=False)
        self.add("pipx", PIPX)
        self.add("allmende-program", PROGRAM)

    def add(self, name: str, script: str, *, is_recorded: bool = True) -> None:
        """Put a stub on the PATH."""
        record = f'echo "{name} $*" >>"$CALLS"\n' if is_recorded else ""
        file = self.bin / name
        file.write_text(f"#!/bin/sh\n{record}{script}\n")
        file.chmod(0o755)

    def remove(self, *names: str) -> None:
        """Take tools off the PATH."""
        for name in names:
            (self.bin / name).unlink()

    @property
    def environment(self) -> dict[str, str]:
        """What the installer sees."""
        return {
            "PATH": self.path,
            "HOME": str(self.home),
            "CALLS": str(self.calls_file),
            "STUBS": str(self.bin),
        }

    @property
    def calls(self) -> list[str]:
        """The stubs' calls so far, but for questions about versions and places."""
        asked = ("--version", "environment", "-fsyntax-only", "program status")
        lines = self.calls_file.read_text().splitlines()
        return [line for line in lines if not any(word in line for word in asked)]

    @property
    def venv(self) -> Path:
        """Where pipx puts the program."""
        return self.home / "venvs" / "allmende"

    @contextlib.contextmanager
    def running_agent(
        self, home: Path | None, *flags: str, script: str = AGENT
    ) -> Iterator[subprocess.Popen[str]]:
        """Run a process that looks like an agent of the installed program.

        It is a shell under another name: `sh -m FILE` runs FILE.
        """
        folder = self.bin.parent / "agents"
        folder.mkdir(exist_ok=True)
        (folder / "volunteer.agent").write_text(script)
        mark = self.home / f"agent-{home.name if home else 'usual'}"
        named = {} if home is None else {"ALLMENDE_HOME": str(home)}
        with subprocess.Popen(
            [str(self.venv / "bin" / "python"), "-m", "volunteer.agent", *flags],
            executable="/bin/sh",
            cwd=folder,
            env={**self.environment, **named, "mark": str(mark)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            try:
                yield process
            finally:
                process.kill()

    def install(self, *arguments: str, script: Path = INSTALL) -> subprocess.CompletedProcess[str]:
        """Run install.sh without a terminal."""
        return subprocess.run(
            ["/bin/sh", str(script), *arguments],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def install_at_terminal(self, typed: bytes, *arguments: str) -> str:
        """Run install.sh at a terminal, with `typed` typed ahead; return what the screen shows."""
        master, slave = pty.openpty()
        os.write(master, typed)
        subprocess.run(
            ["/bin/sh", str(INSTALL), *arguments],
            env=self.environment,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            check=False,
        )
        os.close(slave)
        shown = b"".join(_read_to_end(master))
        os.close(master)
        return shown.decode()


def _read_to_end(master: int) -> Iterable[bytes]:
    try:
        while data := os.read(master, 4096):
            yield data
    except OSError:  # Linux reports the end of a terminal as EIO
        return
