"""What the machine can tell about itself and its owner."""
