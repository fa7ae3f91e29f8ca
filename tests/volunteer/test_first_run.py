"""What the owner is told before anything runs, and how the answer is kept."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.fakes.first_run import make_plan
from volunteer import first_run
from volunteer.config import Config, load_config
from volunteer.errors import ConfigError
from volunteer.first_run import has_answered, keep_answers, plan_rows, when_of
from volunteer.locations import HOME_VARIABLE, Locations


@pytest.fixture
def locations(tmp_path: Path) -> Locations:
    return Locations.from_environment({HOME_VARIABLE: str(tmp_path / "home")})


def test_the_answer_is_kept_over_a_restart_and_asked_for_again_where_it_is_damaged(
    locations: Locations,
) -> None:
    assert not has_answered(locations)
    keep_answers(locations, "idle")
    assert has_answered(locations)
    assert not locations.config_file.exists(), "the default needs no line"
    locations.first_run_file.write_bytes(b"{")
    assert not has_answered(locations)


def test_the_answer_changes_one_setting_and_what_was_set_by_hand_stays(
    locations: Locations,
) -> None:
    locations.prepare()
    by_hand = "# mine\nthreads = 2  # enough\nhours = ['mon-fri 18:00-08:00']\n"
    locations.config_file.write_text(by_hand)
    config = keep_answers(locations, "always")
    assert (config.headless, config.threads, config.hours) == (True, 2, ("mon-fri 18:00-08:00",))
    text = locations.config_file.read_text()
    assert text.startswith(by_hand)
    kept = locations.first_run_file.read_bytes()
    keep_answers(locations, "always")
    keep_answers(locations, None)
    assert when_of(load_config(locations.config_file, {})) == "always"
    assert locations.config_file.read_text() == text
    assert locations.first_run_file.read_bytes() == kept
    assert keep_answers(locations, "idle") == dataclasses.replace(config, headless=False)
    assert locations.config_file.read_text() == by_hand


def test_settings_that_are_not_valid_are_no_answer(locations: Locations) -> None:
    locations.prepare()
    locations.config_file.write_text("threads = -1\n")
    with pytest.raises(ConfigError, match="line 1"):
        keep_answers(locations, "idle")
    assert not has_answered(locations)


def test_a_full_disk_is_no_answer(locations: Locations, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(first_run, "replace_file", refuse)
    with pytest.raises(ConfigError, match=r"could not be kept: .*No space left"):
        keep_answers(locations, "idle")
    assert not has_answered(locations)


def rows(**changes: object) -> dict[str, str]:
    plan = dataclasses.replace(make_plan(), **changes)  # type: ignore[arg-type]
    return dict(plan_rows(plan))


def test_the_plan_says_what_this_machine_gives() -> None:
    told = rows()
    assert told["Trains"].endswith(
        "run commons), on NVIDIA GeForce RTX 4090 (24 GB) and 15 of 16 CPU threads at lowest"
        " priority"
    )
    assert told["Memory"].startswith("about 2.1 of 32 GB; pauses when others have less than 0.5 GB")
    assert told["Disk"] == "about 1.1 of 400 GB free; pauses below 2.1 GB"
    assert told["Network"].startswith("every 10 min 0.7 MB for each of up to 32 members; unlimited")
    assert "/home/ada" in told["Stores"]
    assert "No file, no text, no name" in told["Sends"]


def test_the_plan_goes_by_the_settings() -> None:
    cpu = Config(device="cpu", threads=2, upload_bytes_per_s=1_000_000)
    assert rows(config=cpu)["Trains"].endswith("on 2 of 16 CPU threads at lowest priority")
    assert "up at most 1.00 MB/s" in rows(config=cpu)["Network"]
    budget = rows(config=Config(monthly_data_budget_bytes=5_000_000_000))["Network"]
    assert budget.endswith("; at most 5.00 GB a month")
    assert "; pauses above 1.0 GB, and when" in rows(config=Config(ram_max_bytes=10**9))["Memory"]
    disk = rows(config=Config(disk_max_bytes=10**9))["Disk"]
    assert disk.endswith("; pauses below 2.1 GB, and above 1.0 GB of its own")
    assert "on cuda:1 and" in rows(config=Config(device="cuda:1"))["Trains"]
    assert "the first GPU that PyTorch can use, else 15 of 16" in rows(gpus=())["Trains"]
    assert rows(disk_free_bytes=None)["Disk"].startswith("about 1.1 GB; pauses")


def test_the_plan_of_this_machine_is_made_without_touching_it(locations: Locations) -> None:
    plan = first_run.make_plan(locations, lambda: ("A card",))
    assert plan.gpus == ("A card",)
    assert plan.num_cores >= 1
    assert plan.ram_bytes > 10**8
    assert not locations.data_dir.exists()
