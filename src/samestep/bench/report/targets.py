"""Every target of the plans, judged by what was measured: pass, fail, or not measured, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from samestep.bench.report.results import Machine, Row
from samestep.bench.scaling_plan import SAMESTEP
from samestep.bench.statistics import Spread
from samestep.report.format import format_bytes

State = Literal["pass", "fail", "not measured"]
PASS: State = "pass"
FAIL: State = "fail"
UNKNOWN: State = "not measured"


@dataclass(frozen=True)
class Target:
    """One target on one machine."""

    name: str
    limit: str
    state: State
    figure: str = ""
    """What was measured, with its range; of several measurements the worst."""
    why: str = ""
    """Where it was measured, or why it was not."""
    machine: str = ""
    """Empty if there is one only."""
    measured: Spread | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it for scripts."""
        return asdict(self)


@dataclass(frozen=True)
class _Limit:
    """A limit that a figure must reach, or must not exceed."""

    name: str
    words: str
    value: float
    shown: Callable[[Spread], str]
    higher: bool = True
    """Whether higher is better."""
    strict: bool = False
    """Whether the limit itself is not enough."""

    def holds(self, figure: float) -> bool:
        distance = figure - self.value if self.higher else self.value - figure
        return distance > 0 or (distance == 0 and not self.strict)


def targets_of(machines: Sequence[Machine]) -> list[Target]:
    """Return all targets, each for every machine."""
    return [replace(judge(machine), machine=machine.label) for judge in _JUDGES for machine in machines]


def format_percent(found: Spread) -> str:
    """Return it as percent."""
    return f"{100 * found.median:.3g} % ({100 * found.low:.3g} to {100 * found.high:.3g})"


def format_ratio(found: Spread) -> str:
    """Return it as a factor."""
    return f"{found.median:.3f} x ({found.low:.3f} to {found.high:.3f})"


def _judged(limit: _Limit, figures: Sequence[tuple[Spread, str]], missing: str) -> Target:
    if not figures:
        return Target(limit.name, limit.words, UNKNOWN, why=missing)
    pick = min if limit.higher else max
    worst, why = pick(figures, key=lambda one: one[0].median)
    met = sum(limit.holds(one.median) for one, _ in figures)
    if len(figures) > 1:
        why = f"worst of {len(figures)}, of which {met} meet it: {why}"
    if worst.low <= limit.value <= worst.high and worst.low < worst.high:
        why += "; its range holds the limit: more rounds would decide"
    state = PASS if met == len(figures) else FAIL
    shown = limit.shown(worst)
    return Target(limit.name, limit.words, state, shown, why, measured=worst)


def _ours(machine: Machine) -> list[Row]:
    return [row for row in machine.rows("scaling") if row["variant"] == SAMESTEP]


def _where(row: Row) -> str:
    ranks = "1 rank" if row["world"] == 1 else f"{row['world']} ranks"
    return f"{row['workload']}, {row['mode']}, {ranks}, {row['backend']}"


def hosts_of(row: Row) -> int:
    """Return the number of machines of its ranks; 1 if that is not known."""
    return len({rank.get("host") for rank in row.get("ranks") or ()}) or 1


def cannot_scale(machine: Machine, row: Row) -> str:
    """Return why ranks had to share what they compute on, so that no efficiency follows; empty if not."""
    world, cpus = row["world"], machine.facts.get("cpus")
    if machine.device == "cuda":
        shared = row["backend"] != "nccl"
        return f"{world} ranks without nccl may share a GPU" if shared else ""
    if row.get("shares_cores"):
        return f"{world} ranks had fewer cores"
    cores = cpus * hosts_of(row) if isinstance(cpus, int) else None
    if cores is not None and world > cores:
        return f"{world} ranks shared {cores} core(s)"
    return ""


def _scaled(machine: Machine, rows: Sequence[Row], what: str) -> tuple[list[Row], str]:
    """Return the rows of several ranks that had enough to compute on; else why there is none."""
    several = [row for row in rows if row["world"] > 1]
    if not several:
        return [], f"no result of samestep bench scaling {what}"
    reasons = {cannot_scale(machine, row): row for row in several}
    usable = [row for row in several if not cannot_scale(machine, row)]
    return usable, "; ".join(reason for reason in reasons if reason)


def _efficiency(mode: str, least: float) -> Callable[[Machine], Target]:
    def judge(machine: Machine) -> Target:
        limit = _Limit(f"{mode} scaling, efficiency", f"> {100 * least:.0f} %", least, format_percent, strict=True)
        rows = [row for row in _ours(machine) if row["mode"] == mode]
        usable, missing = _scaled(machine, rows, f"--mode {mode} with several ranks")
        known = [row for row in usable if row["efficiency"] is not None]
        figures = [(Spread.of(row["efficiency"]), _where(row)) for row in known]
        return _judged(limit, figures, missing or "no smaller world was measured to compare with")

    return judge


