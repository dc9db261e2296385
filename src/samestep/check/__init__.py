"""Finds what would go wrong: on machines and between ranks (machine), and in code (code)."""
