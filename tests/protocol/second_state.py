"""A second implementation of blobs of numbers and of the state, from PROTOCOL.md 16 and 17 alone.

Plain Python floats are IEEE doubles, and `struct` rounds them to single precision: no array library
is needed, only patience. Slow, and meant for a few thousand parameters.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from tests.protocol.second_judgement import judged, lower_median
from tests.protocol.second_wire import MalformedError, blob_id

Spec = dict[str, Any]
FORMATS = {"F32": "f", "F16": "e", "I8": "b", "U8": "B"}


def single(value: float) -> float:
    """Round to fp32."""
    return float(struct.unpack("<f", struct.pack("<f", value))[0])


def numbers_file(metadata: dict[str, str], tensors: list[tuple[str, str, list[Any]]]) -> bytes:
    """Write a file of section 16."""
    table: dict[str, Any] = {"__metadata__": metadata}
    body = b""
    for name, dtype, values in tensors:
        raw = struct.pack(f"<{len(values)}{FORMATS[dtype]}", *values)
        offsets = [len(body), len(body) + len(raw)]
        table[name] = {"dtype": dtype, "shape": [len(values)], "data_offsets": offsets}
        body += raw
    header = json.dumps(table, sort_keys=True, separators=(",", ":")).encode("ascii")
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + body


def layout_of(model: dict[str, Any]) -> list[tuple[str, int]]:
    """Return names and numbers of elements, in order (17.2)."""
    d, f = model["dim"], model["ffn_dim"]
    k = d // model["num_heads"] * (model.get("num_kv_heads") or model["num_heads"])
    slots = [("embedding", model["vocab_size"] * d)]
    for i in range(model["num_layers"]):
        sizes = {"attention_norm": d, "wq": d * d, "wk": k * d, "wv": k * d, "wo": d * d}
        sizes |= {"ffn_norm": d, "w1": f * d, "w3": f * d, "w2": d * f}
        slots += [(f"layers.{i}.{name}", size) for name, size in sizes.items()]
    slots.append(("final_norm", d))
    if not model.get("tied_embeddings", True):
        slots.append(("output", model["vocab_size"] * d))
    return slots


def num_parameters(model: dict[str, Any]) -> int:
    return sum(size for _, size in layout_of(model))


@dataclass
class State:
    weights: list[float]
    momentum: list[float]

    def state_hash(self) -> str:
        metadata = {"format": "allmende/state/1", "num_parameters": str(len(self.weights))}
        tensors = [("momentum_P", "F32", self.momentum), ("weights_P", "F32", self.weights)]
        return blob_id(numbers_file(metadata, tensors))


def given_genesis(spec: Spec, state: State) -> State:
    """Check a state that a run begins from (17.3)."""
    is_whole = len(state.weights) == len(state.momentum) == num_parameters(spec["model"])
    if not is_whole or any(state.momentum) or state.state_hash() != spec["genesis"]["state_hash"]:
        raise MalformedError("the run does not begin from this")
    return state


def genesis(spec: Spec) -> State:
    """Make the state of round 0 (17.3), where it is made."""
    if spec["genesis"]["source"] != "seed":
        raise MalformedError("it is none that can be made")
    model = spec["model"]
    stream = blake3(b"allmende/genesis-weights/1\0" + struct.pack("<Q", spec["genesis"]["seed"]))
    total = num_parameters(model)
    raw = struct.unpack(f"<{4 * total}H", stream.digest(length=8 * total))
    weights: list[float] = []
    for name, size in layout_of(model):
        sigma = 0.02
        if name.endswith((".wo", ".w2")):
            sigma = 0.02 / math.sqrt(2 * model["num_layers"])
        factor = sigma / math.sqrt(4 * (2**32 - 1) / 12)
        for i in range(len(weights), len(weights) + size):
            s = sum(raw[4 * i : 4 * i + 4]) - 131070
            weights.append(1.0 if name.endswith("norm") else single(s * factor))
    return State(weights, [0.0] * total)


@dataclass
class Blob:
    """A contribution's blob, read."""

    blob_id: str
    elements: list[float]
    codes: list[list[int]]
    """One list a block."""
    scales: list[float]
    sent: list[bool] | None = None
    """Which elements a sparse one keeps."""


def blob_metadata(spec: Spec, run_id: str, author: str, round_index: int) -> dict[str, str]:
    codec = spec["codec"]
    return {
        "format": "allmende/contribution/1",
        "run_id": run_id,
        "module_id": "dense",
        "author": author,
        "round_index": str(round_index),
        "codec": codec["id"],
        "codec_version": str(codec["version"]),
        "num_elements": str(num_parameters(spec["model"])),
        "block_elements": str(codec["block_elements"]),
    }


