"""`allmende doctor`: what this machine is like, what that means, and the one command that helps."""
