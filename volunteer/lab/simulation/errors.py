"""What the referee of the simulation raises.

Runs in: simulation.
"""

from __future__ import annotations


class BrokenRule(AssertionError):
    """An invariant does not hold."""
