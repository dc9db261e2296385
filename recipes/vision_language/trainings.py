"""What a training has left in its folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Training:
    """What the ranks of one training have written."""

    def __init__(self, folder: Path) -> None:
        found = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
        self.ranks = sorted(found, key=lambda one: int(one["rank"]))
        self.captions: dict[str, Any] = json.loads((folder / "captions.json").read_text())
        first = self.ranks[0]
        self.world, self.first, self.digest = first["world"], first["first"], first["digest"]
        self.scales: list[float] = first["scales"]
        self.skipped: list[int] = first["skipped"]
        steps = zip(*(rank["losses"] for rank in self.ranks), strict=True)
        self.losses = [[loss for lanes in step for loss in lanes] for step in steps]
        """Of each step, those of all lanes."""

    def ranks_agree(self) -> bool:
        """Return whether all ranks had the same scales, skipped the same steps and have the same weights."""
        names = ("scales", "skipped", "digest")
        return all(rank[name] == self.ranks[0][name] for rank in self.ranks for name in names)

    def is_the_end_of(self, other: Training) -> bool:
        """Return whether all that this one did, the other did too, to the bit."""
        at = self.first
        mine = (self.losses, self.scales, self.digest, self.skipped)
        later = [step for step in other.skipped if step >= at]
        return mine == (other.losses[at:], other.scales[at:], other.digest, later)
