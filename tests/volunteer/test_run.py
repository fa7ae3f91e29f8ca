"""The RunSpec: parsed strictly, written back equal, hashed the same everywhere."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from volunteer.data.builtin import load_builtin_run
from volunteer.errors import RunSpecError
from volunteer.run import (
    MAX_SPEC_BYTES,
    InnerSpec,
    OuterSpec,
    RunSpec,
    format_run_spec,
    parse_run_spec,
    read_run_spec,
    signed_bytes,
    verify_run_spec,
)

SPEC = msgspec.structs.replace(load_builtin_run("demo"), outer=OuterSpec())
TEXT = format_run_spec(SPEC)


def parse(text: str) -> RunSpec:
    return parse_run_spec(text, source="here")


def test_what_is_written_is_read_back_equal() -> None:
    assert parse(TEXT) == SPEC
    assert parse(TEXT).run_id == SPEC.run_id


@given(
    description=st.text(st.characters(codec="utf-8"), max_size=200),
    lr=st.floats(min_value=1e-9, max_value=1e3),
    sources=st.lists(
        st.sampled_from(("builtin:milton", "file:/a/*.txt", "hf:a/b@c:d", "hf:a/e")),
        min_size=1,
        max_size=4,
    ),
)
def test_any_text_and_number_survives(description: str, lr: float, sources: list[str]) -> None:
    inner = msgspec.structs.replace(SPEC.inner, lr=lr)
    data = msgspec.structs.replace(SPEC.data, sources=tuple(sources))
    spec = msgspec.structs.replace(SPEC, description=description, inner=inner, data=data)
    again = parse(format_run_spec(spec))
    assert again == spec
    assert again.run_id == spec.run_id


def test_the_run_id_is_of_everything_but_the_signature() -> None:
    signed = msgspec.structs.replace(SPEC, signature="ab" * 64)
    assert signed.run_id == SPEC.run_id
    assert signed_bytes(signed) == signed_bytes(SPEC)
    other = msgspec.structs.replace(SPEC, contact="someone")
    assert other.run_id != SPEC.run_id


def test_the_run_ids_of_the_shipped_runs_are_pinned() -> None:
    """Changing a shipped run makes another run: everyone's chain would be left behind."""
    golden = Path(__file__).parents[1] / "golden" / "run_ids.txt"
    lines = [f"{name} {load_builtin_run(name).run_id}" for name in ("commons", "demo")]
    assert golden.read_text("utf-8").splitlines() == lines


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[inner]", "[inner]\nlearning = 3", r"there is no inner\.learning \(line 28\)$"),
        (
            "momentum = 0.5",
            "momentun = 0.5",
            r"no outer\.momentun: did you mean momentum\? \(line 40",
        ),
        (
            "[codec]",
            "[codec]\nround_s = 3",
            r"no codec\.round_s: it belongs into \[rounds\] \(line 43\)$",
        ),
        (
            'name = "demo"',
            "round_s = 3",
            r"no round_s: it belongs into \[rounds\] \(line 2\); name is",
        ),
        ("[outer]", "[outr]", r"no outr: did you mean outer\? \(line 38\)$"),
        ("[outer]", "[[outer]]", r"\[outer\] must be a table$"),
        ("[model]", "[mo\x1b]", "here"),
        ("[model]", '["mo\\u001b"]', r"no 'mo\\x1b'; model is missing$"),
        ("lr = 0.003", "lr = -1.0", r"inner\.lr must be a number > 0\.0, not -1\.0 \(line 28\)$"),
        ("lr = 0.003", 'lr = "fast"', "must be a number, not 'fast'"),
        ("beta2 = 0.95", "beta2 = 1.0", "beta2"),
        ("held_out_fraction = 0.05", "held_out_fraction = 0.0", "held_out_fraction"),
        ("num_heads = 4", "num_heads = 7", "multiple"),
        ("num_heads = 4", "num_heads = 4\nnum_kv_heads = 3", "num_kv_heads must divide"),
        ("vocab_size = 256", "vocab_size = 300", "256"),
        ('"builtin:milton"', '"text:milton"', "builtin:NAME"),
        ('"builtin:milton"', '"file:passwd"', "begins with /"),
        ('"builtin:milton"', '"hf:../../etc"', "hf:OWNER/NAME"),
        ('"builtin:milton"', '"hf:text"', "hf:OWNER/NAME"),
        ('"builtin:milton"', '"hf:./home"', "hf:OWNER/NAME"),
        ('"builtin:milton"', '"private:/home"', "takes no name"),
        (
            'tokenizer = "bytes"',
            'tokenizer = "json:12"',
            "must be bytes, or json: and 64 hex",
        ),
        ('name = "demo"', 'name = "My Run"', "name must be at most 64 of a-z, 0-9.*not 'My Run'"),
        ('signature = ""', 'signature = "12"', "signature must be 128 hex digits"),
        ("[evaluation]", "[evaluation]\nmax_s = 0.0", "max_s"),
        ('id = "int4"', 'id = "int2"', "unknown"),
        ('quorum = "1/2"', 'quorum = "3/4"', r"one of '1/2', '2/3', not '3/4' \(line 56\)$"),
        ("[codec]", "[codec]\nladder_kept = [8, 9]", "an entry that .* multiple of 8, not 9"),
        ("seed = 1667", 'source = "sed"\nseed = 0', r"genesis\.source must be one of 'seed', 'wei"),
        ("seed = 1667", 'source = "weights"\nseed = 1', r"genesis\.seed must be 0"),
        ("format = 1", "format = 2", "format|1"),
        ("seed = 1667", "seed = 99999999999999999999", "here"),
        ("[model]", "[model", "here"),
        ("seed = 1667", "seed = " + "[" * 5000 + "]" * 5000, "nested too deeply$"),
        ("seed = 1667", "seed = " + "9" * 5000, "a number in it has thousands of digits$"),
        ("seed = 1667", "seed = 0x" + "f" * 20000, "a number in it has thousands of digits$"),
        ("[inner]", f"[inner]\n{'k' * 50000} = 3", r"no inner\.'k{1,60}\.\.\."),
        ('tokenizer = "bytes"', 'tokenizer = "bytes\\n"', "tokenizer"),
        ('tokenizer = "bytes"', f'tokenizer = "json:{"a" * 64}\\n"', "tokenizer"),
        ('signature = ""', f'signature = "{"a" * 128}\\n"', "signature"),
        ('name = "demo"', 'name = "../demo"', "name"),
    ],
)
def test_a_bad_spec_is_refused_with_the_place(old: str, new: str, said: str) -> None:
    assert old in TEXT
    with pytest.raises(RunSpecError, match=said) as caught:
        parse(TEXT.replace(old, new, 1))
    assert str(caught.value).startswith("here: ")
    assert caught.value.hint