def _four_nodes(machine: Machine) -> Target:
    limit = _Limit("4 CPU nodes against one", "2 to 3 x", 2.0, format_ratio)
    if machine.device != "cpu":
        return _judged(limit, [], f"these ranks computed on {machine.device}")
    rows, figures = _ours(machine), []
    for row in rows:
        if hosts_of(row) != 4:
            continue
        bases = [
            base
            for base in rows
            if hosts_of(base) == 1
            and base["world"] * 4 == row["world"]
            and all(base[n] == row[n] for n in ("mode", "workload", "precision"))
            and _same_work(base, row)
        ]
        figures += [(_throughput_ratio(base, row), _where(row)) for base in bases]
    return _judged(limit, figures, "no result of one and of four machines: samestep bench scaling")


def _same_work(base: Row, row: Row) -> bool:
    growth = row["world"] / base["world"] if row["mode"] == "weak" else 1
    return bool(row["global_batch"] == base["global_batch"] * growth)


def _throughput_ratio(base: Row, row: Row) -> Spread:
    """Samples in a second against another row's; the range is the widest that both ranges allow."""
    before, now = Spread.of(base), Spread.of(row)
    more = row["global_batch"] / base["global_batch"]
    return Spread(more * before.median / now.median, more * before.low / now.high, more * before.high / now.low)


def _exchange_share(backend: str, least: int, most: int) -> Callable[[Machine], Target]:
    def judge(machine: Machine) -> Target:
        limit = _Limit(
            f"exchange's share of a step, {backend}", f"{least} to {most} %", most / 100, format_percent, higher=False
        )
        rows = [row for row in _ours(machine) if row["backend"] == backend]
        usable, missing = _scaled(machine, rows, f"with several ranks over {backend}")
        figures = []
        for row in usable:
            phase = (row["phases"] or {}).get("exchange")
            if phase is not None:
                took = Spread.of(phase)
                share = Spread(*(part / row["median"] for part in (took.median, took.low, took.high)))
                figures.append((share, _where(row)))
        return _judged(limit, figures, missing or "no phases of steps were measured")

    return judge


def _amp(machine: Machine) -> Target:
    limit = _Limit("AMP against fp32, throughput", ">= 1 x", 1.0, format_ratio)
    rows = _ours(machine)
    names = ("mode", "workload", "world", "backend", "global_batch")
    figures = [
        (_throughput_ratio(full, row), f"{row['precision']}: {_where(row)}")
        for row in rows
        if row["precision"] in ("bf16", "fp16")
        for full in rows
        if full["precision"] == "fp32" and all(full[name] == row[name] for name in names)
    ]
    if machine.device == "cpu":
        found = _judged(limit, figures, "")
        here = f" (here {found.figure}: {found.why})" if figures else ""
        return Target(limit.name, limit.words, UNKNOWN, why=f"the plan's AMP is a GPU's{here}")
    return _judged(limit, figures, "no result of samestep bench scaling with fp32 and bf16 or fp16")


def _against_ddp(machine: Machine) -> Target:
    limit = _Limit("step time against plain DDP", "<= 1.02 x", 1.02, format_ratio, higher=False)
    rows = [row for row in _ours(machine) if row["ratio_to_ddp"] is not None]
    figures = [(Spread.of(row["ratio_to_ddp"]), _where(row)) for row in rows]
    return _judged(limit, figures, "no result of samestep bench scaling with DDP beside it")


def _leaks(machine: Machine) -> Target:
    name, words = "memory leaks", "none"
    rows = [row for row in machine.rows("memory") if "leak" in row]
    if not rows:
        return Target(name, words, UNKNOWN, why="no result of samestep bench memory with a leak test")
    worst = max(rows, key=lambda row: (row["leak"]["leaks"], row["leak"]["slope_bytes_per_step"]))
    leak, leaking = worst["leak"], [row for row in rows if row["leak"]["leaks"]]
    slope = Spread(leak["slope_bytes_per_step"], leak["low"], leak["high"])
    figure = f"{format_bytes(slope.median)} a step ({format_bytes(slope.low)} to {format_bytes(slope.high)})"
    where = f"rank {leak['rank']} on {leak['host']}, {leak['steps']} steps"
    return Target(name, words, FAIL if leaking else PASS, figure, where, measured=slope)


_JUDGES: Sequence[Callable[[Machine], Target]] = (
    _efficiency("weak", 0.90),
    _efficiency("strong", 0.80),
    _efficiency("strong", 0.85),
    _four_nodes,
    _exchange_share("gloo", 10, 30),
    _exchange_share("nccl", 1, 5),
    _amp,
    _against_ddp,
    _leaks,
)
"""In the order of the table."""