def read_blob(data: bytes, spec: Spec, metadata: dict[str, str]) -> Blob:
    """Check and read a blob (16)."""
    total, block = num_parameters(spec["model"]), spec["codec"]["block_elements"]
    num_blocks = -(-total // block)
    codec = spec["codec"]["id"]
    kept = num_kept(spec["codec"], int(metadata["round_index"]))
    if codec == "topk2":
        b, u = index_form(kept, block)
        tensors = [("scales", "F32", num_blocks), ("levels", "U8", num_blocks)]
        tensors += [("places", "U8", num_blocks * u // 8)]
        tensors += [("offsets", "U8", num_blocks * b * kept // 8)]
        tensors += [(name, "U8", num_blocks * kept // 8) for name in ("larges", "signs")]
    elif codec == "int4":
        tensors = [("scales", "F32", num_blocks), ("codes", "U8", -(-total // 2))]
    elif codec == "int8":
        tensors = [("scales", "F32", num_blocks), ("codes", "I8", total)]
    else:
        tensors = [("values", {"fp16": "F16", "fp32": "F32"}[codec], total)]
    due = numbers_file(metadata, [(name, dtype, [0] * count) for name, dtype, count in tensors])
    header_end = 8 + int.from_bytes(due[:8], "little")
    if len(data) != len(due) or data[:header_end] != due[:header_end]:
        raise MalformedError("not the blob that was due")
    parts, at = [], header_end
    for _, dtype, count in tensors:
        fmt = f"<{count}{FORMATS[dtype]}"
        parts.append(struct.unpack(fmt, data[at : at + struct.calcsize(fmt)]))
        at += struct.calcsize(fmt)
    if codec == "int4":
        codes = [half - 8 for byte in parts[1] for half in (byte & 15, byte >> 4)]
        return block_blob(blob_id(data), parts[0], codes, 7, total, block)
    if codec == "int8":
        return block_blob(blob_id(data), parts[0], list(parts[1]), 127, total, block)
    if codec == "topk2":
        return sparse_blob(blob_id(data), parts, kept, total, block)
    return float_blob(blob_id(data), parts[0], block)


def num_kept(codec: dict[str, Any], round_index: int) -> int:
    ladder = zip(codec["ladder_kept"], codec["ladder_rounds"], strict=True)
    return int([kept for kept, first in ladder if first <= round_index][-1])


def index_form(kept: int, block: int) -> tuple[int, int]:
    """Return b and u of 16.2a."""
    if 4 * kept >= block:
        return 0, block
    b = math.floor(math.log2(block / kept))
    return b, kept + block // 2**b


def bits_of(packed: Sequence[int], row: int, count: int) -> list[int]:
    """Return the bits of one block."""
    return [packed[(row * count + i) // 8] >> (row * count + i) % 8 & 1 for i in range(count)]


def are_scales(scales: Sequence[float], largest: int) -> bool:
    return all(math.copysign(1.0, s) > 0 and (s == 0 or 2.0**-126 <= s <= largest) for s in scales)


def sparse_blob(
    name: str, parts: Sequence[Sequence[Any]], kept: int, total: int, block: int
) -> Blob:
    """Read what 16.2a says."""
    scales, levels, places, offsets, larges, signs = parts
    b, u = index_form(kept, block)
    blob = Blob(name, [0.0] * total, [], list(scales), [False] * total)
    assert blob.sent is not None
    valid = are_scales(scales, 7 * 2**16 // 127) and max(levels) <= 127
    for row, scale in enumerate(scales):
        large, negative = bits_of(larges, row, kept), bits_of(signs, row, kept)
        low = bits_of(offsets, row, b * kept)
        at = bits_of(places, row, u)
        ones = [p for p, bit in enumerate(at) if bit]
        indices = ones
        if b:
            valid &= not at[-1]
            parts_of = [sum(low[j * kept + r] << j for j in range(b)) for r in range(kept)]
            indices = [
                (p - r) * 2**b + part
                for r, (p, part) in enumerate(zip(ones, parts_of, strict=False))
            ]
        valid &= len(ones) == kept and all(x < y for x, y in itertools.pairwise(indices))
        own = min(block, total - row * block)
        if own >= kept:
            valid &= all(i < own for i in indices)
        else:
            valid &= indices == list(range(kept)) and not any(large[own:] + negative[own:])
        if not valid:
            raise MalformedError("a sparse blob that is none")
        codes = [0] * own
        for i, is_large, is_negative in zip(indices, large, negative, strict=True):
            if i < own:
                c = (127 if is_large else levels[row]) * (-1 if is_negative else 1)
                codes[i] = c
                blob.elements[row * block + i] = single(c * scale)
                blob.sent[row * block + i] = True
        blob.codes.append(codes)
    return blob


def block_blob(
    name: str, scales: Sequence[float], codes: list[int], most: int, total: int, block: int
) -> Blob:
    if not are_scales(scales, 7 * 2**16 // most) or min(codes) < -most or any(codes[total:]):
        raise MalformedError("codes or scales that are none")
    elements = [single(codes[i] * scales[i // block]) for i in range(total)]
    blocks = [codes[at : min(at + block, total)] for at in range(0, total, block)]
    return Blob(name, elements, blocks, list(scales))


def float_blob(name: str, values: Sequence[float], block: int) -> Blob:
    codes, scales = [], []
    for at in range(0, len(values), block):
        part = values[at : at + block]
        amax = max(map(abs, part))
        scale = 0.0 if amax < 2.0**-110 else single(amax / 32767)
        scales.append(scale)
        rounded = [round(single(v / scale)) if scale else 0 for v in part]
        codes.append([max(-32767, min(32767, c)) for c in rounded])
    return Blob(name, list(values), codes, scales)


@dataclass
class Listed:
    """What the chain says of a listed contribution."""

    author: str
    tokens: int
    is_late: bool
    is_on_probation: bool
    is_excluded: bool = False
    is_stale: bool = False


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def factors(blobs: list[Blob], listed: list[Listed]) -> tuple[dict[int, float], dict[int, float]]:
    """Return the weight and the clip of each contribution that counts (17.4.1 to 9)."""
    left, _, copies = judged(blobs, listed)
    norms = {
        a: math.sqrt(
            math.fsum(
                sum(c * c for c in codes) * (s * s)
                for codes, s in zip(blobs[a].codes, blobs[a].scales, strict=True)
            )
        )
        for a in left
    }
    middle = lower_median([listed[a].tokens for a in left])
    clips = dict.fromkeys(left, 1.0)
    if len(left) >= 5:
        for a in left:
            limit = lower_median(list(norms.values())) * clip(listed[a].tokens / middle, 1, 4)
            clips[a] = limit / norms[a] if norms[a] > limit else 1.0
    weights = {a: clip(listed[a].tokens, 0.1 * middle, 4 * middle) for a in left}
    for a in left:
        weights[a] *= 0.5 if listed[a].is_late else 1.0
        weights[a] *= 0.25 if listed[a].is_on_probation else 1.0
        weights[a] /= 1 + len(copies[a])
    weights = capped(weights, {a: listed[a].author for a in left})
    total = math.fsum(weights.values())
    shares = {a: weights[a] / total for a in left}
    return shares, clips


def capped(weights: dict[int, float], author_of: dict[int, str]) -> dict[int, float]:
    authors = sorted(set(author_of.values()))
    if len(authors) < 5:
        return weights
    owned = {x: math.fsum(w for a, w in weights.items() if author_of[a] == x) for x in authors}
    caught: set[str] = set()
    while True:
        total = math.fsum(owned[x] for x in authors if x not in caught) / (1 - 0.25 * len(caught))
        above = {x for x in authors if x not in caught and owned[x] > 0.25 * total}
        if not above:
            break
        caught |= above
    return {
        a: w * (0.25 * total / owned[author_of[a]]) if author_of[a] in caught else w
        for a, w in weights.items()
    }


def after_commit(
    state: State, blobs: list[Blob], listed: list[Listed], spec: Spec, parent_height: int
) -> State:
    """Apply a commit (17.4)."""
    outer = spec["outer"]
    is_early = parent_height < outer["momentum_warmup_rounds"]
    lr, mu = outer["lr"], outer["warmup_momentum" if is_early else "momentum"]
    weight, clips = factors(blobs, listed)
    share = {a: weight[a] * clips[a] for a in weight}
    least = 1 / math.sqrt(max(1, sum(f != 0 for f in share.values())))
    new = State([], [])
    for i, (old, momentum) in enumerate(zip(state.weights, state.momentum, strict=True)):
        q = v = 0.0
        for a, blob in enumerate(blobs):
            if share.get(a, 0.0) and (blob.sent is None or blob.sent[i]):
                q += share[a] * blob.elements[i]
                v += weight[a]
        if blobs and blobs[0].sent is not None:
            q /= max(v, least)
        counted = [a for a in sorted(share) if share[a] != 0]
        if outer["aggregation"] == "trimmed_mean" and len(counted) >= 4:
            values = {a: single(blobs[a].elements[i] * clips[a]) for a in counted}
            in_order, t = sorted(values.values()), len(counted) // 4
            left = [a for a in counted if in_order[t] <= values[a] <= in_order[-1 - t]]
            q, v = 0.0, 0.0
            for a in left:
                q, v = q + weight[a] * values[a], v + weight[a]
            q /= v
        q = single(q)
        new_momentum = single(momentum * mu + q)
        new.momentum.append(new_momentum)
        new.weights.append(single(old - (new_momentum * mu + q) * lr))
    return new
