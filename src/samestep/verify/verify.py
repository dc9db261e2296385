"""Runs a config at several world sizes and tells whether its promise of sameness held."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from samestep.config import LoadedConfig, read_config
from samestep.errors import PlanError, Stopped
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.run.launches import Launch
from samestep.launch.run.slurm import refuse_second_job
from samestep.train.record import RunRecord, read_state
from samestep.verify.compare import (
    Difference,
    first_loss_difference,
    first_sample_difference,
    furthest_tensor,
    model_distance,
    read_curve,
)
from samestep.verify.worlds import Machines, World, labels, launch_of

State = dict[str, Tensor]

DEFAULT_RTOL = 1e-3
"""How far `same: rounding`, and a curve from elsewhere, may be off."""


@dataclass(frozen=True)
class WorldResult:
    """One world size: what it did, and where it parts from the first one."""

    record: RunRecord
    difference: Difference | None
    """The first difference in bits, whether or not the promise allows it."""
    kept: bool
    label: str
    """Its number of ranks, or all of them in the order in which the run went on."""


@dataclass(frozen=True)
class Verification:
    """Every world's result, and whether the promise held."""

    same: str
    worlds: tuple[WorldResult, ...]
    rtol: float
    against: tuple[float, ...] = ()
    against_difference: Difference | None = None

    @property
    def kept(self) -> bool:
        return all(world.kept for world in self.worlds) and self.against_difference is None

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        document: dict[str, Any] = {
            "kept": self.kept,
            "same": self.same,
            "rtol": self.rtol if self.same == "rounding" or self.against else None,
            "worlds": {
                world.label: {
                    "kept": world.kept,
                    "steps": world.record.steps,
                    "state_hash": world.record.state_hash,
                    "losses": world.record.losses,
                    "seconds_per_step": world.record.seconds_per_step,
                    "first_difference": _as_json(world.difference),
                }
                for world in self.worlds
            },
        }
        if self.against:
            document["against"] = {
                "steps": len(self.against),
                "first_difference": _as_json(self.against_difference),
            }
        return document


def _as_json(difference: Difference | None) -> dict[str, Any] | None:
    return None if difference is None else asdict(difference)


