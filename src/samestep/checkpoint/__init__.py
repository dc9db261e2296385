"""Checkpoints: atomic, verified, written behind the training; no rank in any name or key."""
