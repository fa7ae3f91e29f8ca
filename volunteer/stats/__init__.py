"""What this machine has given: done here, and confirmed by the swarm."""
