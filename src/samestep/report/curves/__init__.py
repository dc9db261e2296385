"""Curves of runs, from what they have written: a table, a picture, a page."""
