"""Tests on a real cluster of several hosts, made of namespaces on one machine."""
