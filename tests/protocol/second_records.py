"""A second implementation of records, topics and sync, written from PROTOCOL.md 11 to 13 alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from tests.protocol.second_wire import HASH, NAME, MalformedError, Value, pack, unpack, verify

CONTEXT = b"allmende/record/1\0"
Check = Callable[[Value], bool]


def integer(least: int, most: int) -> Check:
    return lambda value: type(value) is int and least <= value <= most


def is_hash(value: Value) -> bool:
    return isinstance(value, str) and HASH.fullmatch(value) is not None


def is_name(value: Value) -> bool:
    return isinstance(value, str) and NAME.fullmatch(value) is not None


def is_peer(value: Value) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= 128


def is_bool(value: Value) -> bool:
    return isinstance(value, bool)


def hashes(most: int) -> Check:
    def check(value: Value) -> bool:
        is_list = isinstance(value, list) and len(value) <= most and all(map(is_hash, value))
        return is_list and value == sorted(set(value))

    return check


COMMON: dict[str, Check] = {
    "kind": is_name,
    "run_id": is_hash,
    "module_id": is_name,
    "round_index": integer(0, 2**40),
}
FIELDS: dict[str, dict[str, Check]] = {
    "contribution": {
        "author": is_peer,
        "base": is_hash,
        "vote": is_bool,
        "blob_id": is_hash,
        "blob_bytes": integer(1, 2**36),
        "codec": is_name,
        "codec_version": integer(1, 2**16),
        "tokens": integer(1, 2**50),
        "carries": hashes(64),
    },
    "commit": {
        "round_index": integer(1, 2**40),
        "parent": is_hash,
        "rank": integer(0, 2**20),
        "proposer": is_peer,
        "contributions": hashes(256),
        "leaving": hashes(256),
        "state_hash": is_hash,
    },
    "close": {"author": is_peer, "base": is_hash},
    "leaving": {"author": is_peer, "base": is_hash},
}


MAYBE: dict[str, dict[str, Check]] = {
    "contribution": {"content_hash": is_hash, "harmful": hashes(32)},
    "commit": {"marked": lambda value: value != [] and hashes(256)(value)},
}
"""Fields that are left out where there is nothing to say (11.4)."""


@dataclass
class Read:
    """A record whose signature holds."""

    record_id: str
    kind: str
    fields: dict[str, Any]
    new_fields: dict[str, Any]
    is_known: bool
    """Whether this version has the kind; else it is only passed on."""


def read_envelope(data: bytes, run_id: str, module_id: str) -> Read:
    """Check a record as 11.7 says."""
    if len(data) > 65_536:
        raise MalformedError("too large")
    envelope = unpack(data)
    if not isinstance(envelope, list) or len(envelope) != 3 or pack(envelope) != data:
        raise MalformedError("no envelope in its one form")
    version, body, signature = envelope
    if version != 1 or not isinstance(body, bytes) or not isinstance(signature, bytes):
        raise MalformedError("no envelope of version 1")
    read = read_body(body)
    if (read.fields["run_id"], read.fields["module_id"]) != (run_id, module_id):
        raise MalformedError("another run or module")
    author = read.fields["proposer" if read.kind == "commit" else "author"]
    verify(author, CONTEXT + body, signature)
    return read


def read_body(body: bytes) -> Read:
    fields = unpack(body)
    if not isinstance(fields, dict) or pack(fields) != body:
        raise MalformedError("a body that is not in its one form")
    kind: Value = fields.get("kind")
    if not is_name(kind):
        raise MalformedError("no kind")
    is_known = kind in FIELDS
    checks = COMMON | (FIELDS[kind] if is_known else {"author": is_peer})
    maybe = MAYBE.get(kind, {}) if is_known else {}
    checks |= {name: check for name, check in maybe.items() if name in fields}
    if list(fields)[: len(checks)] != list(checks):
        raise MalformedError("fields are missing, or in another order")
    known = {name: fields[name] for name in checks}
    for name, check in checks.items():
        if not check(known[name]):
            raise MalformedError(f"{name} is out of bounds")
    new = {name: value for name, value in fields.items() if name not in checks}
    names = list(new)
    if (
        names != sorted(names)
        or not all(map(is_name, names))
        or not all(map(is_flat, new.values()))
    ):
        raise MalformedError("new fields that are none")
    num_bytes = sum(len(pack(name)) + len(pack(value)) for name, value in new.items())
    if is_known and (len(new) > 16 or num_bytes > 1024):
        raise MalformedError("too many new fields")
    if not is_known and len(body) > 4096:
        raise MalformedError("too large a record of an unknown kind")
    return Read(blake3(CONTEXT + body).hexdigest(), str(kind), known, new, is_known)


def is_flat(value: Value) -> bool:
    if isinstance(value, list):
        return not any(isinstance(one, list | dict) for one in value)
    return not isinstance(value, dict)


# 12. heartbeats, 13. sync


def is_number(least: float, most: float) -> Check:
    return lambda value: type(value) in (int, float) and least <= value <= most


def ids(most: int) -> Check:
    def check(value: Value) -> bool:
        is_list = isinstance(value, list) and len(value) <= most
        return is_list and all(isinstance(one, bytes) and len(one) == 32 for one in value)

    return check


def are_envelopes(value: Value) -> bool:
    return isinstance(value, list) and len(value) <= 4096 and all(type(v) is bytes for v in value)


def are_addresses(value: Value) -> bool:
    is_list = isinstance(value, list) and len(value) <= 8
    return is_list and all(isinstance(one, str) and len(one) <= 200 for one in value)


BELONGS: dict[str, Check] = {"run_id": is_hash, "module_id": is_name}
HEARTBEAT: dict[str, Check] = {
    **BELONGS,
    "tip": is_hash,
    "round_index": integer(0, 2**40),
    "state_hash": is_hash,
    "is_contributing": is_bool,
    "tokens_per_s": is_number(0.0, 1e12),
    "loss": lambda value: value is None or type(value) in (int, float),
    "addrs": are_addresses,
}
REQUESTS: dict[str, dict[str, Check]] = {
    "sync": {
        "from_height": integer(0, 2**40),
        "have": ids(4096),
        "tip": is_hash,
        "has_closed": is_bool,
    },
    "records": {"ids": ids(512)},
    "push": {"envelopes": are_envelopes},
}
RESPONSE: dict[str, tuple[Check, Any]] = {
    "envelopes": (are_envelopes, []),
    "has_more": (is_bool, False),
    "want": (ids(512), []),
    "tip": (lambda value: value is None or is_hash(value), None),
    "has_closed": (is_bool, False),
}


def read_map(data: bytes, limit: int) -> dict[str, Any]:
    if len(data) > limit:
        raise MalformedError("too large")
    fields = unpack(data)
    if not isinstance(fields, dict) or fields.get("version", 1) != 1:
        raise MalformedError("no message of version 1")
    return fields


def taken(fields: dict[str, Any], checks: dict[str, Check]) -> dict[str, Any]:
    """Return what `checks` name; what a newer minor version adds is passed over."""
    for name, check in checks.items():
        if name not in fields or not check(fields[name]):
            raise MalformedError(f"{name} is missing or out of bounds")
    return {name: fields[name] for name in checks}


def read_heartbeat(data: bytes) -> dict[str, Any]:
    return taken(read_map(data, 4096), HEARTBEAT)


def read_request(data: bytes) -> dict[str, Any]:
    fields = read_map(data, 1 << 20)
    checks = REQUESTS.get(str(fields.get("type")))
    if checks is None:
        raise MalformedError("no request of this version")
    return {"type": fields["type"]} | taken(fields, BELONGS | checks)


def read_response(data: bytes) -> dict[str, Any]:
    fields = read_map(data, 1 << 20)
    response = {name: fields.get(name, default) for name, (_, default) in RESPONSE.items()}
    return taken(response, {name: check for name, (check, _) in RESPONSE.items()})
