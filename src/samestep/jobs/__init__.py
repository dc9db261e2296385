"""Starts what `launchers/` describes, and stays with it to its end."""
