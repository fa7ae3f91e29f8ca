"""The config helps: every problem at once, with its line and what to write instead."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
from pathlib import Path

import pytest

from volunteer import config as config_source
from volunteer import config_rules
from volunteer.config import MAX_CONFIG_BYTES, Config, load_config
from volunteer.errors import ConfigError

PEER = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWKRyzVWW6ChFjQjK4miCty85Niy48tpPV95XdKu1BcvMA"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def problems_of(file: Path, text: str, **flags: object) -> list[str]:
    file.write_text(text, "utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(file, flags)
    assert caught.value.exit_code == 2
    return str(caught.value).splitlines()


def test_without_a_file_and_flags_all_is_default(file: Path) -> None:
    assert load_config(file, {}) == Config()
    assert load_config(file, {"device": None, "listen": None}) == Config()
    file.touch()
    assert load_config(file / "config.toml", {}) == Config()


def test_flags_win_over_the_file_and_the_file_over_defaults(file: Path) -> None:
    file.write_text('device = "cpu"\nthreads = 3\nlisten = []\ncheckpoint_every_s = 30\n')
    config = load_config(file, {"threads": 1, "bootstrap": (PEER,)})
    assert config == Config(
        device="cpu",
        threads=1,
        listen=(),
        checkpoint_every_s=30,
        bootstrap=(PEER,),
    )
    assert hash(config)


def test_all_problems_are_told_with_line_and_fix(file: Path) -> None:
    text = (
        "# mine\n"
        "treads = 4\n"
        'device = "cudda"\n'
        "checkpoint_every_s = 0.5\n"
        'listen = ["/ip4/0.0.0.0/tcp/0", "0.0.0.0:4001"]\n'
        'bootstrap = ["/ip4/192.0.2.1/tcp/4001"]\n'
        'disk_min_free_bytes = "20 GB"\n'
        "pause_on_battery = 1\n"
        "[zzz]\n"
        'device = "cpu"\n'
    )
    problems = problems_of(file, text, threads=-1)
    expected = [
        ("line 2", "did you mean `threads`?"),
        ("line 3", "did you mean `cuda`?"),
        ("line 4", "`checkpoint_every_s` must be 1 to 3_600, not 0.5"),
        ("line 5", "`listen` must be addresses like /ip4/0.0.0.0/tcp/4001; '0.0.0.0:4001' is no"),
        ("line 6", "'/ip4/192.0.2.1/tcp/4001' does not say whose address it is"),
        ("line 7", "`disk_min_free_bytes` must be a whole number, 67_108_864 to"),
        ("line 8", "`pause_on_battery` must be true or false, not 1"),
        ("line 9", "unknown key `zzz`; known: device, threads"),
        ("--threads must be", "0 to 1_024, not -1"),
    ]
    assert len(problems) == len(expected)
    for problem, (place, fix) in zip(problems, expected, strict=True):
        assert place in problem
        assert fix in problem
    assert str(file) in problems[0]


def test_a_flag_in_place_of_a_bad_line_counts(file: Path) -> None:
    file.write_text("threads = -5\n")
    assert load_config(file, {"threads": 2}).threads == 2


def test_flags_are_named_as_flags(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(file, {"bootstrap": ("/ip4/192.0.2.1/tcp/4001",), "device": "gpu"})
    assert str(caught.value).splitlines() == [
        "--bootstrap must be addresses like /ip4/192.0.2.1/tcp/4001/p2p/12D3KooW...;"
        " '/ip4/192.0.2.1/tcp/4001' does not say whose address it is:"
        " the /p2p/<peer id> part is missing",
        "--device must be auto, cpu, cuda, cuda:N, mps, xpu or xpu:N, not 'gpu'",
    ]
    assert caught.value.hint == "see `allmende start --help`"


def test_an_unknown_flag_is_told(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"--pause-on-batery; did you mean --pause-on-battery"):
        load_config(file, {"pause_on_batery": True})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("device", "3"),
        ("device", '"cuda:"'),
        ("device", '"cpu:0"'),
        ("threads", "true"),
        ("threads", "1.5"),
        ("threads", "1025"),
        ("checkpoint_every_s", "nan"),
        ("checkpoint_every_s", "inf"),
        ("checkpoint_every_s", "true"),
        ("listen", '"/ip4/0.0.0.0/tcp/0"'),
        ("listen", "[1]"),
        ("listen", '["/ip4/0.0.0.0/tcp/0 "]'),
        ("listen", '["/dns6"]'),
        ("listen.x", "1"),
        ("listen", '["/ip4/300.0.0.1/tcp/0"]'),
        ("listen", '["/ip4/0.0.0.0/tcp/65536"]'),
        ("listen", '["/ip4/0.0.0.0/udp/4001/quic-v1"]'),
        ("bootstrap", '["/ip4/192.0.2.1/tcp/4001/p2p/"]'),
        ("bootstrap", '["/ip4/192.0.2.1/tcp/4001/p2p/12D3KooW..."]'),
        ("bootstrap", f'["{PEER[:-1]}"]'),
        ("disk_min_free_bytes", "1024"),
        ("disk_min_free_bytes", "99999999999999999999"),
        ("pause_on_battery", '"no"'),
    ],
)
def test_bad_values_are_told(file: Path, key: str, value: str) -> None:
    (problem,) = problems_of(file, f"\n{key} = {value}\n")
    assert "line 2" in problem
    assert f"`{key.removesuffix('.x')}` must be" in problem


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1", "mps", "xpu", "xpu:12"])
def test_devices_are_accepted(device: str) -> None:
    assert Config(device=device).device == device


def test_a_long_value_is_cut(file: Path) -> None:
    (problem,) = problems_of(file, f'device = "{"x" * 5000}"\n')
    assert len(problem) < len(str(file)) + 250


def test_the_line_is_that_of_the_top_level(file: Path) -> None:
    problems = problems_of(file, '\n"threads" = -1\n[devices]\nthreads = 3\n')
    assert [problem.split(":")[0].split()[-1] for problem in problems] == ["2", "3"]


def test_what_is_not_toml_is_told_with_its_line(file: Path) -> None:
    (problem,) = problems_of(file, 'device = "cpu"\nthreads = \n')
    assert "line 2" in problem
    assert "not TOML" in problem


@pytest.mark.parametrize("value", ["9" * 400, "0x" + "f" * 20000, "9" * 5000, "[" * 5000])
def test_what_is_beyond_all_measure_is_told(file: Path, value: str) -> None:
    (problem,) = problems_of(file, f"threads = {value}\n")
    assert len(problem) < len(str(file)) + 250


def test_an_unreadable_file_is_told(file: Path) -> None:
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(file, {})
    file.write_bytes(b"#" * (MAX_CONFIG_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load_config(file, {})
    file.unlink()
    file.mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(file, {})


def test_a_config_made_in_code_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"`device` must be .*; `threads` must be"):
        Config(device="", threads=-1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().threads = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("threads", "num_cores", "expected"), [(0, 8, 7), (0, 2, 1), (0, 1, 1), (5, 2, 5)]
)
def test_threads_leave_a_core_to_the_owner(threads: int, num_cores: int, expected: int) -> None:
    assert Config(threads=threads).num_threads(num_cores) == expected


def test_every_field_is_documented_and_checked() -> None:
    tree = ast.parse(inspect.getsource(config_source))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Config").body
    documented = {
        field.target.id: text.value.value
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }
    names = [field.name for field in dataclasses.fields(Config)]
    assert list(documented) == names == list(config_rules.RULES)
    for name, text in documented.items():
        assert "Default" in str(text), name
