"""The command that measures whether data is the bottleneck."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.bench.shared import Asked, Measurement, Rounds, measuring

if TYPE_CHECKING:
    from samestep.bench.document import Document
    from samestep.distributed.context import RunContext

Workers = Annotated[str, typer.Option(help="Loader processes of a rank; 0,1,2,4 (quick: 0,2), if not given.")]
Prefetch = Annotated[str, typer.Option(help="Lane batches that each reads ahead; 2,4 (quick: 2), if not given.")]


@measuring
def loader(asked: Asked, workers: Workers = "", prefetch: Prefetch = "", rounds: Rounds = None) -> Measurement:
    """Measure whether data is the bottleneck, and recommend loader.workers and loader.prefetch.

    With --worlds it starts ranks; else it is a process alone, or a rank of any launcher.

    Example: samestep bench loader config.yaml --workers 0,2,4
    """
    from samestep.bench.builtin import builtin_config
    from samestep.launch.run.worlds import parse_counts

    workers = workers or ("0,2" if asked.quick else "0,1,2,4")
    prefetch = prefetch or ("2" if asked.quick else "2,4")
    turns = rounds or (3 if asked.quick else 7)
    tried, ahead = _with_none(workers), parse_counts(prefetch, "--prefetch")
    config = asked.load(builtin_config)

    def measure(place: RunContext) -> Document:
        from samestep.bench.loader import LoaderPlan, measure_loader

        return measure_loader(config, place, LoaderPlan(tried, ahead, turns))

    options = ["--workers", workers, "--prefetch", prefetch, "--rounds", str(turns)]
    return Measurement(config, options, measure)


def _with_none(text: str) -> tuple[int, ...]:
    """Return numbers of workers, of which 0 is one."""
    from samestep.launch.run.worlds import parse_counts

    parts = [part.strip() for part in text.split(",")]
    some = [part for part in parts if part != "0"]
    counts = parse_counts(",".join(some), "--workers") if some else ()
    return (0, *counts) if "0" in parts else counts
