"""Facts about torch functions, by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_DRAWING = """
rand randn randint randperm normal bernoulli rand_like randn_like randint_like multinomial poisson binomial
dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_alpha_dropout
feature_alpha_dropout_ feature_dropout feature_dropout_ native_dropout gumbel_softmax rrelu rrelu_
normal_ uniform_ bernoulli_ random_ exponential_ geometric_ log_normal_ cauchy_
scaled_dot_product_attention multi_head_attention_forward lstm gru rnn_tanh rnn_relu
fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
kaiming_uniform_ kaiming_normal_ xavier_uniform_ xavier_normal_ trunc_normal_ orthogonal_ sparse_
"""
RANDOM = frozenset(_DRAWING.split())
"""Torch functions that may draw random numbers."""
SUMS = frozenset(("add", "add_", "__add__", "__radd__", "__iadd__"))
"""In these, a lane that only one side has keeps that side's value."""
_NO_CHANGE = ("__invert__", "__index__", "__int__", "__iter__")


def changes_first(name: str) -> bool:
    """Return whether a torch function of this name changes its first argument."""
    if name.endswith("__"):
        is_set = name in ("__setitem__", "__set__")
        return is_set or (name.startswith("__i") and name not in _NO_CHANGE)
    return name.endswith("_")


def moves_statistics(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call is that of a BatchNorm in training mode."""
    named = dict(zip(("x", "mean", "var", "weight", "bias", "training"), args, strict=False))
    by_name = func is torch.nn.functional.batch_norm
    training = kwargs.get("training", named.get("training", False)) if by_name else False
    return bool(training) and kwargs.get("running_mean", named.get("mean")) is not None
