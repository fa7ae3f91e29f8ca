"""What the documents say, checked against the program and the repository."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main
from typer.core import TyperGroup

from tui.cli import TAGLINE, app
from volunteer.config import Config
from volunteer.locations import Locations

ROOT = Path(__file__).parents[1]
PROGRAM = typer.main.get_command(app)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE_SPAN = re.compile(r"`([^`\n]+)`")


def _committed_files() -> list[str]:
    """Return the files git knows; all but hidden folders where this is not a clone."""
    if (ROOT / ".git").exists():
        listing = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        return [name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]
    files = (file.relative_to(ROOT) for file in ROOT.rglob("*") if file.is_file())
    return [str(file) for file in files if not any(part.startswith(".") for part in file.parts)]


COMMITTED = _committed_files()
DOCUMENTS = [name for name in COMMITTED if name.endswith(".md")]
SOURCES = [
    n for n in COMMITTED if n.endswith(".py") and n.startswith(("tui/", "volunteer/", "p2p/"))
]


def _without_fences(text: str) -> str:
    return FENCE.sub("", text)


def _anchor(heading: str) -> str:
    """Return the anchor that a Markdown heading gets on the usual forges."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def _command_lines(name: str) -> Iterator[str]:
    """Yield the shell lines of a document's code blocks, and its code spans."""
    text = (ROOT / name).read_text(encoding="utf-8")
    for language, block in FENCE.findall(text):
        if language == "sh":
            yield from block.splitlines()
    yield from CODE_SPAN.findall(_without_fences(text))


def _verb_problem(words: list[str]) -> str:
    """Return why `allmende ...` is not a command of the program; empty if it is."""
    command, rest = PROGRAM, words[1:]
    while rest and isinstance(command, TyperGroup) and not rest[0].startswith("-"):
        verb = rest.pop(0)
        if verb == "VERB":
            return ""
        if verb not in command.commands:
            return f"no such verb: {verb}"
        command = command.commands[verb]
    known = {"--help", "-h", *(o for p in command.params for o in (*p.opts, *p.secondary_opts))}
    unknown = [w for w in rest if w.startswith("-") and w.split("=")[0] not in known]
    return f"unknown flags: {unknown}" if unknown else ""


def _script_problem(words: list[str]) -> str:
    """Return why `sh SCRIPT ...` cannot be run as documented; empty if it can."""
    script = ROOT / words[1]
    if not script.is_file():
        return "no such script"
    text = script.read_text(encoding="utf-8")
    unknown = [w for w in words[2:] if w.startswith("--") and w not in text]
    return f"unknown flags: {unknown}" if unknown else ""


def _problem(line: str) -> str:
    words = shlex.split(line, comments=True)
    if words[:1] == ["allmende"]:
        return _verb_problem(words)
    if words[:1] == ["sh"]:
        return _script_problem(words)
    return ""


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_command_in_a_document_exists(name: str) -> None:
    problems = {
        line: problem
        for line in _command_lines(name)
        if line.startswith(("allmende ", "sh packaging/")) and (problem := _problem(line))
    }
    assert not problems


def test_the_check_of_commands_finds_wrong_ones() -> None:
    assert _problem("allmende status --json  # a comment") == ""
    assert _problem("allmende fly") == "no such verb: fly"
    assert _problem("allmende pause --fro 2h") == "unknown flags: ['--fro']"
    assert _problem("sh packaging/install.sh --what") == "unknown flags: ['--what']"
    assert _problem("sh packaging/none.sh") == "no such script"


def test_readme_shows_every_verb_of_daily_use() -> None:
    assert isinstance(PROGRAM, TyperGroup)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"allmende ([a-z]+)", readme))
    assert set(PROGRAM.commands) - {"version"} <= shown


@pytest.mark.parametrize("file", SOURCES)
def test_every_command_named_in_the_source_exists(file: str) -> None:
    spans = CODE_SPAN.findall((ROOT / file).read_text(encoding="utf-8"))
    wrong = {span: _problem(span) for span in spans if span.startswith("allmende ")}
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_link_to_a_file_or_heading_leads_somewhere(name: str) -> None:
    document = ROOT / name
    broken = []
    for target in LINK.findall(_without_fences(document.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", target):
            continue
        file_part, _, anchor = target.partition("#")
        file = document.parent / file_part if file_part else document
        if not file.exists():
            broken.append(target)
        elif anchor:
            headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            if anchor not in map(_anchor, headings):
                broken.append(target)
    assert not broken


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "SECURITY.md"])
def test_every_source_file_named_in_a_document_exists(name: str) -> None:
    spans = CODE_SPAN.findall(_without_fences((ROOT / name).read_text(encoding="utf-8")))
    named = [s for s in spans if re.fullmatch(r"(volunteer|tui|p2p|tests|packaging)/[\w./-]*", s)]
    assert [s for s in named if not (ROOT / s).exists()] == []


def test_readme_opens_with_the_name_and_the_one_sentence() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines[0].lower() == f"# {project['name']}"
    assert lines[2] == project["description"]
    assert lines[4].endswith("(docs/screenshot.svg)")


def test_readme_lists_every_setting_with_its_default() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", readme, re.MULTILINE)
    listed = {key: tomllib.loads(f"value = {default}")["value"] for key, default in rows}
    defaults = {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(Config)
        for value in [field.default]
    }
    assert listed == defaults
    assert list(listed) == list(defaults)


def test_readme_says_where_the_settings_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    usual = Locations.from_environment({}).config_file
    if sys.platform == "linux":
        assert f"`~/{usual.relative_to(Path.home())}`" in readme
    assert Locations.from_environment({"ALLMENDE_HOME": "/x"}).config_file == Path("/x/config.toml")
    assert "with `ALLMENDE_HOME` set, in `config.toml` of that folder" in readme


def test_the_tagline_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["description"] == TAGLINE


def test_changelog_has_an_unreleased_section_or_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "\n## [Unreleased]\n" in text
    sections = re.findall(r"^### (.*)$", text, re.MULTILINE)
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"}
    assert sections
    assert set(sections) <= kinds


def test_nothing_large_secret_or_generated_is_committed() -> None:
    checked = subprocess.run(
        [sys.executable, "packaging/check_files.py", *COMMITTED],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.stdout == ""
    assert checked.returncode == 0


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("ends.md", b"text", "does not end in exactly one newline"),
        ("ends.md", b"text\n\n", "does not end in exactly one newline"),
        ("id.txt", b"-----BEGIN " + b"PRIVATE KEY-----\n", "private key"),
        ("identity.key", b"\0\1", "a key, log"),
        ("big.bin", b"\0" * (5 * 1024 * 1024 + 1), "at most 5242880"),
    ],
    ids=["no newline", "two newlines", "key inside", "key by name", "large"],
)
def test_the_check_of_files_finds_wrong_ones(
    tmp_path: Path, name: str, content: bytes, problem: str
) -> None:
    file = tmp_path / name
    file.write_bytes(content)
    script = str(ROOT / "packaging/check_files.py")
    checked = subprocess.run(
        [sys.executable, script, str(file)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 1
    assert problem in checked.stdout
