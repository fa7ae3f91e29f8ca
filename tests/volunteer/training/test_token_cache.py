"""Files as tokens on the disk: the same text whatever is killed when, and never too much of it."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.volunteer.training.texts import (
    bpe_tokenizer,
    documents,
    milton,
    run_on,
    store_in,
    write_json_lines,
)
from volunteer.data.sources import parse_source
from volunteer.errors import DataUnavailableError
from volunteer.local_data import LocalData
from volunteer.run import RunSpec
from volunteer.training.data import Corpus, load_corpus
from volunteer.training.sources import documents as documents_module
from volunteer.training.sources import files as files_module
from volunteer.training.sources import token_cache as cache_module
from volunteer.training.sources.documents import SEPARATOR, Piece, is_held_out, read_pieces
from volunteer.training.sources.prepare import open_texts, prepare, token_cache
from volunteer.training.sources.token_cache import TokenCache
from volunteer.training.tokenizer import BytesTokenizer, JsonTokenizer, load_tokenizer

KEY = "ab" * 32


def prepared(spec: RunSpec, run_dir: Path, **local: object) -> Corpus:
    tokenizer = load_tokenizer(spec, store_in(run_dir))
    prepare(spec, run_dir, tokenizer, LocalData(**local), lambda: None)  # type: ignore[arg-type]  # by name
    return load_corpus(spec.data, run_dir)


def test_a_text_file_is_cut_in_two_at_its_end(tmp_path: Path) -> None:
    text = milton(5000).encode() + "\u00e9\u4e2d".encode() * 50
    (tmp_path / "a.txt").write_bytes(text)
    (tmp_path / "b.bin").write_bytes(b"no text")
    (only,) = prepared(run_on(f"file:{tmp_path}/*"), tmp_path / "run").texts
    split = len(text) - len(text) // 5
    assert only.training.tobytes() == text[:split]
    assert only.held_out.tobytes() == text[split:]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_documents_are_held_out_by_their_content(tmp_path: Path, kind: str) -> None:
    texts = documents(60)
    write_documents(tmp_path / f"a.{kind}", texts)
    (only,) = prepared(run_on(f"file:{tmp_path}/a.*"), tmp_path / "run").texts
    kept = [t for t in texts if not is_held_out(t.encode(), 0.2)]
    held_out = [t for t in texts if is_held_out(t.encode(), 0.2)]
    assert 4 <= len(held_out) <= 22  # 12 expected
    assert only.training.tobytes() == b"".join(t.encode() + SEPARATOR for t in kept)
    assert only.held_out.tobytes() == b"".join(t.encode() + SEPARATOR for t in held_out)


def write_documents(file: Path, texts: list[str]) -> None:
    if file.suffix == ".jsonl":
        write_json_lines(file, texts)
    else:
        pq.write_table(
            pa.table({"text": texts, "n": list(range(len(texts)))}), file, row_group_size=7
        )


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_a_reader_goes_on_at_any_position(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "PIECE_BYTES", 200)
    file = tmp_path / f"a.{kind}"
    if kind == "txt":
        file.write_bytes(milton(1500).replace("e", "\u00e9").encode() + b"\xf0" * 400)
    else:
        write_documents(file, documents(20, 50))
    whole = list(read_pieces(file, 0, 0.2))
    assert len(whole) > 8
    for i, piece in enumerate(whole):
        assert list(read_pieces(file, piece.position, 0.2)) == whole[i + 1 :]


def test_pieces_of_a_text_end_at_lines_or_characters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "PIECE_BYTES", 100)
    (tmp_path / "a.txt").write_bytes("\u4e2d".encode() * 200 + b"\n" + b"x" * 30 + b"\nlast")
    pieces = [piece.text for piece in read_pieces(tmp_path / "a.txt", 0, 0.0)]
    assert b"".join(pieces).decode("utf-8").count("\u4e2d") == 200
    assert all(piece.decode("utf-8") for piece in pieces)
    assert max(map(len, pieces)) <= 100


def test_lines_that_are_no_documents_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "good"}\n\n{"text": 3}\n{"body": "x"}\n\xff\n' + b"[" * 50_000 + b"\n"
        b'{"text": "also"}\n{"text": "cut off'
    )
    texts = [piece.text for piece in read_pieces(tmp_path / "a.jsonl", 0, 1e-9)]
    assert texts == [b"good" + SEPARATOR, b"also" + SEPARATOR]
    assert "left out: 5" in caplog.text


def test_a_file_of_another_kind_than_its_name_says_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no such thing")
    pq.write_table(pa.table({"body": ["x"]}), tmp_path / "other.parquet")
    (tmp_path / "good.txt").write_text(milton(3000))
    texts = prepared(run_on(f"file:{tmp_path}/*"), tmp_path / "run").texts
    assert [len(text.training) for text in texts] == [2400]
    assert caplog.text.count("left out") == 2
    with pytest.raises(DataUnavailableError):
        list(read_pieces(tmp_path / "bad.parquet", 0, 0.2))


class Killed(BaseException):
    """In the middle."""


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_a_build_killed_at_any_piece_goes_on_to_the_same_tokens(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "PIECE_BYTES", 300)
    monkeypatch.setattr(cache_module, "SAVE_EVERY_BYTES", 700)
    file = tmp_path / f"a.{kind}"
    if kind == "txt":
        file.write_text(milton(4000))
    else:
        write_documents(file, documents(14))
    content = bpe_tokenizer()
    tokenizer = JsonTokenizer(run_on("builtin:milton", tokenizer=content), content)
    num_pieces = len(list(read_pieces(file, 0, 0.2)))
    due = build(TokenCache(tmp_path / "due"), file, tokenizer)
    read = 0
    for kill_at in range(1, num_pieces):
        cache = TokenCache(tmp_path / f"killed{kill_at}")
        with pytest.raises(Killed):
            build(cache, file, tokenizer, kill_at=kill_at)
        assert cache.open(KEY) is None
        started_at = (cache.entry(KEY) or cache_module.Entry()).position
        assert build(cache, file, tokenizer) == due
        read += started_at > 0
    assert read >= num_pieces - 4  # most went on in the middle


def build(
    cache: TokenCache, file: Path, tokenizer: JsonTokenizer | BytesTokenizer, *, kill_at: int = 0
) -> dict[str, str]:
    """Build, and return the hash of each file; die before piece `kill_at`."""

    def pieces_from(start: int) -> Iterator[Piece]:
        for number, piece in enumerate(read_pieces(file, start, 0.2)):
            if kill_at and number == kill_at:
                raise Killed
            yield piece

    cache.build(KEY, pieces_from, tokenizer, max_bytes=2**30)
    assert cache.open(KEY) is not None
    folder = next(f for f in (cache_folder(cache)).iterdir())
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(folder.iterdir())}


def cache_folder(cache: TokenCache) -> Path:
    return cache._directory


def test_the_cache_has_a_limit_and_grows_with_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents_module, "PIECE_BYTES", 200)
    spec = run_on(f"file:{tmp_path}/*.txt")
    (tmp_path / "a.txt").write_text(milton(3000))
    (tmp_path / "b.txt").write_text(milton(3000, start=10_000))
    run_dir = tmp_path / "run"
    small = prepared(spec, run_dir, cache_max_bytes=4000)
    sizes = [len(t.training) + len(t.held_out) for t in small.texts]
    assert 3600 <= sum(sizes) <= 4000
    assert "data_cache_max_bytes" in caplog.text
    files = list((run_dir / "data" / "tokens").rglob("*.bin"))
    assert sum(f.stat().st_size for f in files) == sum(sizes)
    whole = prepared(spec, run_dir, cache_max_bytes=10_000)
    assert [len(t.training) + len(t.held_out) for t in whole.texts] == [3000, 3000]


def test_what_is_not_used_any_more_goes_and_what_has_moved_stays(tmp_path: Path) -> None:
    spec = run_on(f"file:{tmp_path}/*.txt")
    (tmp_path / "a.txt").write_text(milton(3000))
    (tmp_path / "b.txt").write_text(milton(2000, start=9000))
    run_dir = tmp_path / "run"
    prepared(spec, run_dir)
    tokens = run_dir / "data" / "tokens"
    before = {folder.name: (folder / "training.bin").stat().st_ino for folder in tokens.iterdir()}
    (tmp_path / "a.txt").rename(tmp_path / "c.txt")
    (tmp_path / "b.txt").unlink()
    prepared(spec, run_dir)
    after = {folder.name: (folder / "training.bin").stat().st_ino for folder in tokens.iterdir()}
    assert len(after) == 1
    assert after.items() < before.items()


def test_tokens_of_files_that_are_away_stay(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    (drive / "a.txt").write_text(milton(3000))
    spec = run_on(f"file:{drive}/*.txt")
    prepared(spec, tmp_path / "run")
    drive.rename(tmp_path / "elsewhere")
    assert prepared(spec, tmp_path / "run").texts == ()
    assert list((tmp_path / "run" / "data" / "tokens").iterdir())


def test_a_changed_file_is_another(tmp_path: Path) -> None:
    spec = run_on(f"file:{tmp_path}/*.txt")
    (tmp_path / "a.txt").write_text(milton(3000))
    prepared(spec, tmp_path / "run")
    (tmp_path / "a.txt").write_text(milton(3000, start=40))
    (text,) = prepared(spec, tmp_path / "run").texts
    assert text.training.tobytes() == milton(2400, start=40).encode()


def test_tampered_tokens_are_not_opened(tmp_path: Path) -> None:
    spec = run_on(f"file:{tmp_path}/*.txt")
    (tmp_path / "a.txt").write_text(milton(3000))
    prepared(spec, tmp_path / "run")
    source = parse_source(spec.data.sources[0])
    file = next((tmp_path / "run" / "data" / "tokens").rglob("training.bin"))
    file.write_bytes(file.read_bytes()[:-1])
    assert open_texts(tmp_path / "run", source) is None
    with pytest.raises(DataUnavailableError, match="not been prepared"):
        load_corpus(spec.data, tmp_path / "run")
    assert token_cache(tmp_path / "run").open("../../etc") is None


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [True, False])
def test_damaged_tokens_are_made_anew(
    tmp_path: Path, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, folder = run_on(f"file:{tmp_path}/*.jsonl"), tmp_path / "run"
    monkeypatch.setattr(cache_module, "SAVE_EVERY_BYTES", 0)
    write_json_lines(tmp_path / "a.jsonl", documents(20))
    (text,) = prepared(spec, folder).texts
    whole = bytes(text.training)
    (training,) = folder.rglob("training.bin")
    entry = json.loads((training.parent / "entry.json").read_bytes()) | {"is_whole": is_whole}
    (training.parent / "entry.json").write_text(json.dumps(entry))
    del text
    os.truncate(training, 10)
    assert bytes(prepared(spec, folder).texts[0].training) == whole


def test_odd_names_links_and_damage_cost_no_more_than_the_file(tmp_path: Path) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "not utf-8.parquet").write_bytes(parquet_of_bytes(b"\xff\xfe", b"abc"))
    odd_name = os.fsencode(folder) + b"/na\xefve.txt"
    with open(odd_name, "wb") as stream:
        stream.write(b"mine " * 100)
    spec = run_on("builtin:milton", "private:")
    with mock.patch.object(files_module, "_SETTLED_NS", -(10**18)):  # so that it is remembered
        corpus = prepared(spec, tmp_path / "run", private_dir=str(folder))
    (text,) = (text for text in corpus.texts if text.name == "private:")
    assert bytes(text.training) == b"mine " * 100


def parquet_of_bytes(*texts: bytes) -> bytes:
    """Return a parquet file whose column `text` says that it is text, whatever it holds."""
    ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
    buffers = [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(texts))]
    column = pa.Array.from_buffers(pa.string(), len(texts), buffers)
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": column}), sink)
    return sink.getvalue()


def test_texts_of_the_package_are_tokenized_too_and_never_held_out_differently(
    tmp_path: Path,
) -> None:
    content = bpe_tokenizer()
    spec = run_on("builtin:milton", tokenizer=content, held_out_fraction=0.05)
    store_in(tmp_path).add_bytes(content)
    (text,) = prepared(spec, tmp_path).texts
    (as_bytes,) = load_corpus(run_on("builtin:milton", held_out_fraction=0.05).data).texts
    tokenizer = JsonTokenizer(spec, content)
    assert text.held_out_bytes is not None
    assert int(text.held_out_bytes.sum()) == len(as_bytes.held_out)
    assert tokenizer.decode(text.held_out.tolist()) == as_bytes.held_out.tobytes()
    assert isinstance(text.training, np.memmap)
