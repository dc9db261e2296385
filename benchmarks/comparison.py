"""Variants in one process, interleaved, compared with the hand-written loop and the bare graph."""

from __future__ import annotations

import gc
import tempfile
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from contest import Contest
from measuring import cpu_ratio_to, goal_cell, milliseconds, ratio_to, time_rounds
from torch import Tensor
from variants import LoopContext

from samestep.bench.baselines import Advance
from samestep.bench.scaling import KeepingSettings

HAND_WRITTEN, BARE_GRAPH = "hand-written", "bare-graph"
Goal = tuple[float | None, str | None]
"""The highest ratio that is wanted, and to which of the two."""

T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """The settings of a measuring process."""

    workload: str
    quick: bool
    device: torch.device
    rounds: int
    variants: tuple[str, ...]


@dataclass(frozen=True)
class Compared:
    """One variant, compared with the hand-written loop and the bare graph."""

    workload: str
    variant: str
    milliseconds: float
    ratio: float
    low: float
    high: float
    """`low` to `high` holds the true median ratio in about 95 of 100 runs."""
    graph_ratio: float | None
    graph_low: float | None
    graph_high: float | None
    """The same compared with the bare graph, if that ran."""
    cpu_ratio: float
    rounds: int
    goal: float | None
    goal_against: str | None
    loss: float
    """On one batch, after the first round."""
    agrees: bool
    """Whether it learned what the hand-written loop did, if that can be compared."""

    @property
    def judged(self) -> float | None:
        """The ratio that the goal is for."""
        return self.graph_ratio if self.goal_against == BARE_GRAPH else self.ratio

    def cells(self) -> list[str]:
        """Variant, milliseconds, both ratios and the goal, for a table."""
        to_graph = "" if self.graph_ratio is None else f"{self.graph_ratio:.3f}"
        goal = "" if self.judged is None else goal_cell(self.judged, self.goal)
        ratio, spread = f"{self.ratio:.3f}", f"{self.low:.3f}-{self.high:.3f}"
        return [self.variant, f"{self.milliseconds:.3f}", ratio, spread, to_graph, goal]

    def loss_cell(self) -> str:
        return f"{self.loss:.4f}" if self.agrees else f"[red]{self.loss:.4f}[/]"


def time_all(
    contest: Contest,
    openers: Mapping[str, Callable[[LoopContext], Advance]],
    rounds: int,
    learned: Callable[[LoopContext], T],
) -> tuple[dict[str, Tensor], dict[str, T], dict[str, str]]:
    """Time variants interleaved; return the times, what each has learned, and why some failed.

    Args:
        contest: What they train.
        openers: Makes the loop of each; the hand-written one must not fail.
        rounds: Turns of each.
        learned: Called after a variant's first round: after more, rounding alone makes them differ.
    """
    found: dict[str, T] = {}
    turns: dict[str, Callable[[], None]] = {}
    failed: dict[str, str] = {}
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="samestep-bench-")))
        for name, opener in openers.items():
            (root / name).mkdir()
            loop = LoopContext(contest, contest.model(), root / name, stack)
            try:
                turn = partial(KeepingSettings(partial(opener, loop)), contest.workload.steps)
                turn()
            except Exception as error:
                if name == HAND_WRITTEN:
                    raise
                traceback.print_exc()
                failed[name] = f"on {contest.workload.name}: {type(error).__name__}: {error}"
            else:
                turns[name], found[name] = turn, learned(loop)
            # Given back: the next may choose by the memory that is free.
            gc.collect()
            if contest.on_gpu:
                torch.cuda.empty_cache()
        # Otherwise a collection of everything the libraries allocated falls into someone's round.
        gc.freeze()
        spent = time_rounds(turns, rounds, 1, contest.device)
    return spent, found, failed


def compared(contest: Contest, spent: Mapping[str, Tensor], name: str, goal: Goal) -> dict[str, Any]:
    """Return the fields of a `Compared` that are about time."""
    table = spent[name]
    ratio, low, high = ratio_to(spent[HAND_WRITTEN], table)
    to_graph = ratio_to(spent[BARE_GRAPH], table) if BARE_GRAPH in spent else (None, None, None)
    return {
        "workload": contest.workload.name, "variant": name,
        "milliseconds": milliseconds(table, contest.workload.steps), "ratio": ratio, "low": low, "high": high,
        "graph_ratio": to_graph[0], "graph_low": to_graph[1], "graph_high": to_graph[2],
        "cpu_ratio": cpu_ratio_to(spent[HAND_WRITTEN], table), "rounds": len(table),
        "goal": goal[0], "goal_against": goal[1],
    }  # fmt: skip
