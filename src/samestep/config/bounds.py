"""Bounds of the counts in a config: no run comes near the limits, a slip of the hand does.

A limit keeps a number such as `loader.workers: 100000000` from ending in a machine without memory
instead of a message. Each has its reason, which the message gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from samestep.lanes.plan import MOST_LANES


@dataclass(frozen=True)
class Reason:
    """The reason for a limit, as the end of "at most 1024: "."""

    text: str


MOST_RANKS = MOST_LANES
_EACH_A_PROCESS = "each is a process of its own"
_A_LIFETIME = "no machine computes that many"
_WITHIN_MEMORY = "the numbers of all samples of a step are held in memory"

Ranks = Annotated[int, Field(ge=1, le=MOST_RANKS, strict=True), Reason(_EACH_A_PROCESS)]
Rank = Annotated[int, Field(ge=0, lt=MOST_RANKS, strict=True), Reason(_EACH_A_PROCESS)]
RanksPerNode = Annotated[int, Field(ge=1, le=10_000, strict=True), Reason(_EACH_A_PROCESS)]
Nodes = Annotated[int, Field(ge=1, le=100_000, strict=True), Reason("each is a machine")]
NodeRank = Annotated[int, Field(ge=0, lt=100_000, strict=True), Reason("each is a machine")]
Gpus = Annotated[int, Field(ge=1, le=1_024, strict=True), Reason("no machine has more")]
Gpu = Annotated[int, Field(ge=0, lt=1_024, strict=True), Reason("no machine has more")]
Cpus = Annotated[int, Field(ge=1, le=10_000, strict=True), Reason("no machine has more")]
Workers = Annotated[int, Field(ge=0, le=1_024, strict=True), Reason(_EACH_A_PROCESS)]
Prefetch = Annotated[int, Field(ge=1, le=10_000, strict=True), Reason("each batch is held in memory")]
Port = Annotated[int, Field(ge=1, le=65_535, strict=True), Reason("there are no other ports")]

Steps = Annotated[int, Field(ge=1, le=10**12, strict=True), Reason(_A_LIFETIME)]
StepsFromZero = Annotated[int, Field(ge=0, le=10**12, strict=True), Reason(_A_LIFETIME)]
Epochs = Annotated[int, Field(ge=1, le=10**9, strict=True), Reason(_A_LIFETIME)]
Count = Annotated[int, Field(ge=1, le=10**9, strict=True), Reason(_A_LIFETIME)]
Samples = Annotated[int, Field(ge=1, le=10**9, strict=True), Reason(_WITHIN_MEMORY)]
Lanes = Annotated[int, Field(ge=1, le=MOST_RANKS, strict=True), Reason("each is a pass of its own")]
KeepCount = Annotated[int, Field(ge=1, le=10**6, strict=True), Reason("each is a copy of the model")]
Fold = Annotated[int, Field(ge=0, lt=1_000, strict=True), Reason("each is a run of its own")]
Folds = Annotated[int, Field(ge=2, le=1_000, strict=True), Reason("each is a run of its own")]
Seed = Annotated[int, Field(ge=0, lt=2**63, strict=True), Reason("torch takes 63 bits")]

Seconds = Annotated[float, Field(ge=0.1, le=31_536_000, allow_inf_nan=False), Reason("which is a year")]
SecondsOfSilence = Annotated[float, Field(ge=5, le=31_536_000, allow_inf_nan=False), Reason("which is a year")]
Minutes = Annotated[float, Field(gt=0, le=525_600, allow_inf_nan=False), Reason("which is a year")]
SlurmSeconds = Annotated[int, Field(ge=1, le=65_535, strict=True), Reason("sbatch --signal takes no more")]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Scale = Annotated[float, Field(gt=0, le=1e38), Reason("a float of 32 bits holds no more")]
Factor = Annotated[float, Field(gt=1, le=1e6), Reason("the scale would leave its range at once")]
LaneWeight = Annotated[float, Field(ge=1e-6, le=1e6), Reason("a rank a million times slower has no lane")]

MOST_ENTRIES = 1_000
"""Most entries of a list or mapping that a person writes."""
