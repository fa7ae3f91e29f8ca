"""The torch processes: trainer and aggregator, and the pure functions they use."""
