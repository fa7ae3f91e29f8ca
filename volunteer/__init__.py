"""The volunteer's processes (agent, trainer, aggregator) and what they share."""
