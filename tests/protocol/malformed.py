"""Frames that say nothing, each with the reason that the program gives for refusing it."""

from __future__ import annotations

import msgspec

from tests.protocol.frames import BASE, IDS, ME, NEW_KIND, OTHER, RECORDS, seal
from volunteer.rounds.records import encode_body, encode_envelope, signed_bytes

BODY = encode_body(RECORDS["contribution"])
CLOSE = encode_body(RECORDS["close"])
COMMIT = encode_body(RECORDS["commit"])
ENVELOPE = seal(BODY)
SIGNATURE = ME.sign(signed_bytes(BODY))


def changed(body: bytes = BODY, **fields: object) -> bytes:
    """Return the envelope of a record with other values, well signed and in order."""
    return seal(msgspec.msgpack.encode(msgspec.msgpack.decode(body) | fields))


def without(name: str, body: bytes = BODY) -> bytes:
    fields = msgspec.msgpack.decode(body)
    del fields[name]
    return seal(msgspec.msgpack.encode(fields))


def replaced(old: bytes, new: bytes, body: bytes = BODY) -> bytes:
    """Return the envelope of a body in which some bytes were replaced, well signed."""
    assert body.count(old) == 1
    return seal(body.replace(old, new))


def with_fields(new: bytes, count: int, body: bytes = CLOSE) -> bytes:
    """Return the envelope of a close with bytes behind its fields, which its map counts."""
    return seal(bytes([body[0] + count]) + body[1:] + new)


def new_kind(**fields: object) -> bytes:
    return seal(msgspec.msgpack.encode(NEW_KIND | fields))


def reordered() -> bytes:
    fields = msgspec.msgpack.decode(BODY)
    return seal(msgspec.msgpack.encode({name: fields[name] for name in reversed(fields)}))


