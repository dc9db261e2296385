"""Other projects' names for our keys: accepted, reported, and refused beside the real key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from samestep.errors import Mistake


@dataclass(frozen=True)
class Alias:
    """The key that another name stands for, and how to convert its value."""

    key: str
    convert: Callable[[Any], Any] = lambda value: value


def _precision_of_fp16(value: Any) -> Any:
    return "fp16" if value is True else "fp32" if value is False else value


ALIASES: dict[str, Alias] = {
    "batch_size": Alias("batch_per_rank"),
    "global_batch_size": Alias("global_batch"),
    "grad_accum_steps": Alias("accumulation"),
    "grad_accumulation": Alias("accumulation"),
    "gradient_accumulation_steps": Alias("accumulation"),
    "accumulation_steps": Alias("accumulation"),
    "clip_norm": Alias("clip.norm"),
    "max_grad_norm": Alias("clip.norm"),
    "gradient_clip_val": Alias("clip.norm"),
    "base_batch_size": Alias("base_batch"),
    "ema_decay": Alias("ema.decay"),
    "distributed": Alias("distributed.enabled"),
    "ddp": Alias("distributed.enabled"),
    "ddp_enabled": Alias("distributed.enabled"),
    "backend": Alias("distributed.backend"),
    "ddp_backend": Alias("distributed.backend"),
    "dist_backend": Alias("distributed.backend"),
    "ddp_find_unused_parameters": Alias("distributed.find_unused_parameters"),
    "nodes": Alias("distributed.num_nodes"),
    "gpus_per_node": Alias("launch.slurm.gpus_per_node"),
    "sync_bn": Alias("distributed.sync_batchnorm"),
    "sync_batchnorm": Alias("distributed.sync_batchnorm"),
    "distributed.sync_bn": Alias("distributed.sync_batchnorm"),
    "distributed.grad_accum_steps": Alias("accumulation"),
    "distributed.grad_accumulation": Alias("accumulation"),
    "distributed.gradient_accumulation_steps": Alias("accumulation"),
    "distributed.accumulation_steps": Alias("accumulation"),
    "fp16": Alias("precision", _precision_of_fp16),
    "distributed.fp16": Alias("precision", _precision_of_fp16),
    "evaluation": Alias("evaluation.mode"),
    "resume": Alias("resume.checkpoint"),
    "resume_from": Alias("resume.checkpoint"),
    "resume_from_checkpoint": Alias("resume.checkpoint"),
}
"""`evaluation: rank0` is short for `evaluation: {mode: rank0}`; `distributed: true` and `resume` likewise."""
SECTIONS = frozenset(name for name, alias in ALIASES.items() if alias.key.startswith(f"{name}."))
"""Names that stand for one of their own keys, unless a mapping follows them."""


def apply_aliases(
    values: dict[str, Any], origins: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str], list[Mistake]]:
    """Rename aliases to our keys; a key that is set by two names is a mistake.

    Returns:
        The values and origins under our names, and the mistakes.
    """
    renamed: dict[str, Any] = {}
    renamed_origins: dict[str, str] = {}
    mistakes: list[Mistake] = []
    for path, value in values.items():
        alias = ALIASES.get(path)
        key = alias.key if alias else path
        if key in renamed:
            other = renamed_origins[key]
            mistakes.append(Mistake(path, f"{key} is already set ({other}): keep one of them", origins[path]))
            continue
        renamed[key] = alias.convert(value) if alias else value
        renamed_origins[key] = f"{origins[path]} as {path}" if alias else origins[path]
    return renamed, renamed_origins, mistakes
