"""PROTOCOL.md held to the program: golden frames, malformed ones, and a second implementation."""
