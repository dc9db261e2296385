"""The schema of a sweep's file. A field is a type, a default and one sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr

from samestep.config.bounds import MOST_ENTRIES, Count, Fold, Folds, Nodes, Ranks, Seed
from samestep.config.distributed import Auto
from samestep.config.launch import Line, Meaning
from samestep.config.optim import Section
from samestep.config.schema import FolderName
from samestep.errors import TextError
from samestep.sweep.space import Space

_DURATION = r"^[0-9]{1,9}(\.[0-9]{1,3})?\s*[smhd]$"
Duration = Annotated[str, Field(pattern=_DURATION), Meaning("a number with s, m, h or d, such as 8h")]
MOST_OBJECTIVES = 8
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def seconds_of(duration: str | None) -> float | None:
    """Return how long `30m` or `8h` is; None for nothing."""
    if duration is None:
        return None
    return float(duration[:-1]) * _SECONDS[duration[-1]]


def parse_duration(text: str) -> float | None:
    """Return the seconds of a duration on a command line; None for `none`.

    Raises:
        TextError: if it is no duration.
    """
    if text == "none":
        return None
    if re.fullmatch(_DURATION, text) is None:
        raise TextError(f"{text!r} is not a duration: write a number with s, m, h or d, or none")
    return seconds_of(text)


class ObjectiveConfig(Section):
    """The rule by which a trial is better than another."""

    metric: str = Field(description="a value that the evaluation reports")
    mode: Literal["min", "max"] = Field("min", description="whether lower or higher is better")
    value: Literal["best", "last"] = Field("best", description="of the trial's best evaluation, or of its last one")


class FurtherObjectiveConfig(Section):
    """A further objective, at the evaluation that the first objective takes."""

    metric: str = Field(description="a value that the evaluation reports")
    mode: Literal["min", "max"] = Field("min", description="whether lower or higher is better")


class SweepFoldsConfig(Section):
    """Every trial is cross-validated: a run for each fold, and their mean is its value."""

    k: Folds = Field(description="how many folds")
    stratify: Literal["auto", "by_label", "by_group", "none"] = Field("auto", description="what the folds have alike")
    seed: Seed = Field(0, description="which samples are in a fold together")
    file: Line | None = Field(
        None, description="the folds, used as they are if the file is there; else in the directory"
    )


class SweepConfig(Section):
    """One sweep, immutable."""

    base: Line = Field(description="the config that is searched from; relative to this file")
    name: FolderName = Field("sweep", description="the sweep's name; its file's if not set")
    directory: Line | None = Field(None, description="where it goes; sweeps/<name> if not set")
    storage: Line = Field(
        "sqlite",
        description="sqlite and journal: a file in the directory; or a database's URL with ${NAME} for its password",
    )
    space: dict[str, Any] = Field(max_length=MOST_ENTRIES, description="what each key may be")
    objective: ObjectiveConfig
    further_objectives: tuple[FurtherObjectiveConfig, ...] = Field(
        (), max_length=MOST_OBJECTIVES - 1, description="objective: [...] is short for both"
    )
    sampler: str = Field("tpe", description="tpe, random, grid, cmaes, nsga2, or module:Class of Optuna's kind")
    sampler_args: dict[str, Any] = Field({}, max_length=MOST_ENTRIES)
    pruner: str = Field("none", description="none, median, percentile, hyperband, patient, or module:Class")
    pruner_args: dict[str, Any] = Field({}, max_length=MOST_ENTRIES)
    trials: Count = Field(20, description="how many")
    timeout: Duration | None = Field(None, description="start no trial after this long")
    trial_timeout: Duration | None = Field(None, description="a run of a trial fails after this long")
    hang_timeout: Duration | None = Field(
        "30m", description="a run on one rank fails if nothing moves in it for this long"
    )
    start_timeout: Duration | None = Field(
        "2h", description="such a run fails if it has not come to its first step in this time"
    )
    seed: Seed = Field(0, description="root of the draws")
    folds: SweepFoldsConfig | None = None
    ranks_per_trial: Ranks | Literal["auto", "all"] = Field(
        "auto", description="auto: distributed.world_size of the base, or 1; all: of this machine"
    )
    parallel: Annotated[int, Field(ge=1, le=1_000, strict=True)] | Auto = Field(
        "auto", description="trials side by side; auto: as many as fit"
    )
    via: Literal["torchrun", "mpirun", "ssh", "slurm", "srun"] | None = Field(
        None, description="what starts the ranks of each trial; processes on this machine if not set"
    )
    hosts: Line | None = Field(
        None, description="machines and their ranks for mpirun and ssh, which trials share out: a:4,b:4"
    )
    nodes_per_trial: Nodes | Auto = Field(
        "auto", description="with slurm and srun: the base's distributed.num_nodes, or 1"
    )
    warm: Literal["auto", False] = Field(
        "auto", description="whether runs are forked from a process that has torch imported"
    )
    deterministic: bool = Field(True, description="the same trials at any parallelism: draws see whole rounds only")
    round: Count = Field(4, description="trials in a round, with deterministic")
    retries: Fold = Field(0, description="times that a failed run is resumed before its trial fails")

    _folder: Path = PrivateAttr(default=Path())
    _space: Space = PrivateAttr(default_factory=dict)

    @property
    def base_path(self) -> Path:
        """The base config's file."""
        return self._folder / self.base

    @property
    def path(self) -> Path:
        """The sweep's directory."""
        return Path(self.directory if self.directory is not None else f"sweeps/{self.name}")

    @property
    def runs_here(self) -> bool:
        """Return whether the trials share the GPUs and CPUs of this machine."""
        return self.via in (None, "torchrun") or (self.via == "mpirun" and self.hosts is None)

    @property
    def may_be_warm(self) -> bool:
        """Return whether runs may be forked: only those whose ranks this process, or its children, start."""
        return self.warm is not False and self.via in (None, "torchrun")

    @property
    def domains(self) -> Space:
        """The values that each key may get."""
        return self._space

    @property
    def metrics(self) -> tuple[str, ...]:
        """Return what the objectives measure, the first one first."""
        return self.objective.metric, *(more.metric for more in self.further_objectives)

    @property
    def signs(self) -> tuple[float, ...]:
        """Return, per objective, the factor that makes less of it better: 1, or -1."""
        modes = self.objective.mode, *(more.mode for more in self.further_objectives)
        return tuple(-1.0 if mode == "max" else 1.0 for mode in modes)

    @property
    def directions(self) -> list[str]:
        """The objectives as Optuna has them."""
        return ["maximize" if sign < 0 else "minimize" for sign in self.signs]

    def definition(self) -> Mapping[str, Any]:
        """Return what makes it this sweep and no other: all that its trials' values follow from."""
        document = self.model_dump(mode="json")
        for key in _CHANGEABLE:
            del document[key]
        if not self.further_objectives:
            del document["further_objectives"]  # studies of before know nothing of it
        return document


_CHANGEABLE = (
    "base", "directory", "trials", "timeout", "trial_timeout", "hang_timeout", "start_timeout", "ranks_per_trial", "parallel", "retries",
    "warm", "via", "hosts", "nodes_per_trial", "storage",
)  # fmt: skip
"""What may differ when a sweep is resumed: none of it changes what a trial comes to. The storage has a check of its own."""


def is_module_class(name: str) -> bool:
    """Return whether a sampler or pruner is named as module:Class."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name) is not None
