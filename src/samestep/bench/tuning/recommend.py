"""Starts ranks, reads what they measured, and recommends settings. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from samestep.bench.document import Document
from samestep.bench.tuning.advice import (
    Advice,
    advise_batch,
    advise_graph,
    advise_lanes,
    advise_layout,
    advise_precision,
    advise_shard,
    advise_workers,
)
from samestep.bench.tuning.lanes import LaneCosts
from samestep.bench.tuning.timed import Timed
from samestep.bench.tuning.variants import (
    BASE,
    Layout,
    Variant,
    as_text,
    batches,
    lane_variants,
    lanes_fixed,
    lanes_to_compare,
    layouts,
    variants,
)
from samestep.bench.worlds import BenchCommand, measure_worlds
from samestep.config import Config, override_config
from samestep.config.distributed import SHARDS
from samestep.environment.hardware import Hardware
from samestep.environment.launch import detect_launch
from samestep.environment.variables import process_environment
from samestep.errors import ConfigError, OutOfMemory, PlanError, RankFailed
from samestep.launch.run.worlds import Machines, World, refuse_fixed_world

COMMAND = "tune measure"
"""The command of the ranks."""


@dataclass(frozen=True)
class TuneRequest:
    """The training to tune, and how long it may take."""

    config: Config
    file: Path
    overrides: tuple[str, ...] = ()
    quick: bool = False
    rounds: int = 5
    steps: int | None = None
    """Timed steps of a turn; by default about a second's."""
    report: Callable[[str], None] = lambda line: None
    """Called with a line for each stage."""
    run_dir: str = ""
    """Where the ranks' launches may write: a folder that is made and removed here."""

    def refuse_ranks(self, worlds: Sequence[int] = ()) -> None:
        """Refuse to be a rank, and a config that fixes another number of them than is measured."""
        refuse_fixed_world(self.config, detect_launch(process_environment()).world, worlds)


@dataclass(frozen=True)
class Advised:
    """The measurements, and the recommendations that follow."""

    machine: Mapping[str, Any]
    layout: Layout
    tried: Sequence[tuple[Layout, Timed]]
    measured: Sequence[Timed]
    """With other settings, on the recommended ranks."""
    advice: Sequence[Advice]

    @property
    def overrides(self) -> dict[str, Any]:
        """All values that differ from the config's own."""
        return {key: value for one in self.advice for key, value in one.overrides.items()}

    def as_json(self) -> dict[str, Any]:
        """Return it for scripts."""
        return {
            "machine": dict(self.machine),
            "ranks": self.layout.ranks,
            "overrides": self.overrides,
            "advice": [one.as_json() for one in self.advice],
            "layouts": [{**asdict(timed), "label": way.label} for way, timed in self.tried],
            "measured": [asdict(one) for one in self.measured],
        }


def tune_lanes(
    request: TuneRequest, wanted: Sequence[int], widths: Sequence[int], worlds: Sequence[World], machines: Machines
) -> tuple[LaneCosts, Document]:
    """Measure what lanes cost at each number of ranks.

    Args:
        wanted: Numbers of lanes; the usual ones, if empty.
        widths: Lanes side by side in a CUDA graph; as configured, if empty.

    Raises:
        PlanError: Nothing can be compared.
    """
    sizes = [world.ranks for world in worlds]
    request.refuse_ranks(sizes)
    lanes = lanes_to_compare(request.config, wanted, sizes)
    found = []
    for world in worlds:
        tried = lane_variants(lanes, widths, world.ranks)
        # The config's own lanes may be too few for this world, and are measured with the others.
        enough = f"lanes={max(request.config.lane_count(1), world.ranks)}"
        found.append(_measured(request, (enough,), tried, world, machines))
    rows = [Timed.read(row) for document in found for row in document.rows]
    on_gpu = found[0].machine["device"] != "cpu"
    return LaneCosts(request.config.lane_count(1), rows, on_gpu), found[0]


def tune_all(request: TuneRequest, hardware: Hardware) -> Advised:
    """Measure on this machine, and decide."""
    request.refuse_ranks()
    with TemporaryDirectory(prefix="samestep-tune-", ignore_cleanup_errors=True) as folder:
        return _tune_all(replace(request, run_dir=folder), hardware, request.report)


