"""What a start says of a run's file before anything is started."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from p2p.identity import Identity, load_or_create_identity
from tui.launch import AgentOptions, verify_wishes
from volunteer.data.builtin import load_builtin_run
from volunteer.errors import RunSpecError, VolunteerError
from volunteer.locations import HOME_VARIABLE, Locations
from volunteer.run import RunSpec, format_run_spec, signed_bytes

SOURCE = "file:/home/me/letters/*.txt"


@pytest.fixture
def locations(tmp_path: Path) -> Locations:
    return Locations.from_environment({HOME_VARIABLE: str(tmp_path / "home")})


def spec_reading(source: str, publisher: Identity | None = None) -> RunSpec:
    """Return a run that reads `source`, signed by `publisher` if there is one."""
    spec = load_builtin_run("demo")
    data = msgspec.structs.replace(spec.data, sources=(source,))
    spec = msgspec.structs.replace(spec, data=data, publisher="", signature="")
    if publisher is None:
        return spec
    spec = msgspec.structs.replace(spec, publisher=publisher.peer_id)
    return msgspec.structs.replace(spec, signature=publisher.sign(signed_bytes(spec)).hex())


def options_for(spec: RunSpec, folder: Path, round_s: float | None = None) -> AgentOptions:
    file = folder / "run.toml"
    file.write_text(format_run_spec(spec), "utf-8")
    return AgentOptions(run_file=file, round_s=round_s)


def test_a_run_that_was_changed_after_it_was_signed_is_told_of_before(
    tmp_path: Path, locations: Locations
) -> None:
    signed = spec_reading("builtin:folio", Identity(bytes(32)))
    verify_wishes(locations, options_for(signed, tmp_path))
    changed = msgspec.structs.replace(signed, name="other")
    with pytest.raises(RunSpecError, match=r"run\.toml: the signature is not that of") as caught:
        verify_wishes(locations, options_for(changed, tmp_path))
    assert "allmende publish FILE" in caught.value.hint


def test_a_published_run_keeps_its_round_length(tmp_path: Path, locations: Locations) -> None:
    signed = spec_reading("builtin:folio", Identity(bytes(32)))
    with pytest.raises(RunSpecError, match="its publisher's"):
        verify_wishes(locations, options_for(signed, tmp_path, round_s=9.0))
    verify_wishes(locations, options_for(spec_reading("builtin:folio"), tmp_path, round_s=9.0))


@pytest.mark.parametrize(
    ("publisher", "whose"),
    [(None, "is signed by nobody"), (Identity(bytes(32)), "is a stranger's")],
)
def test_a_strangers_run_that_reads_files_here_is_told_of_before(
    tmp_path: Path, locations: Locations, publisher: Identity | None, whose: str
) -> None:
    options = options_for(spec_reading(SOURCE, publisher), tmp_path)
    with pytest.raises(RunSpecError, match=rf"{whose} and would read {SOURCE[:10]}"):
        verify_wishes(locations, options)
    assert not locations.data_dir.exists(), "nothing is made for it, no key either"
    locations.prepare()
    locations.config_file.write_text("allow_file_sources = true\n", "utf-8")
    verify_wishes(locations, options)


def test_ones_own_run_may_read_files_here(tmp_path: Path, locations: Locations) -> None:
    locations.prepare()
    me = load_or_create_identity(locations.identity_file)
    options = options_for(spec_reading(SOURCE, me), tmp_path)
    verify_wishes(locations, options)
    locations.identity_file.write_text("no key\n", "utf-8")
    with pytest.raises(VolunteerError, match=locations.identity_file.name):
        verify_wishes(locations, options)
