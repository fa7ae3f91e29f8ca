"""Saying hello: who speaks which version, in words on both sides, and nobody is banned for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.errors import FramingError, RequestRefusedError
from p2p.hello import (
    HELLO_PROTOCOL,
    HELLOS_BURST,
    MAX_HELLO_BYTES,
    MAX_PROGRAM_CHARS,
    MAX_TAGS,
    Hello,
    encode_hello,
    parse_hello,
    say_difference,
)
from p2p.peer_exchange import tag_of
from p2p.swarm import Swarm, open_swarm
from p2p.swarm_types import PROTOCOL_MAJOR, PROTOCOL_MINOR, PeerVersion
from tests.p2p.support import (
    ask,
    is_connected,
    new_identity,
    quick_config,
    serve_double,
    swarm,
    trio_test,
    until,
)

TAG = tag_of("a run")
OURS = PeerVersion(1, 0, "allmende 0.1.0")
HELLO = Hello(OURS, (TAG, tag_of("another")))

versions = st.builds(
    PeerVersion,
    st.integers(1, 65535),
    st.integers(0, 65535),
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=MAX_PROGRAM_CHARS),
)
hellos = st.builds(
    Hello,
    versions,
    st.lists(st.binary(min_size=32, max_size=32), max_size=MAX_TAGS).map(tuple),
    st.integers(0, 2**64 - 1),
)


@given(hello=hellos, later=st.binary(max_size=100))
def test_a_hello_is_read_back_and_what_a_later_version_adds_is_passed_over(
    hello: Hello, later: bytes
) -> None:
    data = encode_hello(hello)
    assert len(data) <= MAX_HELLO_BYTES
    assert parse_hello(data) == hello
    assert parse_hello(data + later) == hello
    without = replace(hello, utc_s=None)
    assert parse_hello(encode_hello(without)) == without
    assert parse_hello(encode_hello(without) + later[:7]) == without


@settings(max_examples=200)
@given(st.binary(max_size=200))
def test_only_framing_errors_escape_from_any_bytes(data: bytes) -> None:
    try:
        hello = parse_hello(data)
    except FramingError:
        return
    assert data.startswith(encode_hello(hello))


GOOD = encode_hello(HELLO)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "of 0 bytes"),
        (GOOD[:4], "of 4 bytes"),
        (GOOD + bytes(MAX_HELLO_BYTES), "bytes"),
        (b"\x00\x00" + GOOD[2:], "version or program is none"),
        (GOOD[:4] + b"\xff" + GOOD[5:], "version or program is none"),
        (GOOD[:10], "version or program is none"),
        (GOOD.replace(b"allmende", b"all\nende"), "no printable ASCII"),
        (GOOD.replace(b"allmende", b"all\x9bende"), "no printable ASCII"),
        (GOOD[:-1], "2 tags"),
        (GOOD[:19] + b"\xff" + GOOD[20:] + bytes(300), "255 tags"),
    ],
)
def test_what_is_no_hello_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(FramingError, match=reason):
        parse_hello(data)


def test_a_long_program_name_is_cut_and_odd_letters_are_replaced() -> None:
    hello = Hello(PeerVersion(1, 0, "ü" + "x" * 100), ())
    assert parse_hello(encode_hello(hello)).version.program == "?" + "x" * 63


def test_the_difference_is_said_with_who_has_to_be_updated() -> None:
    newer = PeerVersion(2, 0, "allmende 0.9.0")
    assert say_difference(newer, OURS) == (
        "it speaks protocol 2 (allmende 0.9.0), this is 1: update this program"
    )
    assert say_difference(OURS, newer) == (
        "it speaks protocol 1 (allmende 0.1.0), this is 2: it has to be updated"
    )
    assert say_difference(PeerVersion(3, 0, ""), OURS).startswith("it speaks protocol 3, this")


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("p2p")
    log.addHandler(handler)
    yield messages
    log.removeHandler(handler)


def version_at(one: Swarm, other: Swarm) -> PeerVersion | None:
    return next((p.version for p in one.peers() if p.peer_id == other.peer_id), None)


NEWER = {"protocol": (PROTOCOL_MAJOR + 1, 0), "program": "allmende 9.0.0"}


@pytest.mark.slow
@pytest.mark.system
@trio_test
async def test_both_learn_what_the_other_speaks_and_a_newer_minor_version_is_welcome() -> None:
    newer = (PROTOCOL_MAJOR, 7)
    async with (
        swarm(namespace="a run", program="allmende 0.1.0") as one,
        swarm(*one.listen_addrs, namespace="a run", protocol=newer, program="new 1") as other,
    ):
        serve_double(one)
        await until(lambda: version_at(one, other) and version_at(other, one))
        assert version_at(one, other) == PeerVersion(*newer, "new 1")
        assert version_at(other, one) == PeerVersion(
            PROTOCOL_MAJOR, PROTOCOL_MINOR, "allmende 0.1.0"
        )
        assert await ask(other, one.peer_id) == b"xx"
        assert not one.differing_peers()
        assert not other.differing_peers()


@pytest.mark.slow
@pytest.mark.system
@trio_test
async def test_another_major_version_is_told_so_on_both_sides_and_not_banned(
    warnings: list[str],
) -> None:
    async with (
        swarm(namespace="a run", program="allmende 0.1.0") as one,
        swarm(*one.listen_addrs, namespace="a run", **NEWER) as other,
    ):
        await until(lambda: one.differing_peers() and other.differing_peers())
        await until(lambda: not is_connected(one, other) and not is_connected(other, one))
        assert one.differing_peers() == {other.peer_id: PeerVersion(2, 0, "allmende 9.0.0")}
        assert other.differing_peers() == {
            one.peer_id: PeerVersion(1, PROTOCOL_MINOR, "allmende 0.1.0")
        }
        with pytest.raises(RequestRefusedError, match=r"speaks protocol 2 .*update this program"):
            await ask(one, other.peer_id)
        with pytest.raises(RequestRefusedError, match=r"protocol 1 .* it has to be updated"):
            await ask(other, one.peer_id)
        assert not one.banned()
        assert not other.banned()
        assert one.statistics().misdeeds == other.statistics().misdeeds == 0
        said = [text for text in warnings if "cannot work with us" in text]
        assert sorted(text.partition(": ")[2] for text in said) == [
            "it speaks protocol 1 (allmende 0.1.0), this is 2: it has to be updated",
            "it speaks protocol 2 (allmende 9.0.0), this is 1: update this program",
        ], "once on each side"


@pytest.mark.slow
@pytest.mark.system
@trio_test
async def test_one_that_differs_is_not_dialled_again_soon_and_may_come_back_updated() -> None:
    identity = new_identity()
    async with swarm(namespace="a run") as one:
        config = quick_config(*one.listen_addrs, namespace="a run", **NEWER)
        async with open_swarm(identity, config) as other:
            await until(lambda: one.differing_peers() and not one.peers())
            one.remember(identity.peer_id, other.listen_addrs)
            assert one._dialer._due() == []
        updated = quick_config(*one.listen_addrs, namespace="a run")
        async with open_swarm(identity, updated) as other:
            await until(
                lambda: version_at(one, other) == PeerVersion(PROTOCOL_MAJOR, PROTOCOL_MINOR, "")
            )
            assert not one.differing_peers()


@pytest.mark.slow
@pytest.mark.system
@trio_test
async def test_those_of_other_namespaces_stay_connected_whatever_they_speak() -> None:
    async with (
        swarm(namespace="a run") as one,
        swarm(*one.listen_addrs, namespace="another run", **NEWER) as other,
    ):
        serve_double(one)
        await until(lambda: version_at(one, other) and version_at(other, one))
        assert await ask(other, one.peer_id) == b"xx"
        assert not one.differing_peers()
        assert not other.differing_peers()


@pytest.mark.slow
@pytest.mark.system
@trio_test
async def test_a_hello_that_is_none_is_refused_and_changes_nothing() -> None:
    async with swarm(namespace="a run") as one, swarm(*one.listen_addrs) as other:
        await until(lambda: is_connected(other, one))

        async def say(payload: bytes) -> bytes:
            return await other.request(
                one.peer_id,
                HELLO_PROTOCOL,
                payload,
                timeout_s=5.0,
                max_response_bytes=MAX_HELLO_BYTES,
                purpose="test",
            )

        with pytest.raises(RequestRefusedError):
            await say(b"\x00")
        assert parse_hello(await say(GOOD)).tags == (TAG,)
        assert version_at(one, other) == OURS
        for _ in range(int(HELLOS_BURST) - 3):  # one was its own
            await say(GOOD)
        with pytest.raises(RequestRefusedError, match="too often"):
            await say(GOOD)