def test_everything_that_is_wrong_in_a_file_is_told_with_its_line() -> None:
    text = TEXT.replace("lr = 0.003", "lr = 0.0").replace("vocab_size", "vocabulary")
    with pytest.raises(RunSpecError, match=r"vocabulary.*\(line 15\); inner\.lr .*\(line 28\)$"):
        parse(text)
    with pytest.raises(RunSpecError, match=r"; and 988 more$"):
        parse("\n".join(f"{chr(97 + i % 26)}{i} = 1" for i in range(995)))
    # A line that stands in a text is none of a key: rather no line than a wrong one.
    text = TEXT.replace("lr = 0.003", "lr = 0.0").replace(
        'ion = "', 'ion = """\n[inner]\nlr = 1\n', 1
    )
    with pytest.raises(RunSpecError, match=r"inner\.lr must be a number > 0\.0, not 0\.0$"):
        parse(text.replace('."\nlicence', '."""\nlicence', 1))


def test_a_run_that_begins_from_a_seed_is_written_as_before() -> None:
    assert "source" not in TEXT.partition("[genesis]")[2].partition("[data]")[0]
    given = msgspec.structs.replace(
        SPEC, genesis=msgspec.structs.replace(SPEC.genesis, source="weights", seed=0)
    )
    assert given.genesis.is_given
    assert not SPEC.genesis.is_given
    assert parse(format_run_spec(given)) == given
    assert given.run_id not in (SPEC.run_id, parse(TEXT.replace("seed = 1667", "seed = 0")).run_id)


def test_all_problems_are_told_together() -> None:
    model = msgspec.structs.replace(SPEC.model, num_heads=7, vocab_size=300)
    with pytest.raises(RunSpecError, match=r"multiple.*; .*256"):
        verify_run_spec(msgspec.structs.replace(SPEC, model=model), source="x")


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    huge = tmp_path / "huge.toml"
    huge.write_bytes(b"#" * (MAX_SPEC_BYTES + 1))
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    for file, said in [(huge, "larger"), (binary, "utf-8"), (tmp_path / "none", "none: No such")]:
        with pytest.raises(RunSpecError, match=said):
            read_run_spec(file)


def test_the_defaults_are_those_of_the_design() -> None:
    spec = InnerSpec(lr=0.1, decay_rounds=1, batch_sequences=1)
    assert (spec.beta1, spec.beta2, spec.weight_decay, spec.clip_norm) == (0.9, 0.95, 0.1, 1.0)
    assert (SPEC.outer.lr, SPEC.outer.momentum) == (0.7, 0.5)
    assert (SPEC.codec.id, SPEC.codec.block_elements) == ("int4", 4096)
