"""The columns of the matrix: ways to run a training that must all give the same bits."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from samestep.train.record import RunRecord
from tests.cli import processes
from tests.preloaded.client import ROOT
from tests.ranks import answers_of_ranks
from tests.sameness.case import Case
from tests.sameness.rank import Ending, Job, train_rank

SECONDS = 240.0
"""For the ranks of one run, on a machine that is busy with others."""
TRAINED = "trained "
"""Begins the reason of a refusal that came too late."""


@dataclass(frozen=True)
class Way:
    """One way to run a training."""

    name: str
    about: str
    """For the table."""
    config: Mapping[str, Any] = field(default_factory=dict)
    compared_with: str = "eager"
    """The way whose run on one rank has the bits to expect."""
    worlds: Sequence[int] | None = None
    """Numbers of ranks unless some are asked for; those of the row if not set."""
    only_on: str = ""
    """A kind of device; "" for any."""
    shards: Sequence[str] = ()
    """Values of distributed.shard that the parts of a resumed run take in turn."""


WAYS = (
    Way("eager", "forked ranks, plainly"),
    Way("resumed", "stopped after every part and resumed on another number of ranks"),
    Way("sharded", "distributed.shard: optimizer", {"distributed": {"shard": "optimizer"}}, worlds=(2, 3, 5)),
    Way(
        "resharded", "resumed with and without distributed.shard: optimizer, alternating", shards=("optimizer", "none")
    ),
    Way("weights", "distributed.shard: weights", {"distributed": {"shard": "weights"}}, worlds=(2, 3, 5)),
    Way(
        "reweighted",
        "resumed with distributed.shard weights, none and optimizer, one after the other",
        shards=("weights", "none", "optimizer"),
    ),
    Way("workers", "with two loader processes for each rank", {"loader": {"workers": 2}}, worlds=(1, 3)),
    Way("launcher", "started by torchrun", worlds=(3,)),
    Way("bf16", "bf16 autocast", {"precision": "bf16"}, "bf16", only_on="cuda"),
    Way("fp16", "fp16 autocast with loss scaling", {"precision": "fp16"}, "fp16", only_on="cuda"),
    Way("graphs", "CUDA graphs where possible", {"speed": {"graph": "auto"}}, only_on="cuda"),
)


@dataclass(frozen=True)
class Ended:
    """How a run ended: done with a record, or refused or failed with a reason."""

    end: str
    reason: str = ""
    record: Path | None = None


def run_once(case: Case, way: Way, world: int, folder: Path, device: str) -> Ended:
    """Train on so many ranks."""
    job = _job(case, way, world, folder, device, saves=False)
    answers = _by_torchrun(job, world) if way.name == "launcher" else _forked(job, world)
    return _ended(answers, folder)


def run_in_parts(case: Case, way: Way, worlds: Sequence[int], steps: int, folder: Path, device: str) -> Ended:
    """Train in as many parts as there are sizes, each resumed from the checkpoint of the last."""
    for part, world in enumerate(worlds, 1):
        here = way
        if way.shards:
            shard = way.shards[(part - 1) % len(way.shards)]
            here = replace(way, config={"distributed": {"shard": shard}})
        job = _job(case, here, world, folder, device, saves=True)
        if part < len(worlds):
            job = replace(job, stop_after=steps * part // len(worlds))
        ended = _ended(_forked(job, world), folder)
        if ended.end != "stopped":
            break
    return ended


def parts(worlds: Sequence[int], steps: int) -> list[int]:
    """Sizes to resume on, large and small in turn; no more than there are steps."""
    left, found = sorted(worlds), []
    while left:
        found.append(left.pop(-1 if len(found) % 2 == 0 else 0))
    return found[:steps]


def is_in_parts(way: Way) -> bool:
    """Return whether a run of this way is stopped and resumed."""
    return way.name == "resumed" or bool(way.shards)


def steps_of(ended: Ended) -> int:
    return 0 if ended.record is None else RunRecord.read(ended.record).steps


def _job(case: Case, way: Way, world: int, folder: Path, device: str, saves: bool) -> Job:
    checkpoint: dict[str, Any] = {"enabled": saves}
    if saves:
        checkpoint |= {f"every_{unit}": None for unit in ("steps", "minutes", "epochs")}
    settings = case.settings(folder / "run", world, device)
    section = {**settings.get("distributed", {}), **way.config.get("distributed", {})}
    config = {**settings, **way.config, "distributed": section, "checkpoint": checkpoint}
    return Job(config, str(folder), case.source if case.is_loop else "")


def _forked(job: Job, world: int) -> list[Ending]:
    said = answers_of_ranks(train_rank, world, job, seconds=SECONDS)
    return [answer if ok else Ending("failed", answer, by_samestep=True) for ok, answer in said]


def _by_torchrun(job: Job, world: int) -> list[Ending]:
    """By the real launcher, whose processes a server forks: they need not import torch again."""
    folder = Path(job.folder)
    folder.mkdir(parents=True)
    file = folder / "job.json"
    file.write_text(json.dumps(asdict(job)))
    script = ROOT / "tests" / "sameness" / "rank.py"
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    done = processes.run([sys.executable, "-m", *launcher, str(script), str(file)], cwd=folder, seconds=SECONDS)
    files = [folder / f"answer-{rank}.json" for rank in range(world)]
    if not all(path.exists() for path in files):
        return [Ending("failed", done.stdout + done.stderr)]
    return [Ending(**json.loads(path.read_text())) for path in files]


def _ended(answers: Sequence[Ending], folder: Path) -> Ended:
    ends = {answer.end for answer in answers}
    if ends == {"done"}:
        return Ended("done", record=folder / "record")
    if ends == {"stopped"}:
        return Ended("stopped", "it did not go on")
    refused = [answer.text for answer in answers if answer.end == "refused"]
    theirs = [answer for answer in answers if answer.end == "failed" and not answer.by_samestep]
    if refused and not theirs:
        steps = _steps_logged(folder / "run" / "metrics.jsonl")
        late = f"{TRAINED}{steps} step(s) first, then refused: " if steps else ""
        return Ended("refused", late + refused[0])
    failed = theirs or [answer for answer in answers if answer.end == "failed"]
    return Ended("failed", failed[0].text if failed else f"ranks ended as {sorted(ends)}")


def _steps_logged(metrics: Path) -> int:
    if not metrics.exists():
        return 0
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return sum("loss" in row for row in rows)
