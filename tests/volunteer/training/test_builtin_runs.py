"""The shipped RunSpecs agree with the code that interprets them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from volunteer.data.builtin import builtin_run_names, load_builtin_run
from volunteer.errors import RunSpecError
from volunteer.run import parse_run_spec, verify_run_spec
from volunteer.training.genesis import genesis_hash
from volunteer.training.layout import num_parameters

ROOT_DIR = Path(__file__).parents[3]


def make_commons_script() -> ModuleType:
    file = ROOT_DIR / "packaging" / "make_commons.py"
    module_spec = importlib.util.spec_from_file_location("make_commons", file)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


def test_both_runs_are_shipped() -> None:
    assert builtin_run_names() == ("commons", "demo")


@pytest.mark.parametrize("name", ["commons", "demo"])
def test_the_genesis_hash_is_what_the_code_computes(name: str) -> None:
    spec = load_builtin_run(name)
    assert spec.genesis.state_hash == genesis_hash(spec)


def test_the_files_are_what_the_script_writes(tmp_path: Path) -> None:
    make_commons_script().main(tmp_path)
    for name in builtin_run_names():
        shipped = (ROOT_DIR / "volunteer" / "data" / f"{name}.toml").read_text("utf-8")
        assert (tmp_path / f"{name}.toml").read_text("utf-8") == shipped
        assert parse_run_spec(shipped, source=name) == load_builtin_run(name)


@pytest.mark.parametrize(("name", "least", "most"), [("commons", 1e6, 3e6), ("demo", 2e5, 3e5)])
def test_sizes_suit_any_machine(name: str, least: float, most: float) -> None:
    spec = load_builtin_run(name)
    verify_run_spec(spec, source=name)
    assert least < num_parameters(spec.model) < most
    assert spec.publisher == ""


def test_an_unknown_run_is_answered_with_the_known_ones() -> None:
    with pytest.raises(RunSpecError) as caught:
        load_builtin_run("gpt")
    assert caught.value.hint == "there are: commons, demo"


@pytest.mark.slow
def test_reading_a_shipped_run_needs_no_torch() -> None:
    code = (
        "import sys; from volunteer.data.builtin import load_builtin_run; "
        "load_builtin_run('demo'); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT_DIR)
