"""The agent process: policy, swarm, round protocol, stats and control socket."""
