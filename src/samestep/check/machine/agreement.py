"""Checks that ranks agree: pure functions of what every rank reported."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from samestep.check.machine.facts import Machine, RankReport
from samestep.check.machine.findings import Finding, Severity, at, note, ok, spans, warning
from samestep.check.machine.machine import check_cpus
from samestep.words import counted

T = TypeVar("T", bound=Hashable)

Reports = Sequence[RankReport]


def check_agreement(reports: Reports) -> list[Finding]:
    """Everything that ranks must have in common, or must divide among them."""
    found = share_cpus(reports)
    if len(reports) > 1:
        found += [
            *same_versions(reports),
            _same(
                "same processors",
                reports,
                _processor,
                "warning" if any(report.load.bits for report in reports) else "note",
                "torch chooses its kernels by the processor, and other kernels round differently: a run "
                "on other ranks is then not bit-identical",
                "run on machines of one kind, or set same: rounding",
            ),
            _same(
                "same threads",
                reports,
                _threads,
                "warning",
                "how a sum is split among threads decides its last bits: identical bits need the same "
                "number on every rank, in every run",
                "set distributed.threads_per_rank, and export the same OMP_NUM_THREADS on every machine",
            ),
            own_gpus(reports),
            _same(
                "same config",
                reports,
                lambda report: f"config {report.config or 'none'}",
                "error",
                "seed, batch and lanes decide what a rank computes: with another config it is a rank of another run",
                "start all ranks with the same config file and overrides",
            ),
        ]
    return found


def _groups(reports: Reports, key: Callable[[RankReport], T]) -> dict[T, list[RankReport]]:
    groups: dict[T, list[RankReport]] = {}
    for report in reports:
        groups.setdefault(key(report), []).append(report)
    return groups


def _describe(groups: dict[str, list[RankReport]]) -> str:
    """'2.6 on ranks 0-2, 2.7 on rank 3'."""
    parts = []
    for value, members in groups.items():
        ranks = [member.place.rank for member in members]
        hosts = sorted({member.place.host for member in members})
        word = "rank" if len(ranks) == 1 else "ranks"
        parts.append(f"{value} on {word} {spans(ranks)} ({', '.join(hosts)})")
    return ", ".join(parts)


def _same(
    check: str, reports: Reports, value: Callable[[RankReport], str], severity: Severity, why: str, advice: str
) -> Finding:
    groups = _groups(reports, value)
    if len(groups) == 1:
        return ok(check, f"{next(iter(groups))} on all ranks")
    return Finding(check, severity, _describe(groups), why, advice)


def same_versions(reports: Reports) -> list[Finding]:
    """Python, torch and samestep, the same everywhere."""
    severities: dict[str, Severity] = {"python": "warning", "torch": "error", "samestep": "error"}
    whys = {
        "python": "data code may behave differently from rank to rank",
        "torch": "other versions have other kernels and another protocol: ranks hang, or add up "
        "values that do not belong together",
        "samestep": "ranks that do not make the same collectives wait for each other forever",
    }
    different = []
    for name, severity in severities.items():
        finding = _same(
            "same versions",
            reports,
            lambda report, name=name: f"{name} {report.machine.versions[name]}",  # type: ignore[misc]
            severity,
            whys[name],
            "install one environment on all machines, and start the ranks from it",
        )
        if finding.severity != "ok":
            different.append(finding)
    return different or [ok("same versions", "python, torch and samestep are the same on all ranks")]


def _processor(report: RankReport) -> str:
    device, hardware = report.load.device, report.machine.hardware
    if device.startswith("cuda"):
        return hardware.devices[int(device.partition(":")[2] or 0)]
    return report.machine.processor


def _threads(report: RankReport) -> str:
    value = report.machine.variables.get("OMP_NUM_THREADS")
    omp = "no OMP_NUM_THREADS" if value is None else f"OMP_NUM_THREADS={value}"
    return f"{counted(report.load.threads, 'thread')} and {omp}"


def own_gpus(reports: Reports) -> Finding:
    """Ranks of a machine on different GPUs."""
    check = "shared gpus"
    on_gpu = [report for report in reports if report.load.device.startswith("cuda")]
    if not on_gpu:
        return ok(check, "no rank runs on a GPU")
    groups = _groups(on_gpu, lambda report: (report.place.host, _gpu(report.machine, report)))
    shared = [members for members in groups.values() if len(members) > 1]
    if not shared:
        return ok(check, "every rank has its own GPU")
    places = "; ".join(
        f"ranks {spans([member.place.rank for member in members])} on {members[0].place.host}" for members in shared
    )
    return warning(
        check,
        f"one GPU for {places}",
        "they take turns and share its memory",
        "start one rank per GPU; under Slurm let every rank see all GPUs of its machine "
        "(--gpus-per-node instead of --gpus-per-task)",
    )


def _gpu(machine: Machine, report: RankReport) -> str:
    index = int(report.load.device.partition(":")[2] or 0)
    return machine.gpu_ids[index] if index < len(machine.gpu_ids) else report.load.device


def share_cpus(reports: Reports) -> list[Finding]:
    """Return what is wrong where ranks of a machine do not fit its CPUs, or use more than they are bound to."""
    found: list[Finding] = []
    for members in _groups(reports, lambda r: (r.place.host, r.load.node)).values():
        own = [set(member.machine.cpus) for member in members]
        together = set[int]().union(*own)
        finding = check_cpus(
            len(together),
            members[0].machine.cpu_quota,
            len(members),
            sum(member.load.threads for member in members),
            sum(member.load.workers for member in members),
        )
        places = [member.place for member in members]
        found += at([finding], places)
        bound = len(members) > 1 and sum(map(len, own)) == len(together)
        idle = len(together) - sum(member.load.threads for member in members)
        if bound and idle >= len(members):
            found += at([_idle(members, len(own[0]))], places)
    return found


def _idle(members: Reports, cpus: int) -> Finding:
    threads = members[0].load.threads
    return note(
        "cpus",
        f"every rank is bound to its own {counted(cpus, 'CPU')}, but uses {counted(threads, 'thread')}",
        "most of its CPUs stay idle: with same: bits on CPUs a rank computes with one thread, unless "
        "another number is set",
        "start a rank for each CPU, up to the number of lanes, which changes no bit; or set "
        f"distributed.threads_per_rank: {cpus}, which is another run to the last bit",
    )