def verify(
    config_file: Path,
    overrides: Sequence[str],
    worlds: Sequence[World],
    *,
    machines: Machines = Machines(),  # noqa: B008 (it is frozen)
    steps: int | None = None,
    resumed: bool = False,
    against: Path | None = None,
    rtol: float = DEFAULT_RTOL,
    tell: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Run the config at each world size, one after the other, and compare.

    `resumed` also runs it once in as many parts as there are sizes, stopped at each and
    going on at the next.
    """
    overrides = [*overrides, *([f"steps={steps}", "epochs=null"] if steps else [])]
    loaded = read_config(config_file, overrides)
    _refuse_unverifiable(loaded, worlds)
    curve = read_curve(against) if against is not None else []
    folder = loaded.config.run_path / "verify"
    for run in folder.glob("*/slurm"):
        refuse_second_job(run.parent)
    shutil.rmtree(folder, ignore_errors=True)
    if loaded.config.distributed.threads_per_rank == "auto":
        # The bits of a matrix product can depend on the number of threads.
        overrides = [*overrides, "distributed.threads_per_rank=1"]
    bench = _Bench(config_file, tuple(overrides), machines, tell)
    folders = {world.label: _run_folder(folder, world) for world in worlds}
    launches = {world.label: bench.launch(world, folders[world.label]) for world in worlds}
    for label, launch in launches.items():
        tell(f"running on {label} rank(s)")
        bench.run(launch)
    records = {label: run / "record" for label, run in folders.items()}
    if resumed:
        total = RunRecord.read(records[worlds[0].label]).steps
        records[labels(worlds)] = _run_in_parts(bench, worlds, total, folder / "resumed")
    return _compare(loaded.config.same, records, curve, rtol)


def _run_in_parts(bench: _Bench, worlds: Sequence[World], total: int, run: Path) -> Path:
    """Stop the run at each size and let it go on at the next; where its record lies."""
    if total < len(worlds):
        raise PlanError(f"--resumed: {total} steps cannot be cut into {len(worlds)} parts")
    for part, world in enumerate(worlds, 1):
        last = part == len(worlds)
        stop = None if last else total * part // len(worlds)
        bench.tell(f"going on on {world.label} rank(s)" + ("" if last else f" up to step {stop}"))
        try:
            bench.run(bench.launch(world, run, stop, saves=True))
        except Stopped:
            continue
    return run / "record"


@dataclass(frozen=True)
class _Bench:
    """What all runs of a verification share."""

    config_file: Path
    overrides: tuple[str, ...]
    machines: Machines
    tell: Callable[[str], None]

    def launch(
        self, world: World, run: Path, stop_after: int | None = None, saves: bool = False
    ) -> Launch:
        """One run in a directory of its own, which keeps its exact record."""
        overrides = [*self.overrides, f"run_dir={json.dumps(str(run))}"]
        overrides.append(f"checkpoint.enabled={str(saves).lower()}")
        if saves:
            overrides += [f"checkpoint.every_{unit}=null" for unit in _RULES]
        weights = read_config(self.config_file, overrides).config.distributed.lane_weights
        if weights is not None and len(weights) != world.ranks:
            self.tell(
                f"lane_weights are for {len(weights)} ranks: {world.ranks} rank(s) share lanes evenly"
            )
            overrides.append("distributed.lane_weights=null")
        method = f"distributed.launch_method={world.via}"
        config = read_config(self.config_file, [*overrides, method]).config
        rank_command = RankCommand(
            config, self.config_file, tuple(overrides), run / "record", stop_after
        )
        return launch_of(world, rank_command, self.machines)

    def run(self, launch: Launch) -> None:
        launch.run(self.tell, follow=True, quiet=True)


_RULES = ("steps", "minutes", "epochs")


def _refuse_unverifiable(loaded: LoadedConfig, worlds: Sequence[World]) -> None:
    config = loaded.config
    if config.batch_per_rank is not None:
        raise PlanError(
            f"{loaded.source} sets batch_per_rank, which makes the run depend on the number of "
            "ranks on purpose: there is nothing to verify. Set global_batch instead"
        )
    if config.distributed.world_size != "auto":
        raise PlanError(
            f"{loaded.source} sets distributed.world_size {config.distributed.world_size}, but "
            "verify runs at several: pass distributed.world_size=auto"
        )
    if not worlds:
        raise PlanError("--worlds names no world size: give some, such as 1,2,4")


def _run_folder(folder: Path, world: World) -> Path:
    return folder / f"world-{world.label.replace(' ', '-')}"


def _compare(
    same: str, folders: Mapping[str, Path], curve: Sequence[float], rtol: float
) -> Verification:
    runs = {label: (RunRecord.read(path), read_state(path)) for label, path in folders.items()}
    first, first_state = next(iter(runs.values()))
    worlds = tuple(
        _judge(same, first, first_state, record, state, rtol, label)
        for label, (record, state) in runs.items()
    )
    length = min(len(curve), first.steps)
    off = first_loss_difference(curve[:length], first.losses[:length], rtol)
    return Verification(same, worlds, rtol, tuple(curve), off)


def _judge(
    same: str,
    first: RunRecord,
    first_state: State,
    record: RunRecord,
    state: State,
    rtol: float,
    label: str,
) -> WorldResult:
    samples = first_sample_difference(first, record)
    losses = first_loss_difference(first.losses, record.losses)
    worst = furthest_tensor(first_state, state)
    difference = samples or losses or worst
    if difference is not None and worst is not None:
        difference = replace(worst, what=difference.what, step=difference.step)
    if len(set(record.rank_hashes)) > 1:
        difference = Difference("the ranks of this world ended with different states")
        kept = same == "samples" and samples is None
        return WorldResult(record, difference, kept, label)
    if same == "bits":
        kept = difference is None
    elif same == "samples":
        kept = samples is None
    else:
        near = first_loss_difference(first.losses, record.losses, rtol) is None
        kept = samples is None and near and model_distance(first_state, state) <= rtol
    return WorldResult(record, difference, kept, label)
