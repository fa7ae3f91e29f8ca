"""Tests of the agent: its sockets, children, records and decisions."""
