"""Evaluations over all ranks: exact metrics, gathered outputs, retrieval."""
