"""How the training text is parted among workers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from tests.volunteer.lab.tiny import tiny_task
from volunteer.errors import ConfigError
from volunteer.lab.training.shards import balanced_clusters, byte_frequencies, shards_of
from volunteer.lab.training.task import corpus_of
from volunteer.training.data import Corpus


def num_bytes(corpus: Corpus) -> int:
    return sum(len(text.training) for text in corpus.texts)


@pytest.mark.slow
def test_clusters_part_the_training_text_into_equal_and_unlike_shards() -> None:
    task = tiny_task()
    corpus = corpus_of(task)
    shards = shards_of(task, "clusters", 4, 0)
    sizes = [num_bytes(shard) for shard in shards]
    assert sum(sizes) == num_bytes(corpus)
    assert max(sizes) - min(sizes) < 0.05 * max(sizes)
    assert all(len(text.held_out) == 0 for shard in shards for text in shard.texts)
    kinds = byte_frequencies([np.concatenate([t.training for t in s.texts]) for s in shards])
    everything = np.concatenate([text.training for text in corpus.texts])
    dealt = byte_frequencies([everything[i::4] for i in range(4)])
    assert spread(kinds) > 100 * spread(dealt)
    again = shards_of(task, "clusters", 4, 0)
    assert [num_bytes(shard) for shard in again] == sizes


def spread(features: npt.NDArray[np.float64]) -> float:
    return float(((features - features.mean(axis=0)) ** 2).sum())


def test_balanced_clusters_find_what_belongs_together() -> None:
    rng = np.random.default_rng(0)
    features = np.concatenate([rng.normal(centre, 0.1, (10, 3)) for centre in (0.0, 5.0, 9.0)])
    labels = balanced_clusters(features, 3, 1)
    assert sorted(np.bincount(labels)) == [10, 10, 10]
    assert all(len(set(labels[start : start + 10])) == 1 for start in (0, 10, 20))


def test_sources_give_one_text_a_worker() -> None:
    task = tiny_task()
    texts = [[text.name for text in shard.texts] for shard in shards_of(task, "sources", 3, 0)]
    assert texts == [["milton"], ["folio"], ["milton"]]
    with pytest.raises(ConfigError):
        shards_of(task, "sources", 1, 0)


def test_an_outlier_reads_the_last_text_alone() -> None:
    shards = shards_of(tiny_task(), "outlier", 3, 0)
    assert [len(shard.texts) for shard in shards] == [2, 2, 1]
