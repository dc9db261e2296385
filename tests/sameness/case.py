"""One row of the matrix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODELS = Path(__file__).with_name("models")
WORLDS = (1, 2, 3, 4, 5, 8)
FEW_WORLDS = (1, 3)
"""For rows that only vary another: what they add does not depend on how many ranks there are."""


@dataclass(frozen=True)
class Case:
    """A small training, and what it may end in."""

    name: str
    """On the command line."""
    title: str
    """In the table."""
    source: str
    """`module:Class` in `models/`: a task, or the function of an own loop."""
    config: Mapping[str, Any] = field(default_factory=dict)
    config_at: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """What the config has besides at some numbers of ranks."""
    worlds: Sequence[int] = WORLDS
    ways: Sequence[str] | None = None
    """The ways that mean something for it; all unless given."""
    is_loop: bool = False
    mistake: str = ""
    """Why it must differ somewhere: what `samestep verify` is there to find."""
    moves: Sequence[str] = ()
    """Ends of names of tensors that are not zero in the end: else nothing was compared."""
    section: str = ""

    def settings(self, run: Path, world: int, device: str) -> dict[str, Any]:
        """The config of a run on so many ranks."""
        extra = dict(self.config_at.get(world, {}))
        distributed = {
            "device": device,
            "backend": "gloo",  # on GPUs, too: ranks that share one cannot use nccl
            "threads_per_rank": 1,
            "timeout": 120,
            **self.config.get("distributed", {}),
            **extra.pop("distributed", {}),
        }
        module, _, name = self.source.partition(":")
        named = {} if self.is_loop else {"task": f"{MODELS / module}.py:{name}"}
        length = {} if "steps" in self.config else {"epochs": 2}
        return {
            **named, **length, "global_batch": 32, "lanes": 8, "run_dir": str(run), "log_every": 1,
            **self.config, **extra, "distributed": distributed,
        }  # fmt: skip