def _tune_all(request: TuneRequest, hardware: Hardware, report: Callable[[str], None]) -> Advised:
    gpus = 0 if request.config.distributed.device == "cpu" else hardware.device_count
    cpus = hardware.cpus.value
    ways = layouts(request.config, cpus, gpus, request.quick)
    request, tried, unfit = _first_that_fits(request, ways, report)
    config = request.config
    layout, first = advise_layout(tried, config.distributed.threads_per_rank, config.same)

    report(f"lanes, loader workers, precision: on {layout.label}")
    base, *others = variants(config, layout.ranks, cpus, gpus > 0, request.quick)
    larger = batches(config, request.quick)
    # Right after the base: on a CPU what is read is the most that the process ever held.
    with_batches = [base, *larger, *others] if layout.ranks == 1 else [base, *others]
    found = _on_layout(request, layout, with_batches)
    timed = {row["label"]: Timed.read(row) for row in found.rows}
    grown, machine = timed, found.machine
    if layout.ranks > 1:
        report("global batch against memory: on one rank")
        alone = _on_layout(request, Layout(1, layout.threads), [base, *larger])
        grown = {row["label"]: Timed.read(row) for row in alone.rows}
    sizes = [grown[one.label] for one in (base, *larger)]
    shard = advise_shard(config.distributed.shard, unfit, timed[BASE].peak_bytes, _device(machine))
    return Advised(
        machine,
        layout,
        tried,
        list(timed.values()),
        [first, shard, *_decided(config, layout, others, timed), advise_batch(sizes, _device(machine))],
    )


def _first_that_fits(
    request: TuneRequest, ways: Sequence[Layout], report: Callable[[str], None]
) -> tuple[TuneRequest, list[tuple[Layout, Timed]], dict[str, str]]:
    """Measure all layouts, with more sharding if a step fits into memory with none of them.

    Returns:
        The request with the first `distributed.shard` that fits, what was measured with it, and why others did not fit.
    """
    unfit: dict[str, str] = {}
    own = request.config.distributed.shard
    for shard in SHARDS[SHARDS.index(own) :]:
        asked, possible = request, ways
        if shard != own:
            override = f"distributed.shard={shard}"
            try:
                config = override_config(request.config, [override])
            except ConfigError as error:
                unfit[shard] = str(error)
                continue
            asked = replace(request, config=config, overrides=(*request.overrides, override))
            possible = [way for way in ways if way.ranks > 1]
        tried = []
        for way in possible:
            report(f"ranks and threads: {way.label}{'' if shard == own else f', shard: {shard}'}")
            tried.append((way, _base_step(asked, way)))
        if any(not timed.failed for _, timed in tried):
            return asked, tried, unfit
        unfit[shard] = tried[-1][1].failed if tried else "there is one rank"
    raise PlanError("no step could be measured: " + "; ".join(f"{shard}: {why}" for shard, why in unfit.items()))


def _base_step(request: TuneRequest, way: Layout) -> Timed:
    try:
        return Timed.read(_on_layout(request, way, [Variant(BASE)]).rows[0])
    except RankFailed as error:
        if OutOfMemory.WORDS not in str(error):
            raise
        [line, *_] = [line for line in str(error).splitlines() if OutOfMemory.WORDS in line]
        return Timed(BASE, way.ranks, failed=line)


def _decided(config: Config, layout: Layout, tried: Sequence[Variant], timed: Mapping[str, Timed]) -> list[Advice]:
    base = timed[BASE]

    def by(key: str) -> dict[str, Timed]:
        """Return what was measured with other values of a key."""
        return {one.overrides[0].partition("=")[2]: timed[one.label] for one in tried if one.has(key)}

    own = config.lane_count(layout.ranks)
    lanes = sorted([base, *by("lanes").values()], key=lambda one: one.lanes)
    workers = {config.loader.workers: base} | {int(n): t for n, t in by("loader.workers").items()}
    (name, other), *_ = by("precision").items()
    graphless = by("speed.graph").get("false")
    why_no_graph = "speed.graph is false" if config.speed.graph is False else "they need a GPU, and ranks are on CPUs"
    return [
        advise_lanes(lanes, own, lanes_fixed(config, layout.ranks)),
        advise_workers(workers, config.loader.workers),
        advise_precision(base, other, config.precision, name),
        advise_graph(base, graphless, why_no_graph),
    ]


def _on_layout(request: TuneRequest, layout: Layout, tried: Sequence[Variant]) -> Document:
    overrides = (*layout.overrides, f"run_dir={json.dumps(request.run_dir)}")
    quiet = replace(request, report=lambda line: _unless_stage(line, request.report))
    return _measured(quiet, overrides, tried, World(layout.ranks), Machines())


def _measured(
    request: TuneRequest, overrides: Sequence[str], tried: Sequence[Variant], world: World, machines: Machines
) -> Document:
    options = ["--variants", as_text(tried), "--rounds", str(request.rounds)]
    if request.steps is not None:
        options += ["--steps", str(request.steps)]
    if request.config.distributed.lane_weights is not None:
        overrides = [*overrides, "distributed.lane_weights=null"]  # of one number of ranks
    config = override_config(request.config, overrides)
    command = BenchCommand(COMMAND, config, request.file, (*request.overrides, *overrides), tuple(options))
    return measure_worlds(command, [world], request.report, machines)[0]


def _unless_stage(line: str, report: Callable[[str], None]) -> None:
    """Not which number of ranks is measured: the stage has named it."""
    if not line.startswith("measuring on "):
        report(line)


def _device(machine: Mapping[str, Any]) -> int | None:
    found = machine.get("device_bytes")
    return found if isinstance(found, int) else None
