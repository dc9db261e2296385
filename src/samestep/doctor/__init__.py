"""What would go wrong, found before it does: on this machine, and between the ranks."""
