"""Runs a config or a script at several world sizes, and reports whether its promise of sameness held."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from samestep.checkpoint.ownership import claim, clear
from samestep.config import Config
from samestep.errors import PlanError
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.run.slurm import refuse_second_job
from samestep.launch.run.worlds import Machines, World, labels
from samestep.train.record import RunRecord
from samestep.verify.compare import Verification, compare_runs
from samestep.verify.differences import read_curve
from samestep.verify.explain import ends_of_parts, explain
from samestep.verify.runner import Runner
from samestep.words import counted

DEFAULT_RTOL = 1e-3
"""How far `same: rounding`, and a curve from elsewhere, may be off, relative."""


def verify(
    rank_command: RankCommand,
    worlds: Sequence[World],
    *,
    machines: Machines = Machines(),  # noqa: B008 (it is frozen)
    steps: int | None = None,
    resumed: bool = False,
    explained: bool = False,
    against: Path | None = None,
    rtol: float = DEFAULT_RTOL,
    report: Callable[[str], None] = lambda line: None,
) -> Verification:
    """Run a config or a script at each world size, one after the other, and compare the runs.

    Args:
        rank_command: what is run.
        worlds: the sizes, each with its launcher.
        machines: where ranks may run besides this machine.
        steps: how many steps to run, in place of the config's length.
        resumed: also run once in as many parts as there are sizes, stopped at the end of each
            part and resumed at the next size.
        explained: if the promise is broken, run the steps before the first difference again, and
            name the first tensor that differs.
        against: a file with the losses of a run from elsewhere, to compare with.
        rtol: how far `same: rounding` and that curve may be off, relative.
        report: called with a line about each run that is started.

    Raises:
        PlanError: if the config cannot be verified.

    Example:
        >>> file = Path("config.yaml")
        >>> verify(RankCommand(load_config(file), file), parse_worlds("1,2,4"), steps=24).kept
        True
    """
    if steps:
        rank_command = rank_command.with_overrides(f"steps={steps}", "epochs=null")
    config = rank_command.config
    _refuse_unverifiable(rank_command, worlds)
    if len(worlds) == 1 and (resumed or against is None):
        raise PlanError(
            f"--worlds {worlds[0].label} is one run, with nothing to compare it with: give several, such as "
            f"1,2,4{'' if resumed else ', or --against FILE'}"
        )
    curve = read_curve(against) if against is not None else []
    folder = _fresh_folder(config)
    runner = Runner(rank_command, machines, report)
    folders = {world.label: _run_folder(folder, world) for world in worlds}
    launches = {world.label: runner.launch(world, folders[world.label]) for world in worlds}
    for label, launch in launches.items():
        report(f"running on {counted(label, 'rank')}")
        runner.run(launch)
    records = {label: run / "record" for label, run in folders.items()}
    if resumed:
        total = RunRecord.read(records[worlds[0].label]).steps
        records[labels(worlds)] = _run_in_parts(runner, worlds, total, folder / "resumed")
    result = compare_runs(config.same, records, curve, rtol)
    if not explained or not result.runs_differ:
        return result
    return replace(result, suspect=explain(runner, result, worlds, folder / "explain"))


def _fresh_folder(config: Config) -> Path:
    """Return where the runs go: a directory of its own in the run's, without those of before."""
    folder = claim(config.run_path) / "verify"
    for run in folder.glob("*/slurm"):
        refuse_second_job(run.parent)
    clear(folder, "verify")
    return claim(folder, purpose="verify")


def _run_in_parts(runner: Runner, worlds: Sequence[World], total: int, run: Path) -> Path:
    """Stop the run at each size and resume it at the next; returns the folder of its record."""
    ends = ends_of_parts(total, len(worlds))
    for part, (world, end) in enumerate(zip(worlds, ends, strict=True), 1):
        last = part == len(worlds)
        verb = "running" if part == 1 else "resuming"
        until = "" if last else f" up to step {end}"
        runner.report(f"{verb} on {counted(world.label, 'rank')}{until}")
        runner.run(runner.launch(world, run, stop_after=None if last else end, saves=True))
    return run / "record"


def _refuse_unverifiable(rank_command: RankCommand, worlds: Sequence[World]) -> None:
    config, file = rank_command.config, rank_command.file
    if config.batch_per_rank is not None:
        raise PlanError(
            f"{file} sets batch_per_rank, which makes the run depend on the number of "
            "ranks on purpose: there is nothing to verify. Set global_batch instead"
        )
    if config.distributed.world_size != "auto":
        raise PlanError(
            f"{file} sets distributed.world_size {config.distributed.world_size}, but "
            "verify runs at several: pass distributed.world_size=auto"
        )
    if not worlds:
        raise PlanError("--worlds names no world size: give some, such as 1,2,4")


def _run_folder(folder: Path, world: World) -> Path:
    return folder / f"world-{world.label.replace(' ', '-')}"
