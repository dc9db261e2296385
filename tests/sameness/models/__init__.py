"""Tiny trainings whose data are made by code: one class, or own loop, for each row of the matrix.

The modules are loaded by their paths, as tasks are, so they import each other by full names.
"""
