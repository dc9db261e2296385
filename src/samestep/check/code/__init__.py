"""Finds code that breaks or differs on several ranks by reading it: nothing is imported or run."""
