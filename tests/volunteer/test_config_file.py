"""Changes of single settings: the rest of the owner's file stays, nothing invalid is written."""

from __future__ import annotations

import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from volunteer.config import Config
from volunteer.config_file import (
    DEFAULTS,
    FIXED_KEYS,
    change_setting,
    read_setting,
    toml_of,
    with_line,
    without_key,
)
from volunteer.errors import ConfigError

MINE = """# my machine
threads = 3   # the desktop needs the rest
hours = [
  "mon-fri 18:00-08:00",  # after work
  "sat,sun 00:00-24:00",
]
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(MINE)
    return file


def test_a_setting_is_added_changed_and_taken_back(file: Path) -> None:
    assert change_setting(file, "idle_minutes", ["10"]) == Config(
        threads=3, hours=("mon-fri 18:00-08:00", "sat,sun 00:00-24:00"), idle_minutes=10.0
    )
    assert file.read_text() == MINE + "idle_minutes = 10.0\n"
    change_setting(file, "idle_minutes", ["2.5"])
    assert file.read_text() == MINE + "idle_minutes = 2.5\n"
    assert read_setting(file, "idle_minutes") == 2.5
    change_setting(file, "idle_minutes", None)
    assert file.read_text() == MINE


def test_changes_at_once_lose_none(file: Path) -> None:
    wanted = {"idle_minutes": "7.0", "threads": "2", "mdns": "false", "duty_fraction": "0.5"}
    with ThreadPoolExecutor(len(wanted)) as pool:
        for turn in range(10):
            for key in wanted:
                change_setting(file, key, None)
            done = [pool.submit(change_setting, file, key, [text]) for key, text in wanted.items()]
            assert all(each.result() for each in done), turn
            now = {key: toml_of(read_setting(file, key)) for key in wanted}
            assert now == wanted, turn


def test_a_list_over_many_lines_is_replaced_whole(file: Path) -> None:
    change_setting(file, "hours", ["mon 1:00-2:00"])
    assert file.read_text() == (
        '# my machine\nthreads = 3   # the desktop needs the rest\nhours = ["mon 1:00-2:00"]\n'
    )


def test_a_file_that_is_not_there_is_made(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    assert change_setting(file, "headless", ["yes"]).headless
    assert file.read_text() == "headless = true\n"
    assert file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("treads", ["3"], "there is no setting `treads`"),
        ("zzzzzz", ["3"], "there is no setting `zzzzzz`"),
        ("threads", ["many"], "`threads` must be a whole number, 0 to 1_024, not 'many'"),
        ("threads", ["1", "2"], "`threads` takes one value, not 2"),
        ("threads", ["-1"], "`threads` must be 0 to 1_024"),
        ("idle_minutes", ["soon"], "must be a number"),
        ("headless", ["perhaps"], "`headless` must be true or false"),
        ("hours", ["always"], "'always' is not like 'mon-fri 18:00-08:00'"),
        ("network_hours", ["mon 12:00-13:00"], "have no minute in common"),
        ("exclusive_programs", ["python3"], "it could never run"),
        ("others_cpu_limit", ["0"], "must be 0.01 to 1"),
        ("gpus", ["0"], "is no GPU's own id"),
        ("disk_max_bytes", ["9" * 400], "must be a whole number of bytes"),
        ("threads", ["9" * 4000], "must be 0 to 1_024, not a number of thousands of digits"),
        ("exclusive_programs", ["blend\udcff"], "is no name of a program"),
        ("private_data", ["/home/\udcff"], "whose name is UTF-8"),
        ("upload_bytes_per_s", ["9"], "from 64 KiB to 1 TiB, or 0 for no limit, not 9"),
    ],
)
def test_what_cannot_be_is_refused_and_the_file_stays(
    file: Path, key: str, values: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        change_setting(file, key, values)
    assert message in str(caught.value)
    assert "line" not in str(caught.value), "there is no line of it yet"
    assert file.read_text() == MINE


def test_another_settings_fault_is_told_with_the_line_that_it_has(file: Path) -> None:
    file.write_text(MINE + "idle_minutes = -1\n")
    for key, value in (("threads", "1"), ("hours", "mon 1:00-2:00")):
        with pytest.raises(ConfigError, match="line 7: `idle_minutes` must be"):
            change_setting(file, key, [value])
    assert change_setting(file, "idle_minutes", ["3"]).idle_minutes == 3.0


def test_what_is_of_no_use_for_another_reason_is_not_written(file: Path) -> None:
    def verify(config: Config) -> None:
        raise ConfigError(f"{config.disk_max_bytes} is too little")

    with pytest.raises(ConfigError, match="80000000 is too little"):
        change_setting(file, "disk_max_bytes", ["80000000"], verify=verify)
    assert file.read_text() == MINE


@pytest.mark.parametrize(
    ("typed", "num_bytes"),
    [
        ("20GB", 20 * 10**9),
        ("1.5 GiB", 3 * 2**29),
        ("500m", 500 * 10**6),
        ("1TB", 10**12),
        ("80000000", 80_000_000),
        ("0", 0),
    ],
)
def test_bytes_are_taken_as_people_write_them(file: Path, typed: str, num_bytes: int) -> None:
    assert change_setting(file, "disk_max_bytes", [typed]).disk_max_bytes == num_bytes
    assert f"disk_max_bytes = {num_bytes}\n" in file.read_text()


@pytest.mark.parametrize(("key", "typed"), [("threads", "2k"), ("disk_max_bytes", "20 apples")])
def test_what_is_no_amount_of_bytes_is_refused(file: Path, key: str, typed: str) -> None:
    with pytest.raises(ConfigError, match="must be a whole number"):
        change_setting(file, key, [typed])


def test_an_unknown_setting_is_guessed_at(file: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_setting(file, "idle_minuets")
    assert caught.value.hint == "did you mean `idle_minutes`?"


def test_a_file_that_is_not_toml_is_left_alone(file: Path) -> None:
    file.write_text("threads = \n")
    with pytest.raises(ConfigError, match="not TOML"):
        change_setting(file, "threads", ["2"])
    assert file.read_text() == "threads = \n"


def test_gpus_and_a_cpu_contradict_each_other(file: Path) -> None:
    gpu = "GPU-8a5c0d3e-0000-1111-2222-333344445555"
    change_setting(file, "gpus", [gpu])
    with pytest.raises(ConfigError, match="`gpus` names GPUs, and `device` is cpu"):
        change_setting(file, "device", ["cpu"])


def test_settings_that_hold_at_the_next_start_are_all_but_the_policys() -> None:
    assert set(DEFAULTS) > FIXED_KEYS
    assert not {"idle_minutes", "headless", "hours", "disk_min_free_bytes"} & FIXED_KEYS


def test_a_line_is_added_before_the_first_table() -> None:
    assert with_line("a = 1\n[t]\nb = 2\n", "c = 3") == "a = 1\nc = 3\n[t]\nb = 2\n"
    assert with_line("a = 1", "c = 3") == "a = 1\nc = 3\n"
    assert without_key("a = 1\n", "b") == "a = 1\n"


def test_what_is_set_in_an_odd_way_is_the_owners_to_change() -> None:
    with pytest.raises(ConfigError, match="by hand"):
        without_key("threads . x = 3\n", "threads")


@given(value=st.text() | st.lists(st.text()) | st.booleans() | st.integers(-(2**62), 2**62))
def test_any_value_is_written_as_toml(value: object) -> None:
    if "\\ud" in ascii(value):
        return  # half a character: no text
    assert tomllib.loads(f"x = {toml_of(value)}")["x"] == value
