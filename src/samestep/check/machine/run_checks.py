"""All checks of one machine and between ranks: inspect this machine, join the other ranks, compare and test."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.check.machine.agreement import check_agreement
from samestep.check.machine.facts import Load, Machine, RankReport, inspect_machine, load_of, space_of
from samestep.check.machine.findings import CheckReport, Finding, Place, at, failure, merge, note, ok
from samestep.check.machine.machine import check_cpus, check_disk, check_machine
from samestep.check.machine.network import check_interfaces, check_master
from samestep.config import Config, DistributedConfig
from samestep.config.schema import Same
from samestep.distributed.placement import Placement, decide_placement
from samestep.environment.launch import LaunchFacts, detect_launch
from samestep.environment.variables import process_environment
from samestep.errors import CollectiveMismatch, InitError, LaunchError, PeerLost, RankHung, SamestepError
from samestep.words import counted

_SECONDS = 30.0
"""The longest wait for another rank: the doctor must not hang where a run would."""

if TYPE_CHECKING:
    from samestep.distributed.context import RunContext

Show = Callable[[CheckReport], None]


def run_checks(
    config: Config | None, folder: Path | None, *, machine: Machine | None = None, show: Show = lambda result: None
) -> CheckReport:
    """Everything that would go wrong with a run started like this process.

    `show` is called where the result is to be printed: on rank 0, while the others wait, since a
    launcher ends all ranks when one of them fails; or on each rank, where they could not join.
    `machine` replaces what this rank sees.
    """
    environ = process_environment()
    if machine is None:
        machine = inspect_machine(environ, quick=config is None and not _is_rank(environ))
    section = _bounded(config)
    folder = (Path("runs") if config is None else config.run_path) if folder is None else folder
    launch: LaunchFacts | None = None
    try:
        launch = detect_launch(environ)
        place = decide_placement(section, machine.hardware, launch, _same(config))
    except LaunchError as error:
        report = _look_here(machine, config, folder, launch, None)
        return _alone(report, launch, _contradictions(error), show)
    report = _look_here(machine, config, folder, launch, place)
    if config is None and place.world.value == 1 and not machine.hardware.device_count:
        # Nothing is left that needs torch, which takes seconds to import.
        result = _report([report], [_only_one()])
        show(result)
        return result
    from samestep.distributed.context import create_run_context

    try:
        context = create_run_context(section, machine.hardware, launch, same=_same(config))
    except (InitError, LaunchError) as error:
        address = place.master_addr.value
        wrong = [] if address is None or place.one_machine else check_master(address, report.load)
        return _alone(report, launch, [*wrong, _not_opened(error)], show)
    try:
        with context:  # which explains why an exchange broke
            result = _together(context, report, folder)
            if context.is_main:
                show(result)
            _wait_until_shown(context)
    except (PeerLost, CollectiveMismatch, RankHung) as error:
        return _alone(report, launch, [_lost(error)], show)
    return result


def _wait_until_shown(context: RunContext) -> None:
    """A rank that is gone by now has reported everything it found."""
    try:
        context.barrier()
    except PeerLost as error:
        context.log.warn(f"after the checks, this rank {error}")


def _bounded(config: Config | None) -> DistributedConfig:
    """Return the config's section, with waits short enough for a person, and no fallback to one rank."""
    section = DistributedConfig() if config is None else config.distributed
    changes = {"timeout": min(section.timeout, _SECONDS), "on_init_failure": "fail"}
    return section.model_copy(update=changes)


def _same(config: Config | None) -> Same:
    return "bits" if config is None else config.same


def _look_here(
    machine: Machine, config: Config | None, folder: Path, launch: LaunchFacts | None, place: Placement | None
) -> RankReport:
    """Return what this rank finds without the others."""
    load = load_of(place, config)
    findings = [
        *check_launch(launch, machine),
        *check_machine(machine, load),
        check_interfaces(machine, load),
        check_disk(str(folder), space_of(_existing(folder)), _refusal(_existing(folder))),
    ]
    compared = None
    if config is not None:
        from samestep.check.machine.fit import check_fit
        from samestep.check.machine.planned import check_plan, digest

        findings += [*check_plan(config, load), *check_fit(config, load, machine)]
        compared = digest(config)
    rank = 0 if place is None else place.rank.value
    return RankReport(Place(rank, machine.host), machine, load, compared, tuple(findings))


