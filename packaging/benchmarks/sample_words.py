"""How many of the words that a state writes are words: the share that occurs in held-out text.

    python packaging/benchmarks/sample_words.py DIR [--samples 20] [--tokens 300] [--json]

DIR is a kept demo (`allmende demo --keep DIR`), an agent's data folder (ALLMENDE_HOME), or the
folder of one run; the agents must have ended. The latest state that the agent has applied writes
`--samples` texts, each from a seed of its own and an empty prompt, as `allmende sample` does. Of
all words of three letters or more that are whole, counted is the share that occurs anywhere in the
run's held-out text. Exit status: 0 if the share is at least `--target`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from p2p.blobstore import BlobStore  # noqa: E402 - from the checkout that this file lies in
from volunteer.messages import DEFAULT_TEMPERATURE, Generate  # noqa: E402
from volunteer.run import RunSpec, read_run_spec  # noqa: E402
from volunteer.stats.ledger import Ledger  # noqa: E402
from volunteer.training.data import load_corpus  # noqa: E402
from volunteer.training.evaluation import evaluate  # noqa: E402
from volunteer.training.layout import num_parameters  # noqa: E402
from volunteer.training.sample import answer  # noqa: E402
from volunteer.training.state import read_state  # noqa: E402

WORD = re.compile(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)*")
MIN_LETTERS = 3


def words_of(text: str) -> list[str]:
    """Return the words of three letters or more, in lower case."""
    return [word for word in WORD.findall(text.lower()) if len(word) >= MIN_LETTERS]


def whole_words(text: str) -> list[str]:
    """Return the words of a text that was cut off at its end, without what the cut has left."""
    return words_of(text[: len(text) - len(re.split(r"\s", text)[-1])])


def run_dir_of(folder: Path) -> Path:
    """Return the folder of the run in a kept demo's, an agent's or a run's own folder."""
    for candidates in ([folder], folder.glob("runs/*"), folder.glob("volunteer-0/runs/*")):
        found = [each for each in candidates if (each / "spec.toml").is_file()]
        if len(found) == 1:
            return found[0]
    raise SystemExit(f"{folder}: no folder of exactly one run")


def latest_state(run_dir: Path, spec: RunSpec) -> tuple[str, int]:
    """Return the hash and the round of the last state in the agent's ledger."""
    ledger = Ledger(run_dir.parents[1] / "stats.sqlite")
    point = ledger.history(spec.run_id, "dense", 1)[-1]
    return point.state_hash, point.round_index


def measure(folder: Path, *, samples: int, tokens: int, temperature: float) -> dict[str, Any]:
    """Write the texts and count."""
    run_dir = run_dir_of(folder)
    spec = read_run_spec(run_dir / "spec.toml")
    store = BlobStore(run_dir / "modules" / "dense" / "blobs")
    state_hash, round_index = latest_state(run_dir, spec)
    held_out = [
        text.held_out.tobytes().decode("utf-8", "replace") for text in load_corpus(spec.data).texts
    ]
    vocabulary = {word for text in held_out for word in words_of(text)}
    began_s, texts = time.monotonic(), []
    for seed in range(samples):
        command = Generate(max_tokens=tokens, temperature=temperature, seed=seed)
        texts.append(answer(spec, store, state_hash, command).text)
    sample_s = (time.monotonic() - began_s) / samples
    words = [word for text in texts for word in whole_words(text)]
    weights_P = read_state(store.file_of(state_hash), num_parameters(spec.model)).weights_P
    loss = evaluate(spec, weights_P, load_corpus(spec.data))
    return {
        "run": spec.name,
        "run_id": spec.run_id,
        "round": round_index,
        "state_hash": state_hash,
        "held_out_loss_nats_per_byte": loss.nats_per_byte,
        "loss_stderr": loss.stderr,
        "temperature": temperature,
        "samples": samples,
        "vocabulary": len(vocabulary),
        "words": len(words),
        "share": sum(word in vocabulary for word in words) / max(1, len(words)),
        "seconds_per_sample": sample_s,
        "texts": texts,
    }


def main() -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=300)
    parser.add_argument("--temperature", type=float, default=DEFAULT_TEMPERATURE)
    parser.add_argument("--target", type=float, default=0.6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = measure(
        options.folder,
        samples=options.samples,
        tokens=options.tokens,
        temperature=options.temperature,
    )
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(found["texts"][0])
        print(
            f"---\n{found['run']} round {found['round']}: held-out loss"
            f" {found['held_out_loss_nats_per_byte']:.3f} nats/byte; of {found['words']} words in"
            f" {found['samples']} texts, {100 * found['share']:.1f} % occur in the held-out text"
            f" (temperature {found['temperature']:g})"
        )
    return int(found["share"] < options.target)


if __name__ == "__main__":
    sys.exit(main())
