"""Losses over a whole batch that torch does not have."""

from samestep.losses.contrastive import clip, nt_xent, siglip, supcon

__all__ = ["clip", "nt_xent", "siglip", "supcon"]
