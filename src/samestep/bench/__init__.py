"""Measurements that users run on their own machines, and documents of them."""
