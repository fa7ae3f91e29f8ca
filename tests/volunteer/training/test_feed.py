"""The feed: which windows a step reads, whoever fails, and where a restart goes on."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from p2p.blobstore import BlobStore
from tests.volunteer.training.test_stream import ListDataset, shards
from tests.volunteer.training.texts import (
    bpe_tokenizer,
    documents,
    run_on,
    store_in,
    write_json_lines,
)
from tests.volunteer.training.tiny_run import tiny_spec
from volunteer.data.sources import Source, SourceKind, parse_source
from volunteer.errors import DataUnavailableError
from volunteer.local_data import LocalData, write_local_data
from volunteer.run import RunSpec
from volunteer.training.data import load_corpus, training_windows
from volunteer.training.evaluation import evaluate_run
from volunteer.training.feed import Feed
from volunteer.training.genesis import build_genesis
from volunteer.training.open_feed import open_feed
from volunteer.training.sources.hub import HubDataset
from volunteer.training.tokenizer import load_tokenizer


def never() -> bool:
    return False


def feed_of(
    spec: RunSpec, run_dir: Path, dataset: ListDataset | None = None, peer: bytes = b"me"
) -> Feed:
    def open_list(source: Source, cache_dir: Path) -> ListDataset:
        assert dataset is not None
        return dataset

    open_dataset = HubDataset if dataset is None else open_list
    store = store_in(run_dir)
    return open_feed(spec, peer, run_dir, store, tell=lambda: None, open_dataset=open_dataset)


def read(feed: Feed, steps: range) -> list[bytes]:
    """Return the windows of some steps, as bytes."""
    found = []
    for step in steps:
        windows = feed.windows(step, never)
        assert windows is not None
        found += [window.tobytes() for window in windows]
    return found


def test_the_texts_of_the_package_are_read_as_ever(tmp_path: Path) -> None:
    spec = tiny_spec()
    feed = feed_of(spec, tmp_path)
    for step in (0, 7):
        due = training_windows(
            load_corpus(spec.data),
            run_id=spec.run_id,
            peer_seed=b"me",
            inner_step=step,
            num_sequences=4,
            context_tokens=16,
        )
        assert np.array_equal(feed.windows(step, never), due)  # type: ignore[arg-type]  # not None
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_two_volunteers_meet_as_often_as_chance_has_it(tmp_path: Path) -> None:
    """Of 2,000 windows that each reads of 7,184, they share what chance says, and no more."""
    (tmp_path / "a.txt").write_bytes(b"".join(f"{i:06d}".encode() for i in range(2000)))
    spec = run_on(f"file:{tmp_path}/a.txt", held_out_fraction=0.4)
    reads = [
        Counter(read(feed_of(spec, tmp_path / "run", peer=peer), range(500)))
        for peer in (b"a", b"b")
    ]
    num_windows = 7200 - 16
    pairs = sum(count * reads[1][window] for window, count in reads[0].items())
    expected = 2000 * 2000 / num_windows  # 557, with a deviation of 27
    assert abs(pairs - expected) < 5 * expected**0.5 * 1.3


@pytest.mark.slow
def test_two_volunteers_of_a_stream_share_no_window_until_they_meet(tmp_path: Path) -> None:
    dataset = ListDataset(shards(8, 200))
    spec = run_on("hf:a/x")
    reads = []
    for peer in (b"a", b"b", b"c"):
        feed = feed_of(spec, tmp_path / peer.decode(), dataset, peer)
        feed.restore(0)
        reads.append(set(read(feed, range(20))))
        feed.close()
    for one, other in itertools.combinations(reads, 2):
        assert not one & other
        assert len(one) == 80


def test_a_restart_goes_on_where_its_snapshot_was(tmp_path: Path) -> None:
    dataset, spec = ListDataset(shards(3, 60)), run_on("hf:a/x", "builtin:milton")
    feed = feed_of(spec, tmp_path, dataset)
    feed.restore(0)
    feed.save(0)
    due = []
    for step in range(12):
        due.append(read(feed, range(step, step + 1)))
        if step + 1 in (4, 8):
            feed.save(step + 1)
    feed.close()
    for snapshot in (8, 4, 0):
        again = feed_of(spec, tmp_path, dataset)
        again.restore(snapshot)
        for step in range(snapshot, 12):
            assert read(again, range(step, step + 1)) == due[step]
        again.close()
    # One with a snapshot between two that were saved takes the earlier: it repeats, and skips none.
    between = feed_of(spec, tmp_path, dataset)
    between.restore(6)
    assert set(read(between, range(6, 8))) & set(due[4])
    between.close()


@pytest.mark.slow
def test_every_source_is_read_as_often(tmp_path: Path) -> None:
    dataset = ListDataset([["#" * 5000 + str(i) for i in range(50)]])
    spec = run_on("hf:a/x", "builtin:milton", "builtin:folio")
    feed = feed_of(spec, tmp_path, dataset)
    feed.restore(0)
    windows = read(feed, range(300))
    feed.close()
    from_stream = sum(window.count(b"#") > 8 for window in windows)
    assert abs(from_stream - 400) < 5 * (1200 * 1 / 3 * 2 / 3) ** 0.5


def test_texts_stand_in_for_a_stream_that_gives_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volunteer.training.feed.PATIENCE_S", 0.01)
    dataset = ListDataset(shards(1, 50))
    dataset.failures = 10**9
    spec = run_on("hf:a/x", "builtin:milton")
    feed = feed_of(spec, tmp_path, dataset)
    feed.restore(0)
    texts = read(Feed(spec, b"me", load_corpus(spec.data)), range(5))
    assert read(feed, range(5)) == texts
    feed.close()


def test_without_anything_it_waits_then_says_why_and_obeys_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("volunteer.training.feed._LOOK_EVERY_S", 0.005)
    monkeypatch.setattr("volunteer.training.feed.LONGEST_WAIT_S", 0.05)
    dataset = ListDataset(shards(1, 50))
    dataset.failures = 10**9
    feed = feed_of(run_on("hf:a/x"), tmp_path, dataset)
    feed.restore(0)
    assert feed.windows(0, lambda: True) is None
    with pytest.raises(DataUnavailableError, match=r"the line is dead|gives nothing"):
        feed.windows(0, never)
    feed.close()


def test_nothing_on_this_machine_is_told_and_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError, match="has text on this machine"):
        feed_of(run_on(f"file:{tmp_path}/none/*.txt"), tmp_path)


@pytest.mark.slow
def test_a_folder_of_datasets_is_streamed(tmp_path: Path) -> None:
    texts = documents(120)
    for i in range(4):
        write_json_lines(tmp_path / "set" / f"train-{i}.jsonl", texts[i * 30 : (i + 1) * 30])
    content = bpe_tokenizer()
    spec = run_on(f"hf:{tmp_path}/set", tokenizer=content)
    store_in(tmp_path / "run").add_bytes(content)
    feed = feed_of(spec, tmp_path / "run")
    feed.restore(0)
    found = [feed.windows(step, never) for step in range(10)]
    feed.save(10)
    tokenizer = load_tokenizer(spec, store_in(tmp_path / "run"))
    (tmp_path / "all.txt").write_text("\n\n".join(texts))
    for windows in found:
        assert windows is not None
        assert windows.shape == (4, 17)
        assert windows.dtype == np.uint16
    first = tokenizer.decode(found[0][0].tolist()).decode()  # type: ignore[index]  # not None
    assert first.split("\n\n")[0] in "\n\n".join(texts)
    feed.close()
    again = feed_of(spec, tmp_path / "run")
    again.restore(10)
    assert not set(read(again, range(10, 12))) & {w.tobytes() for ws in found for w in ws}  # type: ignore[union-attr]  # not None
    again.close()
    weights_P = build_genesis(spec).weights_P
    found_loss = evaluate_run(spec, weights_P, tmp_path / "run", should_stop=never)
    assert 1.0 < found_loss.nats_per_byte < 5.0  # log(400) a token of less than 3 bytes


def test_a_dataset_named_as_a_folder_of_this_machine_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json_lines(tmp_path / "home" / "me" / "train.jsonl", documents(3))
    monkeypatch.chdir(tmp_path)
    source = Source(text="hf:home/me", kind=SourceKind.HF, name="home/me")
    with pytest.raises(DataUnavailableError, match="is a folder of this machine"):
        HubDataset(source, tmp_path / "hub").num_shards()


def test_a_dataset_of_the_hub_sends_nobody_to_files_of_his_own_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = importlib.import_module("datasets")
    write_json_lines(tmp_path / "home" / "diary.jsonl", documents(3))
    hub = tmp_path / "what the hub sends"
    hub.mkdir()
    (hub / "README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files:\n"
        f"  - split: train\n    path: {tmp_path}/home/*.jsonl\n---\n"
    )
    open_builder = datasets.load_dataset_builder

    def of_the_hub(_name: str, config: str | None, **options: object) -> object:
        return open_builder(str(hub), config, **options)

    monkeypatch.setattr(datasets, "load_dataset_builder", of_the_hub)
    dataset = HubDataset(parse_source("hf:evil/texts"), tmp_path / "cache")
    with pytest.raises(DataUnavailableError, match="not on the hub"):
        next(dataset.read(0, 0))


def test_a_dataset_that_is_none_is_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    dataset = HubDataset(
        Source(text="hf:empty", kind=SourceKind.HF, name=str(tmp_path / "empty")), tmp_path / "hub"
    )
    with pytest.raises(DataUnavailableError, match="hf:empty cannot be read"):
        dataset.num_shards()


SECRET = "Vilhelmina-Ostergaard-4711"


def test_of_private_text_nothing_is_outside_the_runs_own_cache(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "diary of mine"
    folder.mkdir()
    (folder / "letter.txt").write_text(f"{SECRET} " * 200)
    (folder / "unreadable.parquet").write_bytes(b"PAR1")
    (tmp_path / "elsewhere.txt").write_text("out of bounds " * 100)
    (folder / "link.txt").symlink_to(tmp_path / "elsewhere.txt")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    write_local_data(run_dir, LocalData(private_dir=str(folder)))
    spec = run_on("builtin:milton", "private:")
    caplog.set_level("DEBUG")
    feed = feed_of(spec, run_dir)
    corpus = load_corpus(spec.data, run_dir)
    private = [text for text in corpus.texts if text.name == "private:"]
    assert [len(text.held_out) for text in private] == [0]  # all is trained on, link left out
    assert private[0].training.tobytes() == (folder / "letter.txt").read_bytes()
    assert all(text.name != "private:" for text in load_corpus(spec.data, only_public=True).texts)
    assert read(feed, range(3))
    found = evaluate_run(spec, build_genesis(spec).weights_P, run_dir, should_stop=never)
    assert found.num_windows == 64
    for private_word in (SECRET, "diary", "letter", "elsewhere", str(folder)):
        assert private_word not in caplog.text
    outside = [f for f in run_dir.rglob("*") if f.is_file()]
    holders = {f.name for f in outside if SECRET.encode() in f.read_bytes()}
    assert holders == {"training.bin"}
    tellers = {f.name for f in outside if b"diary" in f.read_bytes()}
    assert tellers <= {"local_data.json", "files.json"}
    assert all(f.stat().st_mode & 0o077 == 0 for f in outside if f.name in tellers | holders)


def test_a_private_folder_without_text_is_told_and_not_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_local_data(tmp_path, LocalData(private_dir=str(tmp_path / "diary")))
    feed_of(run_on("builtin:milton", "private:"), tmp_path)
    assert "`private_data`" in caplog.text
    assert "diary" not in caplog.text


def test_the_store_is_only_asked_for_the_tokenizer(tmp_path: Path) -> None:
    spec = run_on("builtin:milton", tokenizer=bpe_tokenizer())
    with pytest.raises(DataUnavailableError, match="tokenizer"):
        open_feed(spec, b"me", tmp_path, BlobStore(tmp_path / "b"), tell=lambda: None)
