"""Trackers: the contract, what guards it, and those that write to other programs."""
