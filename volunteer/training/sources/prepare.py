"""Makes tokens of what a run's sources name on this machine, before the first step.

Runs in: trainer (`prepare`), aggregator (`open_texts`).

    RUN_DIR/data/tokens/      the token cache
    RUN_DIR/data/files.json   hashes of files
    RUN_DIR/data/index.json   which tokens belong to which source

A kill leaves each of them old or new. A file that cannot be read is left out, with the reason in
the log; what is private is neither named nor counted there.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from blake3 import blake3

from volunteer.data.sources import Source, SourceKind, parse_source
from volunteer.errors import DataUnavailableError
from volunteer.files import make_private_dir, replace_file
from volunteer.local_data import LocalData
from volunteer.run import RunSpec
from volunteer.training.sources.builtin_texts import read_builtin_text
from volunteer.training.sources.documents import Piece, read_pieces, read_text
from volunteer.training.sources.files import ContentHashes, files_of_folder, files_of_glob
from volunteer.training.sources.token_cache import CachedText, Entry, TokenCache, cache_key
from volunteer.training.tokenizer import Tokenizer

TELL_EVERY_S = 5.0
_STREAM_HELD_OUT = b"allmende/stream-held-out/1\x00"

_log = logging.getLogger(__name__)


class Index(msgspec.Struct, frozen=True, kw_only=True):
    """Which tokens belong to which source."""

    keys_by_source: dict[str, tuple[str, ...]]


def data_dir(run_dir: Path) -> Path:
    """Return the folder of a run's own data."""
    return run_dir / "data"


def token_cache(run_dir: Path) -> TokenCache:
    """Return the token cache of a run."""
    return TokenCache(data_dir(run_dir) / "tokens")


def needs_cache(spec: RunSpec) -> bool:
    """Tell whether anything has to be prepared: the texts of the package are bytes already."""
    kinds = {parse_source(text).kind for text in spec.data.sources}
    return spec.data.tokenizer != "bytes" or kinds != {SourceKind.BUILTIN}


def stream_key(spec: RunSpec, source: Source) -> str:
    """Return the cache's name for what is held out of a stream."""
    wanted = f"{source.text}/{held_out_bytes(spec)}".encode()
    content = blake3(_STREAM_HELD_OUT + wanted).hexdigest()
    return cache_key(content, spec.data.tokenizer, spec.data.held_out_fraction)


def held_out_bytes(spec: RunSpec) -> int:
    """Return the bytes of text that are held out of a stream: enough for every window."""
    return 8 * spec.evaluation.num_sequences * (spec.model.context_tokens + 1)


def prepare(
    spec: RunSpec,
    run_dir: Path,
    tokenizer: Tokenizer,
    local: LocalData,
    tell: Callable[[], None],
) -> None:
    """Have the tokens of every source that is on this machine.

    Args:
        spec: the run.
        run_dir: its folder.
        tokenizer: of the run.
        local: what the owner says about data.
        tell: called every few seconds: this may take hours.

    Raises:
        StorageFullError: the disk is full; what was done stands.
    """
    make_private_dir(data_dir(run_dir))
    _Preparation(spec, run_dir, tokenizer, local, _rarely(tell)).run()


def open_texts(run_dir: Path, source: Source) -> tuple[CachedText, ...] | None:
    """Memory-map the tokens of a source; None: they have not been prepared.

    They come in the order of their content's hash: the same for all who have the same files.
    """
    try:
        content = (data_dir(run_dir) / "index.json").read_bytes()
        keys = msgspec.json.decode(content, type=Index).keys_by_source.get(source.text)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if keys is None:
        return None
    cache = token_cache(run_dir)
    texts = [cache.open(key) for key in keys]
    if any(text is None for text in texts):
        return None
    return tuple(text for text in texts if text is not None)


