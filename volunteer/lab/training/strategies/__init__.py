"""How workers can share what they learn; one source file a strategy."""
