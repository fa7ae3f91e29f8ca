"""`allmende import` and `allmende publish`: what is told, refused, and written."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from p2p.identity import load_or_create_identity, verify_signature
from tests.tui.command_line import run
from tui import import_verb
from tui.import_verb import import_text, name_of
from tui.publish_verb import sign_file
from volunteer.answers import Imported
from volunteer.data.builtin import load_builtin_run
from volunteer.errors import RunSpecError, VolunteerError
from volunteer.locations import Locations
from volunteer.run import RunSpec, format_run_spec, read_run_spec, signed_bytes

TEXT = "# mine\n" + format_run_spec(load_builtin_run("demo"))
MADE = Imported(
    spec_file="/x/run.toml",
    run_id="ab" * 32,
    run_name="again",
    state_hash="cd" * 32,
    num_parameters=35_472,
    tokenizer="bytes",
)


@pytest.mark.slow
@pytest.mark.timeout(80)  # it imports torch
def test_what_cannot_be_imported_is_told_in_a_line_or_two(home: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "rms_norm_eps": 1e-6}')
    done = run(home, "import", str(tmp_path), "--spec", str(tmp_path / "run.toml"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 2
    assert "model_type is 'gpt2', not 'llama'; rms_norm_eps is 1e-06" in done.stderr
    assert "hint: LlamaForCausalLM without biases" in done.stderr
    assert not (tmp_path / "run.toml").exists()


def test_what_was_made_is_told_with_what_comes_next() -> None:
    text = import_text(MADE)
    assert "35,472 parameters" in text
    assert "allmende start --run-file /x/run.toml" in text


@pytest.mark.parametrize(
    ("folder", "name"),
    [("My Model", "my-model"), ("Llama_3.2-1B", "llama_3.2-1b"), ("Ä", "imported"), ("-x-", "x")],
)
def test_a_run_is_called_as_the_folder_is(folder: str, name: str) -> None:
    assert name_of(Path("/models") / folder) == name


@pytest.mark.slow
def test_a_run_is_signed_in_its_file_and_again_when_it_was_changed(
    home: Path, locations: Locations, tmp_path: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(TEXT, "utf-8")
    done = run(home, "publish", str(file), "--json")
    assert done.returncode == 0, done.stderr
    me = load_or_create_identity(locations.identity_file).peer_id
    signed = read_run_spec(file)
    assert json.loads(done.stdout) == {
        "spec_file": str(file),
        "run_id": signed.run_id,
        "run_name": "demo",
        "publisher": me,
    }
    verify_signed(signed, me)
    assert file.read_text("utf-8").startswith("# mine\n"), "what the owner wrote stays"
    file.write_text(file.read_text("utf-8").replace("lr = 0.003", "lr = 0.004"), "utf-8")
    again = sign_file(file, locations)
    assert again == read_run_spec(file)
    assert again.run_id != signed.run_id
    verify_signed(again, me)


def verify_signed(spec: RunSpec, me: str) -> None:
    assert spec.publisher == me
    assert verify_signature(me, signed_bytes(spec), bytes.fromhex(spec.signature))


def test_what_cannot_be_signed_is_left_as_it_is(locations: Locations, tmp_path: Path) -> None:
    locations.prepare()
    file = tmp_path / "run.toml"
    file.write_text(TEXT.replace('publisher = ""', 'publisher = "12D3KooWother"'), "utf-8")
    before = file.read_bytes()
    with pytest.raises(RunSpecError, match="its publisher is 12D3KooWother"):
        sign_file(file, locations)
    locations.identity_file.write_bytes(b"damaged")
    with pytest.raises(RunSpecError, match="No such file"):
        sign_file(tmp_path / "none", locations)
    file.write_bytes(before.replace(b"12D3KooWother", b""))
    with pytest.raises(VolunteerError, match="identity"):
        sign_file(file, locations)
    assert file.read_bytes() == before.replace(b"12D3KooWother", b"")


SAYS_NAME = """
import argparse, json
parser = argparse.ArgumentParser()
for option in ("--from", "--imports", "--spec", "--name"):
    parser.add_argument(option)
found = parser.parse_args()
print(json.dumps({"spec_file": found.spec, "run_id": "", "run_name": found.name,
    "state_hash": "", "num_parameters": 1, "tokenizer": "bytes"}))
"""


def test_a_name_that_looks_like_a_flag_is_judged_as_a_name(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALLMENDE_HOME", str(home))
    monkeypatch.setattr(import_verb, "IMPORT_COMMAND", (sys.executable, "-c", SAYS_NAME))
    made = import_verb.run_import(tmp_path, tmp_path / "a.toml", "-x", None, is_bytes=False)
    assert made.run_name == "-x"
