"""What a RunSpec may name as data, and which of it needs the owner's word.

Runs in: every process. Pure: nothing is opened here.

    builtin:NAME                   a text of the package
    file:GLOB                      text, JSON Lines and parquet on this machine's disk
    hf:OWNER/NAME[@CONFIG][:SPLIT] a dataset of the Hugging Face hub, or of a folder, streamed
    private:                       the folder that the owner's config names; it stays here
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

MAX_SOURCE_CHARS = 1000
DEFAULT_SPLIT = "train"
FORMS = "builtin:NAME, file:GLOB, hf:OWNER/NAME[@CONFIG][:SPLIT] or private:"
_NAME = r"\w[\w.\-]{0,95}"
# A name without an owner would mean a reader of the library, and so the current folder's files.
_HF = re.compile(
    rf"(?P<name>{_NAME}/{_NAME}|/[^@:]+)(?:@(?P<config>{_NAME}))?(?::(?P<split>{_NAME}))?"
)
_ABSOLUTE = re.compile(r"/|~/|[A-Za-z]:[\\/]")


class SourceKind(Enum):
    """Where data comes from."""

    BUILTIN = "builtin"
    FILE = "file"
    HF = "hf"
    PRIVATE = "private"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One entry of `data.sources`."""

    text: str
    """As the RunSpec has it."""
    kind: SourceKind
    name: str = ""
    """Of the text or the dataset; the glob of files."""
    config: str = ""
    """Of a dataset that comes in several; empty: its default."""
    split: str = DEFAULT_SPLIT

    @property
    def is_on_disk(self) -> bool:
        """Whether it names files of the volunteer's own machine, by path."""
        return self.kind is SourceKind.FILE or (
            self.kind is SourceKind.HF and self.name.startswith("/")
        )

    @property
    def is_stream(self) -> bool:
        """Whether it is read from its beginning on, and not at any place."""
        return self.kind is SourceKind.HF

    @property
    def is_public(self) -> bool:
        """Whether every member can have it, so that a held-out part of it can be compared."""
        return self.kind is not SourceKind.PRIVATE


def parse_source(text: str) -> Source:
    """Return what `text` names.

    Raises:
        ValueError: it is of none of the forms; the message says why.
    """
    prefix, colon, rest = text.partition(":")
    kind = next((kind for kind in SourceKind if kind.value == prefix), None)
    if not colon or kind is None or len(text) > MAX_SOURCE_CHARS or not text.isprintable():
        raise ValueError(f"{text[:100]!r} is not of the form {FORMS}")
    if kind is SourceKind.PRIVATE:
        if rest:
            raise ValueError("private: takes no name: each owner's config names his own folder")
        return Source(text=text, kind=kind)
    if kind is SourceKind.HF:
        return _parse_hf(text, rest)
    if kind is SourceKind.FILE and not _ABSOLUTE.match(rest):
        raise ValueError(f"{text[:100]!r}: a path begins with / or ~/")
    if not rest:
        raise ValueError(f"{text!r} is not of the form {FORMS}")
    return Source(text=text, kind=kind, name=rest)


def _parse_hf(text: str, rest: str) -> Source:
    found = _HF.fullmatch(rest)
    if found is None or ".." in found["name"]:
        raise ValueError(f"{text[:100]!r} is not of the form hf:OWNER/NAME[@CONFIG][:SPLIT]")
    return Source(
        text=text,
        kind=SourceKind.HF,
        name=found["name"],
        config=found["config"] or "",
        split=found["split"] or DEFAULT_SPLIT,
    )


def source_problems(texts: Sequence[str]) -> list[str]:
    """Return what is wrong with `data.sources`, a sentence each."""
    problems, sources = [], []
    for text in texts:
        try:
            sources.append(parse_source(text))
        except ValueError as error:
            problems.append(f"data.sources: {error}")
    if sources and not problems and not any(source.is_public for source in sources):
        problems.append("data.sources: private: alone has no text that all can measure the loss on")
    return problems


def sources_on_disk(texts: Sequence[str]) -> tuple[str, ...]:
    """Return those of valid `data.sources` that name files of this machine by path."""
    return tuple(text for text in texts if parse_source(text).is_on_disk)
