"""What this program is called where it says who it is.

Runs in: agent.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def program_name() -> str:
    """Return name and version, "allmende 0.1.0"; without a number where it is not installed."""
    try:
        return f"allmende {version('allmende')}"
    except PackageNotFoundError:
        return "allmende"
