"""The parts that the dashboard is made of."""
