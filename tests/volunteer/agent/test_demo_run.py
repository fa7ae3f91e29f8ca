"""The run that a demo trains: a shipped one or a file, shortened, signed by its first agent."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from p2p.identity import Identity, load_or_create_identity
from volunteer.agent.demo_run import choose_demo_run, publish
from volunteer.data.builtin import load_builtin_run
from volunteer.errors import RunSpecError
from volunteer.run import format_run_spec
from volunteer.run_owner import verify_publisher


@pytest.fixture
def identity(tmp_path: Path) -> Identity:
    return load_or_create_identity(tmp_path / "key")


@pytest.mark.parametrize(
    ("name", "minutes", "asked_s", "round_s"),
    [
        ("demo", 2.0, None, 8.0),
        ("demo", 10.0, None, 8.0),
        ("commons", 10.0, None, 20.0),
        ("commons", 1.0, None, 8.0),
        ("commons", 10.0, 45.0, 45.0),
    ],
)
def test_rounds_are_short_enough_to_see_some(
    name: str, minutes: float, asked_s: float | None, round_s: float, identity: Identity
) -> None:
    spec = publish(choose_demo_run(name, minutes=minutes, round_s=asked_s), identity)
    assert spec.rounds.round_s == round_s
    assert spec.publisher == identity.peer_id
    verify_publisher(spec, source="demo")
    shipped = load_builtin_run(name)
    assert (spec.model, spec.inner, spec.data) == (shipped.model, shipped.inner, shipped.data)


def test_a_file_is_taken_whoever_published_it(tmp_path: Path, identity: Identity) -> None:
    file = tmp_path / "run.toml"
    theirs = msgspec.structs.replace(load_builtin_run("commons"), publisher="someone", name="x")
    file.write_text(format_run_spec(theirs), "utf-8")
    spec = publish(choose_demo_run(str(file), minutes=2.0, round_s=None), identity)
    assert (spec.name, spec.publisher) == ("x", identity.peer_id)


def test_a_name_of_nothing_is_answered_with_the_names() -> None:
    with pytest.raises(RunSpecError, match="nothing") as caught:
        choose_demo_run("nothing", minutes=2.0, round_s=None)
    assert "commons" in caught.value.hint


def test_a_round_that_no_file_could_have_is_refused(identity: Identity) -> None:
    with pytest.raises(RunSpecError, match="round-s"):
        publish(choose_demo_run("demo", minutes=2.0, round_s=0.5), identity)
