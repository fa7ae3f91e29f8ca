"""The texts that the package ships.

Runs in: trainer, aggregator.
"""

from __future__ import annotations

import functools
import lzma
from importlib import resources

import numpy as np
import numpy.typing as npt

from volunteer.errors import RunSpecError

_PREFIX = "builtin:"
_TEXT_SUFFIX = ".txt.xz"


def builtin_names() -> tuple[str, ...]:
    """Return the names of the texts that the package ships, sorted."""
    files = resources.files("volunteer.data").iterdir()
    names = (file.name for file in files if file.name.endswith(_TEXT_SUFFIX))
    return tuple(sorted(name.removesuffix(_TEXT_SUFFIX) for name in names))


@functools.cache
def read_builtin_text(name: str) -> npt.NDArray[np.uint8]:
    """Return a text of the package, decoded once a process.

    Returns:
        uint8, shape (n,), read-only.

    Raises:
        RunSpecError: no text of this name is shipped, or it cannot be read.
    """
    if name not in builtin_names():
        known = ", ".join(_PREFIX + known_name for known_name in builtin_names())
        raise RunSpecError(f"data.sources: {_PREFIX}{name} is unknown; known: {known}")
    file = resources.files("volunteer.data").joinpath(name + _TEXT_SUFFIX)
    try:
        return np.frombuffer(lzma.decompress(file.read_bytes()), dtype=np.uint8)
    except (OSError, lzma.LZMAError) as error:
        raise RunSpecError(
            f"{_PREFIX}{name}: {error}", hint="the installation is damaged: reinstall it"
        ) from error