TOKENS = (1_234_567).to_bytes(4, "big")
ONE_FORM = "not in its one form"
MALFORMED: dict[str, tuple[bytes, str]] = {
    # the envelope
    "empty": (b"", "malformed envelope"),
    "cut": (ENVELOPE[:-1], "malformed envelope"),
    "trailing byte": (ENVELOPE + b"\x00", "malformed envelope"),
    "too large": (ENVELOPE + bytes(65_536), "at most 65536"),
    "a map": (b"\x83" + ENVELOPE[1:], "malformed envelope"),
    "a fourth element": (b"\x94" + ENVELOPE[1:] + b"\xc0", ONE_FORM),
    "two elements": (b"\x92" + ENVELOPE[1:], "malformed envelope"),
    "long array header": (b"\xdc\x00\x03" + ENVELOPE[1:], ONE_FORM),
    "long version": (ENVELOPE[:1] + b"\xcc\x01" + ENVELOPE[2:], ONE_FORM),
    "long body length": (b"\x93\x01\xc6\x00\x00" + ENVELOPE[3:], ONE_FORM),
    "version 2": (b"\x93\x02" + ENVELOPE[2:], "record version 2, this is 1"),
    "text for a signature": (msgspec.msgpack.encode([1, BODY, "s" * 64]), "malformed envelope"),
    "short signature": (encode_envelope(BODY, SIGNATURE[:63]), "not its author's"),
    "wrong signature": (encode_envelope(BODY, bytes(64)), "not its author's"),
    "signed by another": (seal(BODY, OTHER), "not its author's"),
    "signed without the context": (encode_envelope(BODY, ME.sign(BODY)), "not its author's"),
    # the record's form
    "other order": (reordered(), ONE_FORM),
    "trailing byte in the body": (seal(BODY + b"\x00"), "malformed record"),
    "long map header": (seal(b"\xde\x00" + bytes([BODY[0] & 15]) + BODY[1:]), ONE_FORM),
    "long integer": (replaced(b"\xce" + TOKENS, b"\xcf" + bytes(4) + TOKENS), ONE_FORM),
    "long small integer": (replaced(b"round_index\x00", b"round_index\xcc\x00"), ONE_FORM),
    "signed integer": (replaced(b"\xce" + TOKENS, b"\xd2" + TOKENS), ONE_FORM),
    "long text length": (replaced(b"\xa5dense", b"\xd9\x05dense"), ONE_FORM),
    "long list length": (replaced(b"carries\x92", b"carries\xdc\x00\x02"), ONE_FORM),
    "a field twice": (with_fields(b"\xa4kind\xa5close", 1), "not in its"),
    "a name in binary": (replaced(b"\xa4vote", b"\xc4\x04vote"), "malformed record"),
    # the record's fields
    "missing field": (without("vote"), "missing required field `vote`"),
    "missing empty list": (without("carries"), ONE_FORM),
    "no kind": (without("kind"), "missing required field `kind`"),
    "number for a bool": (changed(vote=1), "Expected `bool`, got `int`"),
    "float for an integer": (changed(tokens=1234567.0), "Expected `int`, got `float`"),
    "text for an integer": (changed(tokens="7"), "Expected `int`, got `str`"),
    "bytes for a hash": (changed(base=bytes.fromhex(BASE)), "Expected `str`, got `bytes`"),
    "nil for a hash": (changed(base=None), "Expected `str`, got `None`"),
    "no tokens": (changed(tokens=0), "`int` >= 1"),
    "too many tokens": (changed(tokens=2**50 + 1), "`int` <= "),
    "negative round": (changed(round_index=-1), "`int` >= 0"),
    "capital hash": (changed(base=BASE.upper()), "matching regex"),
    "short hash": (changed(base=BASE[:62]), "matching regex"),
    "hash and a line's end": (changed(base=BASE + "\n"), "matching regex"),
    "capital module": (changed(module_id="Dense"), "matching regex"),
    "another spelling of the author": (changed(author="1" + ME.peer_id), "not its author's"),
    "padded author": (changed(author=ME.peer_id + " "), "not its author's"),
    "unsorted list": (changed(carries=list(IDS[::-1])), "not sorted"),
    "an id twice": (changed(carries=[IDS[0], IDS[0]]), "not sorted"),
    "too long a list": (changed(carries=[f"{i:064x}" for i in range(65)]), "length <= 64"),
    "commit at height 0": (changed(COMMIT, round_index=0), "height 0"),
    "a commit's kind for a close": (changed(CLOSE, kind="commit"), "missing required field"),
    "another run": (changed(run_id="cd" * 32), "another run or module"),
    "another module": (changed(module_id="other"), "another run or module"),
    # new fields
    "new field first": (seal(b"\x87\xa1a\x01" + CLOSE[1:]), ONE_FORM),
    "unsorted new fields": (with_fields(b"\xa1b\x01\xa1a\x01", 2), "not in their one form"),
    "a new field twice": (with_fields(b"\xa1a\x01\xa1a\x01", 2), "not in their one form"),
    "odd name of a new field": (with_fields(b"\xa1A\x01", 1), "malformed new field"),
    "nested new field": (with_fields(b"\xa1a\x91\x91\x01", 1), "new field holds"),
    "map in a new field": (with_fields(b"\xa1a\x81\xa1b\x01", 1), "new field holds"),
    "extension in a new field": (with_fields(b"\xa1a\xd4\x05\x00", 1), "new field"),
    "float 32 in a new field": (with_fields(b"\xa1a\xca\x3f\x80\x00\x00", 1), "one form"),
    "too many new fields": (
        seal(b"\xde\x00\x17" + CLOSE[1:] + b"".join(b"\xa2n%c\x01" % (97 + i) for i in range(17))),
        "17 new fields",
    ),
    "too large a new field": (
        with_fields(b"\xa1a" + b"\xc5\x04\x00" + bytes(1024), 1),
        "1 new fields of 1029 bytes",
    ),
    # new kinds
    "new kind of another run": (new_kind(run_id="cd" * 32), "another run or module"),
    "new kind signed by another": (seal(msgspec.msgpack.encode(NEW_KIND), OTHER), "not its author"),
    "new kind without an author": (
        seal(msgspec.msgpack.encode({k: v for k, v in NEW_KIND.items() if k != "author"})),
        "does not begin as records do",
    ),
    "new kind, large": (new_kind(loud=bytes(4096)), "unknown kind with"),
    "new kind with an odd name": (new_kind(kind="Applause"), "malformed record"),
    "new kind, nested": (new_kind(loud=[[1]]), "new field holds"),
    "new kind, long integer": (
        seal(msgspec.msgpack.encode(NEW_KIND).replace(b"index\x03", b"index\xcc\x03")),
        "one form",
    ),
}