def check_launch(launch: LaunchFacts | None, machine: Machine) -> list[Finding]:
    """Return who started this process, as what."""
    if launch is None:  # contradictory, which is a separate finding
        return []
    if launch.external:
        machines = counted(launch.nodes, "machine")
        reason = launch.reasons["launcher"]
        return [ok("launcher", f"{launch.launcher} ({reason}), {launch.world} ranks on {machines}")]
    if "SLURM_JOB_ID" in machine.variables and "SLURM_STEP_ID" not in machine.variables:
        return [
            note(
                "launcher",
                launch.reasons["launcher"],
                "this is one process, however many tasks the job has",
                "start the ranks with srun: srun samestep train CONFIG",
            )
        ]
    return [ok("launcher", f"none ({launch.reasons['launcher']})")]


def _existing(folder: Path) -> Path:
    """Return the folder, or the nearest existing one above it."""
    return next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)


def _refusal(folder: Path) -> str:
    """Return why no file can be written to this folder; empty where it can."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"samestep")
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _together(context: RunContext, report: RankReport, folder: Path) -> CheckReport:
    """Return what all ranks found, and what they find between them: the same on every rank."""
    from samestep.check.machine.ranks import try_ranks

    reports = context.gather(report)
    if context.world == 1:
        return _report(reports, [_only_one()])
    return _report(reports, try_ranks(context, [theirs.place for theirs in reports], folder))


def _report(reports: Sequence[RankReport], between: Sequence[Finding]) -> CheckReport:
    """Return what ranks found by themselves, how they agree, and what was found between them."""
    places = [report.place for report in reports]
    found = [finding for report in reports for finding in at(report.findings, [report.place])]
    found += at(check_agreement(reports), places)
    found += at(between, places)
    return CheckReport(merge(found), len(reports))


def _is_rank(environ: Mapping[str, str]) -> bool:
    try:
        return detect_launch(environ).world > 1
    except LaunchError:
        return False  # which is a finding


def _alone(report: RankReport, launch: LaunchFacts | None, wrong: list[Finding], show: Show) -> CheckReport:
    """Return what this rank found by itself, since it cannot reach the others."""
    rank, world = (None, 1) if launch is None else (launch.rank, launch.world)
    found = [*wrong, *report.findings, _cpus_of_this_rank(report)]
    places = [Place(rank or 0, report.machine.host)]
    result = CheckReport(merge(at(found, places)), world, rank, alone=True)
    show(result)
    return result


def _cpus_of_this_rank(report: RankReport) -> Finding:
    load: Load = report.load
    ranks, machine = load.ranks_here, report.machine
    return check_cpus(len(machine.cpus), machine.cpu_quota, ranks, ranks * load.threads, ranks * load.workers)


def _only_one() -> Finding:
    return note(
        "ranks",
        "one process: nothing between ranks was checked",
        "most of what goes wrong in a distributed run goes wrong between ranks",
        "start this command as you start the run, such as torchrun --nproc-per-node 2 -m samestep "
        "check, or srun samestep check",
    )


def _contradictions(error: LaunchError) -> list[Finding]:
    return [
        failure(
            "launch", line, "a run started like this refuses to start", "change the launch or the config accordingly"
        )
        for line in str(error).splitlines()
    ]


def _not_opened(error: InitError | LaunchError) -> Finding:
    cause = error.__cause__ if isinstance(error.__cause__, InitError) else error
    advice = "start the ranks as it says"
    if isinstance(error, InitError):
        advice = (
            "look at the findings of every rank: a port that is taken is another run's, often one that did not end "
            "(ss -ltnp shows it; MASTER_PORT sets another); a rank that does not answer was not started, is led "
            "elsewhere by MASTER_ADDR, or is behind a firewall"
        )
    return failure("process group", str(cause), "no rank can continue without the others", advice)


def _lost(error: SamestepError) -> Finding:
    # The stacks in a hang report are the doctor's own, and show nothing of the cause.
    lines = takewhile(lambda line: "Python stack" not in line, str(error).splitlines())
    return failure(
        "process group",
        "it was opened, but then: " + "\n".join(lines),
        "a run would end in the same way at its first exchange",
        "look at the output of the other ranks; where all are still running, a firewall passes "
        "the master's port but not those between the ranks",
    )
