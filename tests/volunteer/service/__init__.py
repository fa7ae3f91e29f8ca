"""Tests of what starts it at login."""
