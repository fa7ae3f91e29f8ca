"""What an odd folder or file name does to an import: one line, never a traceback or a wait."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from tests.volunteer.training.test_import_weights import MODEL, write_model
from volunteer.errors import RunSpecError, VolunteerError
from volunteer.training import export
from volunteer.training.export import byte_tokenizer
from volunteer.training.import_run import Wishes, import_run, main
from volunteer.training.verb_failure import tell_failure

STEERING = "a\x1b[2Jb\x07\u202ec\udcff\r\x9b"
WISHES = Wishes(name="x", like=None, has_bytes=False)


def test_why_a_model_is_refused_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    tell_failure(VolunteerError(f"has {STEERING}", hint=STEERING), Path("/model"))
    tell_failure(OSError(2, "No such file", f"/{STEERING}"), Path("/model"))
    told = capsys.readouterr().err
    assert all(letter.isprintable() or letter == "\n" for letter in told)
    assert told.count("\n") == 3


def test_a_tokenizer_with_endless_digits_is_one_like_any(tmp_path: Path) -> None:
    write_model(tmp_path, msgspec.structs.replace(MODEL, vocab_size=256))
    text = json.dumps({"x": 7, **byte_tokenizer()}).replace("7", "9" * 5000, 1)
    (tmp_path / export.TOKENIZER_NAME).write_text(text)
    made = import_run(tmp_path, tmp_path / "imports", tmp_path / "run.toml", WISHES)
    assert made.tokenizer.startswith("json:")


@pytest.mark.parametrize("name", ["run\udcff.toml", "run\x1b[2J.toml"])
def test_a_file_that_no_answer_can_name_is_not_written(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, msgspec.structs.replace(MODEL, vocab_size=256))
    (tmp_path / export.TOKENIZER_NAME).write_text(json.dumps(byte_tokenizer()))
    argv = ["--from", str(tmp_path), "--imports", str(tmp_path / "i"), "--name", "x"]
    assert main([*argv, "--spec", str(tmp_path / name)]) == 1
    assert not (tmp_path / name).exists()


def test_a_device_is_not_read_to_see_whether_it_is_the_same_run(tmp_path: Path) -> None:
    write_model(tmp_path, msgspec.structs.replace(MODEL, vocab_size=256))
    (tmp_path / export.TOKENIZER_NAME).write_text(json.dumps(byte_tokenizer()))
    with pytest.raises(RunSpecError, match="is there already"):
        import_run(tmp_path, tmp_path / "imports", Path("/dev/null"), WISHES)
