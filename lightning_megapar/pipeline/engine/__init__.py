"""Runs a schedule on live ranks: actions, messages between stages, clocks brought together."""
