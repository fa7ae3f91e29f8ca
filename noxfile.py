"""What CI runs: plain `nox` is all of it, `nox -s NAME` a part; `sh packaging/test.sh` brings nox.

One environment (`.nox/all`) serves every session but `light`: PyTorch is large. The tests see the
installed package: the checkout comes last on `sys.path`, and is there for `import tests` only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nox

nox.needs_version = ">=2025.5"

PROJECT = nox.project.load_toml("pyproject.toml")
ENVIRONMENT = Path(".nox/all").absolute()
HEAVY = (
    "torch",
    "safetensors",
    "numpy",
)  # only the trainer, the aggregator and the lab may import them
LIBRARIES = (
    "transformers",
    "matplotlib",
    "tokenizers",
    "datasets",
    "pyarrow",
)  # only tests of the trainer, the lab and exports use them; most of the time to install
TRAINER_TESTS = [f"--ignore=tests/volunteer/{folder}" for folder in ("training", "lab")]
light_has_run: list[str] = []
"""Not empty once that session has passed in this process."""
PURELIB = "import sysconfig; print(sysconfig.get_path('purelib'))"


def groups(*names: str) -> tuple[str, ...]:
    """Return the requirements of dependency groups of pyproject.toml."""
    return nox.project.dependency_groups(PROJECT, *names)


def run(session: nox.Session, tool: str, *arguments: str, silent: bool = False) -> object:
    """Run a tool of `.nox/all`; its output is returned if silent."""
    return session.run(str(ENVIRONMENT / "bin" / tool), *arguments, external=True, silent=silent)


def add_checkout_last(purelib: object) -> None:
    """Let `import tests` work in an environment without hiding the installed package."""
    Path(str(purelib).strip(), "checkout.pth").write_text(f"{Path.cwd()}\n", encoding="utf-8")


def light_tests() -> list[str]:
    """Return what is in `tests/volunteer` and needs no PyTorch."""
    found = sorted(Path("tests/volunteer").iterdir())
    return [str(path) for path in found if f"--ignore={path.as_posix()}" not in TRAINER_TESTS]


def pytest_arguments(session: nox.Session, marked: str = "") -> list[str]:
    """Return the arguments that every pytest run gets; `-- --full` adds the hours-long tests."""
    rest = [argument for argument in session.posargs if argument != "--full"]
    marks = [*([marked] if marked else []), *([] if "--full" in session.posargs else ["not full"])]
    return ["--import-mode=append", *(["-m", " and ".join(marks)] if marks else []), *rest]


@nox.session(venv_backend="none")
def environment(session: nox.Session) -> None:
    """Make or refresh `.nox/all`: the installed package and the tools."""
    if not ENVIRONMENT.exists():
        session.run(sys.executable, "-m", "venv", str(ENVIRONMENT), external=True)
    tools = ("nox", *groups("test", "lint", "types", "arch"))
    run(session, "python", "-m", "pip", "install", "--quiet", ".", *tools)
    add_checkout_last(run(session, "python", "-c", PURELIB, silent=True))


@nox.session(venv_backend="none", requires=["environment"])
def lint(session: nox.Session) -> None:
    """Check style, formatting and spelling."""
    run(session, "ruff", "check")
    run(session, "ruff", "format", "--check")
    run(session, "codespell")


@nox.session(venv_backend="none", requires=["environment"])
def types(session: nox.Session) -> None:
    """Check the types strictly, the tests' included."""
    run(session, "mypy")


@nox.session(venv_backend="none", requires=["environment"])
def arch(session: nox.Session) -> None:
    """Check the layer rules."""
    run(session, "lint-imports", "--no-cache")


@nox.session(venv_backend="none", requires=["environment"], default=False)
def docs(session: nox.Session) -> None:
    """Run the documents' tests alone; `tests` has them too."""
    run(session, "pytest", *pytest_arguments(session), "tests/test_docs.py")


@nox.session(venv_backend="venv", reuse_venv=True)
def light(session: nox.Session) -> None:
    """Test what needs no PyTorch where there is none."""
    wanted = (*PROJECT["project"]["dependencies"], *groups("test"))
    session.install("--quiet", *(r for r in wanted if not r.startswith((*HEAVY, *LIBRARIES))))
    session.install("--quiet", "--no-deps", "--force-reinstall", ".")
    missing = f"import importlib.util as i; assert not any(map(i.find_spec, {HEAVY}))"
    session.run("python", "-c", missing)
    add_checkout_last(session.run("python", "-c", PURELIB, silent=True))
    session.run("pytest", "-n", "2", *pytest_arguments(session), "tests/volunteer", *TRAINER_TESTS)
    light_has_run.append(session.name)


@nox.session(venv_backend="none")
def install(session: nox.Session) -> None:
    """Install with the README's command into an empty home, run the program, and uninstall."""
    home = Path(session.create_tmp()).absolute() / "a home"
    home.mkdir(exist_ok=True)
    fresh = {"HOME": str(home), "XDG_DATA_HOME": None, "PIPX_HOME": None, "PIPX_BIN_DIR": None}
    session.run("sh", "packaging/install.sh", env=fresh, external=True)
    session.run(str(home / ".local/bin/allmende"), "version", env=fresh, external=True)
    session.run("sh", "packaging/install.sh", "--uninstall", env=fresh, external=True)
    if (home / ".local/bin/allmende").exists():
        session.error("--uninstall left the command behind")


@nox.session(venv_backend="none", requires=["environment"])
def tests(session: nox.Session) -> None:
    """Run every test against the installed package: at once what computes, then what waits.

    Tests marked `system` start processes. Those in `tests/system` have deadlines, the owner's or a
    round's, and the machine for themselves; so have all hours-long ones. The others mostly wait:
    two files at once. What `light` has run in the same `nox`, and computes, is not run again.
    With arguments of its own (`nox -s tests -- FILE`), pytest runs once.
    """
    if set(session.posargs) - {"--full"}:
        run(session, "pytest", *pytest_arguments(session), "--durations=15")
        return
    computes, system = (pytest_arguments(session, marked) for marked in ("not system", "system"))
    two = ("-n", "2", "--durations=15")
    again = light_tests() if light_has_run else []
    run(session, "pytest", *two, *computes, *(f"--ignore={path}" for path in again))
    alone = "tests"
    if "--full" not in session.posargs:
        alone = "tests/system"
        run(session, "pytest", *two, "--dist=loadfile", *system, f"--ignore={alone}")
    run(session, "pytest", "--durations=15", *system, alone)