class _Preparation:
    def __init__(
        self,
        spec: RunSpec,
        run_dir: Path,
        tokenizer: Tokenizer,
        local: LocalData,
        tell: Callable[[], None],
    ) -> None:
        self._spec = spec
        self._run_dir = run_dir
        self._tokenizer = tokenizer
        self._local = local
        self._tell = tell
        self._cache = token_cache(run_dir)
        self._hashes = ContentHashes(data_dir(run_dir) / "files.json")
        self._used_bytes = 0

    def run(self) -> None:
        keys_by_source: dict[str, tuple[str, ...]] = {}
        for text in self._spec.data.sources:
            source = parse_source(text)
            if source.kind is SourceKind.HF:
                keys_by_source[text] = (stream_key(self._spec, source),)
            elif source.kind is not SourceKind.BUILTIN:
                keys_by_source[text] = self._keys_of_files(source)
            elif self._spec.data.tokenizer != "bytes":
                keys_by_source[text] = (self._key_of_builtin(source),)
        self._hashes.save()
        index_file = data_dir(self._run_dir) / "index.json"
        replace_file(index_file, msgspec.json.encode(Index(keys_by_source=keys_by_source)))
        if all(keys_by_source.values()):  # else a drive may be away just now
            self._cache.keep_only(frozenset().union(*keys_by_source.values()))

    def _key_of_builtin(self, source: Source) -> str:
        content = read_builtin_text(source.name).tobytes()
        key = self._key(blake3(content).hexdigest(), source)
        fraction = self._spec.data.held_out_fraction

        def pieces_from(start: int) -> Iterator[Piece]:
            return read_text(io.BytesIO(content), len(content), start, fraction)

        self._build(key, pieces_from, source)
        return key

    def _keys_of_files(self, source: Source) -> tuple[str, ...]:
        keys: set[str] = set()
        files = self._files(source)
        for file in files:
            try:
                key = self._key(self._hashes.hash_of(file, self._tell), source)
                if key not in keys:
                    self._build(key, self._reader(file, source), source)
                    keys.add(key)
            except (OSError, DataUnavailableError) as error:
                _log.warning("%s: left out: %s", *_named(file, source, error))
        if not files and source.is_public:
            _log.warning("%s: no file is there", source.text)
        elif not files and self._local.private_dir:
            _log.warning("the folder that `private_data` names is not there, or has no text")
        return tuple(sorted(keys))

    def _files(self, source: Source) -> list[Path]:
        if source.is_public:
            return files_of_glob(source.name)
        folder = self._local.private_dir
        return files_of_folder(Path(folder).expanduser()) if folder else []

    def _reader(self, file: Path, source: Source) -> Callable[[int], Iterator[Piece]]:
        fraction = self._fraction(source)
        return lambda start: read_pieces(file, start, fraction)

    def _build(
        self, key: str, pieces_from: Callable[[int], Iterator[Piece]], source: Source
    ) -> Entry:
        def told(start: int) -> Iterator[Piece]:
            for piece in pieces_from(start):
                self._tell()
                yield piece

        room = self._local.cache_max_bytes - self._used_bytes
        name = source.text if source.is_public else ""
        entry = self._cache.build(key, told, self._tokenizer, max_bytes=room, name=name)
        self._used_bytes += entry.num_bytes
        if entry.is_cut and source.is_public:
            _log.warning("%s: no room for all of it (`data_cache_max_bytes`)", source.text)
        return entry

    def _fraction(self, source: Source) -> float:
        return self._spec.data.held_out_fraction if source.is_public else 0.0

    def _key(self, content_hash: str, source: Source) -> str:
        return cache_key(content_hash, self._spec.data.tokenizer, self._fraction(source))


def _named(file: Path, source: Source, error: Exception) -> tuple[str, str]:
    """Return the file and the reason for the log; of a private one, no more than that it is one."""
    if source.is_public:
        return str(file), str(error)
    return "a private file", type(error).__name__


def _rarely(tell: Callable[[], None]) -> Callable[[], None]:
    told_at_s = time.monotonic()

    def tell_now_and_then() -> None:
        nonlocal told_at_s
        if time.monotonic() - told_at_s >= TELL_EVERY_S:
            told_at_s = time.monotonic()
            tell()

    return tell_now_and_then
