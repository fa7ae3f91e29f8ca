"""A second implementation of what is sent, written from PROTOCOL.md alone.

It imports nothing of the program: what it reads and makes shows that the text suffices. The numbers
of the sections are those of PROTOCOL.md.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import tomllib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from blake3 import blake3
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey

CHUNK_BYTES = 1_048_576
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
HASH = re.compile(r"[0-9a-f]{64}")
NAME = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


Value: TypeAlias = Any
"""What a stranger sent: checked before it is used."""


class MalformedError(Exception):
    """The text says that this is to be refused."""


# 1. identity


def base58(raw: bytes) -> str:
    number, text = int.from_bytes(raw, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = BASE58[digit] + text
    return "1" * (len(raw) - len(raw.lstrip(b"\0"))) + text


def public_key_of(peer_id: str) -> bytes:
    number = 0
    for letter in peer_id:
        if letter not in BASE58 or len(peer_id) > 64:
            raise MalformedError("no peer id")
        number = number * 58 + BASE58.index(letter)
    raw = number.to_bytes(64, "big").lstrip(b"\0")
    raw = b"\0" + raw
    if len(raw) != 38 or not raw.startswith(bytes.fromhex("002408011220")):
        raise MalformedError("no Ed25519 peer id")
    if base58(raw) != peer_id:
        raise MalformedError("another spelling of a peer id")
    return raw[6:]


def verify(peer_id: str, signed: bytes, signature: bytes) -> None:
    try:
        VerifyKey(public_key_of(peer_id)).verify(signed, signature)
    except (BadSignatureError, ValueError) as error:
        raise MalformedError("signature") from error


# 2. frames


def read_frame(data: bytes, limit: int) -> tuple[bytes, bytes]:
    """Return payload and rest."""
    if len(data) < 4:
        raise MalformedError("the stream ended")
    (length,) = struct.unpack(">I", data[:4])
    if length > limit:
        raise MalformedError("too long a frame")
    if len(data) < 4 + length:
        raise MalformedError("the stream ended")
    return data[4 : 4 + length], data[4 + length :]


def read_answer(data: bytes, limit: int) -> tuple[str, bytes]:
    status = {0: "OK", 1: "REFUSED", 2: "BUSY"}.get(data[0] if data else 255)
    if status is None:
        raise MalformedError("unknown status")
    payload, rest = read_frame(data[1:], limit if status == "OK" else 200)
    if rest:
        raise MalformedError("bytes behind the end")
    return status, payload


# 4. blobs


def blob_id(data: bytes) -> str:
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    return blob_id_of_manifest(manifest_of(len(data), chunks))


def manifest_of(size: int, chunks: list[bytes]) -> bytes:
    return struct.pack("<Q", size) + b"".join(blake3(chunk).digest() for chunk in chunks)


def blob_id_of_manifest(manifest: bytes) -> str:
    if len(manifest) % 32 != 8:
        raise MalformedError("no manifest")
    (size,) = struct.unpack("<Q", manifest[:8])
    if -(-size // CHUNK_BYTES) != len(manifest) // 32 or size > 16 << 30:
        raise MalformedError("no manifest")
    return blake3(b"allmende/blob/1" + manifest).hexdigest()


def read_blob_request(data: bytes) -> tuple[str, str, int]:
    if len(data) != 37 or data[0] not in (1, 2):
        raise MalformedError("no blob request")
    (index,) = struct.unpack(">I", data[33:])
    if data[0] == 1 and index:
        raise MalformedError("a manifest has no index")
    return ("MANIFEST" if data[0] == 1 else "CHUNK"), data[1:33].hex(), index


# 5. packed gossip


def read_packed(stream: bytes, limit: int = 262_144) -> list[bytes]:
    """Return the frames of one direction of a stream of `/allmende/meshsub/1`."""
    inflate, frames, at = zlib.decompressobj(wbits=-14), [], 0
    while at < len(stream):
        length = shift = 0
        while True:
            length |= (stream[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if not stream[at - 1] & 128:
                break
        if length > limit + limit // 64 + 64:
            raise MalformedError("too long")
        try:
            frame = inflate.decompress(stream[at : at + length] + b"\0\0\xff\xff", limit + 1)
        except zlib.error as error:
            raise MalformedError("not packed") from error
        if len(frame) > limit or inflate.eof:
            raise MalformedError("too long a frame, or the end")
        if length > 2 * len(frame) + 64:
            raise MalformedError("much for little")
        frames.append(frame)
        at += length
    return frames


# 6. tags, 9. hello


def tag_of(namespace: str) -> bytes:
    return hashlib.sha256(b"allmende/namespace/1" + namespace.encode()).digest()


@dataclass
class Hello:
    major: int
    minor: int
    program: str
    tags: list[bytes]
    clock: int | None = None


def read_hello(data: bytes) -> Hello:
    if not 6 <= len(data) <= 1024:
        raise MalformedError("no hello")
    major, minor, length = struct.unpack(">HHB", data[:5])
    program, rest = data[5 : 5 + length], data[5 + length :]
    if not major or length > 64 or not rest or any(not 0x20 <= c <= 0x7E for c in program):
        raise MalformedError("no hello")
    count, raw = rest[0], rest[1:]
    if count > 16 or len(raw) < 32 * count:
        raise MalformedError("no hello")
    tags = [raw[32 * i : 32 * i + 32] for i in range(count)]
    left = raw[32 * count :]
    clock = struct.unpack(">Q", left[:8])[0] if len(left) >= 8 else None
    return Hello(major, minor, program.decode("ascii"), tags, clock)


# 11. MessagePack in its one form


def pack(value: Value) -> bytes:
    if value is None or isinstance(value, bool):
        return b"\xc0" if value is None else b"\xc3" if value else b"\xc2"
    if isinstance(value, int):
        return pack_integer(value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        raw = value.encode()
        short = bytes([0xA0 | len(raw)]) if len(raw) < 32 else None
        return (short or sized((0xD9, 0xDA, 0xDB), len(raw))) + raw
    if isinstance(value, bytes):
        return sized((0xC4, 0xC5, 0xC6), len(value)) + value
    if isinstance(value, list):
        short = bytes([0x90 | len(value)]) if len(value) < 16 else None
        return (short or sized((0, 0xDC, 0xDD), len(value))) + b"".join(map(pack, value))
    if not isinstance(value, dict):
        raise MalformedError("a type that is not spoken")
    short = bytes([0x80 | len(value)]) if len(value) < 16 else None
    pairs = b"".join(pack(key) + pack(one) for key, one in value.items())
    return (short or sized((0, 0xDE, 0xDF), len(value))) + pairs


def pack_integer(value: int) -> bytes:
    if 0 <= value < 128 or -32 <= value < 0:
        return struct.pack(">b", value) if value < 0 else bytes([value])
    first, signs = (0xCC, "BHIQ") if value > 0 else (0xD0, "bhiq")
    for number, sign in enumerate(signs):
        try:
            return bytes([first + number]) + struct.pack(f">{sign}", value)
        except struct.error:
            continue
    raise MalformedError("too large a number")


def sized(codes: tuple[int, int, int], length: int) -> bytes:
    if length < 1 << 8 and codes[0]:
        return bytes([codes[0], length])
    if length < 1 << 16:
        return bytes([codes[1]]) + struct.pack(">H", length)
    return bytes([codes[2]]) + struct.pack(">I", length)


def unpack(data: bytes) -> Value:
    """Read any MessagePack that the text has; a map becomes a dict, in its order."""
    try:
        value, end = unpack_at(data, 0, 0)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise MalformedError("MessagePack") from error
    if end != len(data):
        raise MalformedError("bytes behind the end")
    return value


FIXED = {0xCA: "f", 0xCB: "d", 0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q"}
FIXED |= {0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q"}
LENGTHS = {0xD9: (1, "s"), 0xDA: (2, "s"), 0xDB: (4, "s"), 0xC4: (1, "b"), 0xC5: (2, "b")}
LENGTHS |= {0xC6: (4, "b"), 0xDC: (2, "l"), 0xDD: (4, "l"), 0xDE: (2, "m"), 0xDF: (4, "m")}


def unpack_at(data: bytes, at: int, depth: int) -> tuple[Any, int]:
    code = data[at]
    at += 1
    if depth > 8:
        raise MalformedError("nested too deeply")
    if code < 0x80 or code >= 0xE0:
        return (code if code < 0x80 else code - 256), at
    if code in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[code], at
    if code in FIXED:
        size = struct.calcsize(f">{FIXED[code]}")
        return struct.unpack(f">{FIXED[code]}", data[at : at + size])[0], at + size
    if code in LENGTHS:
        size, kind = LENGTHS[code]
        length, at = int.from_bytes(data[at : at + size], "big"), at + size
    elif code < 0xC0:
        kind = "m" if code < 0x90 else "l" if code < 0xA0 else "s"
        length = code & (0x1F if kind == "s" else 0x0F)
    else:
        raise MalformedError("a type that is not spoken")
    if kind in "sb":
        raw = data[at : at + length]
        if len(raw) != length:
            raise MalformedError("it ends too early")
        return (raw.decode() if kind == "s" else raw), at + length
    if length > len(data):
        raise MalformedError("it ends too early")
    items = []
    for _ in range(length * (2 if kind == "m" else 1)):
        item, at = unpack_at(data, at, depth + 1)
        items.append(item)
    if kind == "l":
        return items, at
    names = items[::2]
    if any(not isinstance(n, str) for n in names) or len(set(names)) != len(names):
        raise MalformedError("a map with odd names")
    return dict(zip(names, items[1::2], strict=True)), at


# 10. runs

DEFAULTS: dict[str, dict[str, Value]] = {
    "": {"description": "", "licence": "", "contact": "", "publisher": "", "signature": ""},
    "model": {"vocab_size": 256, "rope_base": 10000.0},
    "genesis": {},
    "data": {"held_out_fraction": 0.05, "tokenizer": "bytes"},
    "inner": {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "clip_norm": 1.0}
    | {"warmup_steps": 20, "floor_fraction": 0.1},
    "outer": {"lr": 0.7, "momentum": 0.5},
    "codec": {"id": "int4", "version": 1, "block_elements": 4096, "error_feedback_beta": 1.0},
    "rounds": {"round_s": 600.0, "target_tokens": 0, "min_grace_s": 2.0, "expiry_rounds": 8}
    | {"demote_rounds": 8, "journal_rounds": 8, "max_contributions": 32, "quorum": "1/2"},
    "evaluation": {"num_sequences": 64},
    "hardware": {"ram_bytes": 0, "disk_bytes": 0},
}
LATER: dict[str, dict[str, Value]] = {
    "model": {"num_kv_heads": 0, "tied_embeddings": True},
    "genesis": {"source": "seed"},
    "inner": {"optimizer": "adamw", "muon_momentum": 0.95},
    "outer": {"momentum_warmup_rounds": 0, "warmup_momentum": 0.0, "aggregation": "mean"},
    "codec": {"ladder_kept": [1024, 256, 64], "ladder_rounds": [0, 100, 200]},
    "evaluation": {"max_s": 30.0},
}
FLOATS = {"rope_base", "held_out_fraction", "lr", "beta1", "beta2", "weight_decay", "clip_norm"}
FLOATS |= {"floor_fraction", "momentum", "error_feedback_beta", "round_s", "min_grace_s"}
FLOATS |= {"muon_momentum", "warmup_momentum", "max_s"}


def read_spec(text: str) -> dict[str, Any]:
    """Return all keys of a RunSpec, defaults included."""
    raw = tomllib.loads(text)
    spec: dict[str, Any] = {"format": 1} | DEFAULTS[""] | raw
    for table, defaults in DEFAULTS.items():
        if table:
            spec[table] = defaults | LATER.get(table, {}) | raw.get(table, {})
            spec[table] |= {k: float(v) for k, v in spec[table].items() if k in FLOATS}
    return spec


def canonical_json(value: Value) -> str:
    if isinstance(value, dict):
        pairs = (f"{canonical_json(k)}:{canonical_json(value[k])}" for k in sorted(value))
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(canonical_json, value)) + "]"
    if isinstance(value, float):
        return decimal(value)
    return json.dumps(value, ensure_ascii=False)


def decimal(value: float) -> str:
    """Return the shortest decimal, as 10.2 says."""
    digits, _, exponent = f"{value!r}".partition("e")
    if 1e-5 <= abs(value) < 1e16 or value == 0.0:
        if not exponent:
            return digits
        whole, _, part = digits.partition(".")
        return "0." + "0" * (-int(exponent) - 1) + whole + part
    if exponent:
        return f"{digits}e{int(exponent)}"
    raise AssertionError("Python writes these with an exponent")


def run_id_of(spec: Mapping[str, Any]) -> str:
    said = {**spec, "signature": ""}
    for table, later in LATER.items():
        said[table] = {k: v for k, v in spec[table].items() if k not in later or v != later[k]}
    plain = canonical_json(said)
    return blake3(b"allmende/run/1\0" + plain.encode()).hexdigest()


def genesis_id_of(run_id: str, module_id: str) -> str:
    return blake3(f"allmende/genesis/1\0{run_id}/{module_id}".encode()).hexdigest()
