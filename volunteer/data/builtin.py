"""The runs that the package ships, so that a fresh install has something real to do.

Runs in: every process. Reads TOML from the package; no torch, no numpy.
"""

from __future__ import annotations

from importlib import resources

from volunteer.errors import RunSpecError
from volunteer.run import RunSpec, parse_run_spec

DEFAULT_RUN = "commons"
"""What a start without a RunSpec takes part in."""
_SPEC_SUFFIX = ".toml"


def builtin_run_names() -> tuple[str, ...]:
    """Return the names that `load_builtin_run` knows, sorted."""
    files = resources.files("volunteer.data").iterdir()
    names = (file.name for file in files if file.name.endswith(_SPEC_SUFFIX))
    return tuple(sorted(name.removesuffix(_SPEC_SUFFIX) for name in names))


def load_builtin_run(name: str) -> RunSpec:
    """Return the RunSpec of a shipped run: `commons`, or the small and fast `demo`.

    Raises:
        RunSpecError: no run of this name is shipped.
    """
    if name not in builtin_run_names():
        known = ", ".join(builtin_run_names())
        raise RunSpecError(
            f"no run named {name!r} comes with the program", hint=f"there are: {known}"
        )
    file = resources.files("volunteer.data").joinpath(name + _SPEC_SUFFIX)
    return parse_run_spec(file.read_text("utf-8"), source=f"volunteer/data/{name}{_SPEC_SUFFIX}")
