"""Tests of volunteer.training."""
