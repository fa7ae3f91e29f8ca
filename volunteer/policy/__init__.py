"""When this machine contributes, and why not."""
