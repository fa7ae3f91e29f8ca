"""Built-in corpus and RunSpec, shipped as package data."""
