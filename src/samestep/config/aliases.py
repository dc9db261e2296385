"""Other projects' names for our keys: accepted, reported, and refused beside the real key."""

from __future__ import annotations

from typing import Any

from samestep.errors import Mistake

_ACCUMULATION = ("grad_accum_steps", "grad_accumulation", "gradient_accumulation_steps", "accumulation_steps")
_FP16 = ("fp16", "distributed.fp16")
_OTHER_NAMES = {
    "batch_per_rank": ("batch_size",),
    "global_batch": ("global_batch_size",),
    "accumulation": (*_ACCUMULATION, *(f"distributed.{name}" for name in _ACCUMULATION)),
    "clip.norm": ("clip_norm", "max_grad_norm", "gradient_clip_val"),
    "base_batch": ("base_batch_size",),
    "ema.decay": ("ema_decay",),
    "distributed.enabled": ("distributed", "ddp", "ddp_enabled"),
    "distributed.backend": ("backend", "ddp_backend", "dist_backend"),
    "distributed.find_unused_parameters": ("ddp_find_unused_parameters",),
    "distributed.num_nodes": ("nodes",),
    "launch.slurm.gpus_per_node": ("gpus_per_node",),
    "distributed.sync_batchnorm": ("sync_bn", "sync_batchnorm", "distributed.sync_bn"),
    "precision": _FP16,
    "evaluation.mode": ("evaluation",),
    "resume.checkpoint": ("resume", "resume_from", "resume_from_checkpoint"),
}
"""`evaluation: rank0` is short for `evaluation: {mode: rank0}`; `distributed: true` and `resume` likewise."""
ALIASES = {name: key for key, names in _OTHER_NAMES.items() for name in names}
SECTIONS = frozenset(name for name, key in ALIASES.items() if key.startswith(f"{name}."))
"""Names that stand for one of their own keys, unless a mapping follows them."""


def real_name(key: str) -> str:
    """Return our name of a key."""
    return ALIASES.get(key, key)


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
        key = real_name(path)
        if key in renamed:
            other = renamed_origins[key]
            mistakes.append(Mistake(path, f"{key} is already set ({other}): keep one of them", origins[path]))
            continue
        if path in _FP16 and isinstance(value, bool):
            value = "fp16" if value else "fp32"
        renamed[key] = value
        renamed_origins[key] = origins[path] if key == path else f"{origins[path]} as {path}"
    return renamed, renamed_origins, mistakes
