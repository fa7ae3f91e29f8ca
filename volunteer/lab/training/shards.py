"""Who reads what: the whole corpus, or parts of it that differ as much as can be.

Runs in: lab. Pure: a function of texts, sharding, number of workers and seed.

`clusters` is the non-iid setting of DiLoCo (arXiv:2311.08105, section 3.1: k-means over features of
a pretrained model). Differs: the features are frequencies of bytes, of contiguous pieces of text,
and the clusters are of equal size, so that all workers have as much to read.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from volunteer.errors import ConfigError
from volunteer.lab.training.task import LabTask, corpus_of
from volunteer.training.data import Corpus, Text, Tokens

Sharding = Literal["shared", "clusters", "sources", "outlier"]
"""`shared`: everyone reads all (iid); `clusters`: k-means; `sources`: one text a worker, in turn;
`outlier`: everyone reads all but the last worker, who reads the last text alone."""
PIECE_BYTES = 4096
_TURNS = 25
_NOTHING: Tokens = np.empty(0, dtype=np.uint8)


def shards_of(task: LabTask, sharding: Sharding, num_workers: int, seed: int) -> tuple[Corpus, ...]:
    """Return what each worker reads; held-out text is in none of them.

    Raises:
        ConfigError: there are fewer texts than workers need.
    """
    corpus = corpus_of(task)
    if sharding == "shared":
        return (corpus,) * num_workers
    texts = corpus.texts
    if sharding == "outlier":
        return (*(corpus,) * (num_workers - 1), Corpus((texts[-1],)))
    if sharding == "sources":
        if num_workers < len(texts):
            raise ConfigError("one text a worker needs as many workers as texts")
        return tuple(Corpus((texts[i % len(texts)],)) for i in range(num_workers))
    return _cluster_shards(corpus, num_workers, seed)


def _cluster_shards(corpus: Corpus, num_workers: int, seed: int) -> tuple[Corpus, ...]:
    pieces = [
        (text_index, start)
        for text_index, text in enumerate(corpus.texts)
        for start in range(0, len(text.training), PIECE_BYTES)
    ]
    parts = [corpus.texts[i].training[s : s + PIECE_BYTES] for i, s in pieces]
    labels = balanced_clusters(byte_frequencies(parts), num_workers, seed)
    shards = []
    for worker in range(num_workers):
        mine = [piece for piece, label in zip(pieces, labels, strict=True) if label == worker]
        shards.append(Corpus(tuple(_joined(corpus, mine))))
    return tuple(shards)


def _joined(corpus: Corpus, pieces: list[tuple[int, int]]) -> list[Text]:
    """Return the pieces as texts, neighbours in one; no window crosses from text to text."""
    texts = []
    begin = 0
    for i, (text_index, start) in enumerate(pieces):
        is_last = i + 1 == len(pieces) or pieces[i + 1] != (text_index, start + PIECE_BYTES)
        if is_last:
            text = corpus.texts[text_index]
            training = text.training[pieces[begin][1] : start + PIECE_BYTES]
            texts.append(Text(name=text.name, training=training, held_out=_NOTHING))
            begin = i + 1
    return texts


def byte_frequencies(parts: list[Tokens]) -> npt.NDArray[np.float64]:
    """Return the square roots of each part's byte frequencies, shape (pieces, 256), norm 1."""
    counts = np.stack([np.bincount(part, minlength=256) for part in parts]).astype(np.float64)
    return np.asarray(np.sqrt(counts / counts.sum(axis=1, keepdims=True)))


def balanced_clusters(
    features: npt.NDArray[np.float64], num_clusters: int, seed: int
) -> npt.NDArray[np.int64]:
    """Return a cluster for each row: k-means whose clusters are equally large, give or take one.

    Each turn assigns the rows to the nearest centre that has room, those first for which the choice
    matters most (nearest against second nearest), and moves the centres.
    """
    rng = np.random.default_rng(seed)
    centres = features[rng.choice(len(features), num_clusters, replace=False)]
    labels = np.full(len(features), -1, dtype=np.int64)
    for _ in range(_TURNS):
        distances = ((features[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2)
        before, labels = labels, _assign(distances)
        if bool((labels == before).all()):
            break
        centres = np.stack([features[labels == c].mean(axis=0) for c in range(num_clusters)])
    return labels


def _assign(distances: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    num_rows, num_clusters = distances.shape
    room = [num_rows // num_clusters + (c < num_rows % num_clusters) for c in range(num_clusters)]
    ordered = np.sort(distances, axis=1)
    regret = ordered[:, min(1, num_clusters - 1)] - ordered[:, 0]
    labels = np.empty(num_rows, dtype=np.int64)
    for row in np.argsort(-regret, kind="stable"):
        for cluster in np.argsort(distances[row], kind="stable"):
            if room[cluster]:
                labels[row] = cluster
                room[cluster] -= 1
                break
    return labels
