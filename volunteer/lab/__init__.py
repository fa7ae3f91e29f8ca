"""Reproductions of the papers' comparisons, and simulations, on one machine."""
