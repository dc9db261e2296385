"""One run: its directory, steps, saves and end, whatever loop drives it."""
