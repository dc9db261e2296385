"""Finds what would go wrong before it does: on this machine, and between the ranks."""
