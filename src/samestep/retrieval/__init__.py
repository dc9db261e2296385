"""Exact retrieval metrics of embeddings."""

from samestep.retrieval.measures import measure

__all__ = ["measure"]
