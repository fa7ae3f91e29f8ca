"""Tests of the round protocol, rule by rule."""
