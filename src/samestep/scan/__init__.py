"""What in a code base breaks or differs on several ranks, found by reading it: nothing is imported or run."""
