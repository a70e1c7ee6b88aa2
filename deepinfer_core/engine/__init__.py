"""The engine: its core loop, and the fronts that people use."""
