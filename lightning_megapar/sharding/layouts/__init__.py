"""The cheapest layouts of a graph of operations, in seconds: pure functions."""
