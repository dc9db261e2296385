"""Exact retrieval metrics of embeddings."""

from samestep.evaluation.retrieval.measures import measure

__all__ = ["measure"]
