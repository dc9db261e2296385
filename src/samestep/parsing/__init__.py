"""Turns text from elsewhere into values. What cannot be turned is a `TextError`, and nothing else.

Files, command lines and environment variables are read by these functions only; a caller gives the
error its own class, with what was read and what to do.
"""
