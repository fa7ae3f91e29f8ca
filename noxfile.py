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
    requirements = [r for r in PROJECT["project"]["dependencies"] if not r.startswith(HEAVY)]
    session.install("--quiet", *requirements, *groups("test"))
    session.install("--quiet", "--no-deps", "--force-reinstall", ".")
    session.run("python", "-c", "import importlib.util as i; assert not i.find_spec('torch')")
    add_checkout_last(session.run("python", "-c", PURELIB, silent=True))
    heavy = [f"--ignore=tests/volunteer/{folder}" for folder in ("training", "lab")]
    session.run("pytest", "-n", "2", *pytest_arguments(session), "tests/volunteer", *heavy)


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

    Tests marked `system` start processes that share the cores and have deadlines: one at a time.
    With arguments of its own (`nox -s tests -- FILE`), pytest runs once.
    """
    if set(session.posargs) - {"--full"}:
        run(session, "pytest", *pytest_arguments(session), "--durations=15")
        return
    for marked, workers in (("not system", ("-n", "2")), ("system", ())):
        arguments = pytest_arguments(session, marked)
        run(session, "pytest", *workers, *arguments, "--durations=15")
