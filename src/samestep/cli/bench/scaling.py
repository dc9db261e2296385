"""The command that measures what more ranks bring."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.bench.shared import Asked, Measurement, Rounds, measuring

if TYPE_CHECKING:
    from samestep.bench.document import Document
    from samestep.distributed.context import RunContext


class Mode(str, Enum):
    """The growth of the global batch with the ranks."""

    weak = "weak"
    strong = "strong"
    both = "both"


class Workload(str, Enum):
    """A built-in task."""

    mlp = "mlp"
    conv = "conv"
    transformer = "transformer"


class Size(str, Enum):
    """The size of a built-in task."""

    small = "small"
    medium = "medium"
    large = "large"


ModeOption = Annotated[Mode, typer.Option(help="weak: the batch grows with the ranks; strong: it stays.")]
WorkloadOption = Annotated[Workload | None, typer.Option(help="A built-in task; mlp, if there is no config.")]
SizeOption = Annotated[Size, typer.Option(help="Of the built-in task.")]
Lanes = Annotated[int | None, typer.Option(min=1, help="Of a rank in weak scaling, of all ranks in strong scaling.")]
Variants = Annotated[str, typer.Option(help="Of samestep,ddp,accelerate,lightning; all that are installed.")]
MostRanks = Annotated[int, typer.Option(hidden=True)]


@measuring
def scaling(
    asked: Asked,
    mode: ModeOption = Mode.both,
    workload: WorkloadOption = None,
    size: SizeOption = Size.small,
    lanes: Lanes = None,
    variants: Variants = "",
    rounds: Rounds = None,
    most_ranks: MostRanks = 1,
) -> Measurement:
    """Measure what more ranks bring: samestep, plain DDP and other libraries, interleaved, on your task or a built-in one.

    With --worlds it starts ranks; else it is a rank of any launcher. With --workload, only the config's distributed
    section counts.

    Example: samestep bench scaling config.yaml --worlds 1,2,4
    """
    from samestep.bench.programs import threads_of_ranks
    from samestep.bench.scaling_plan import ScalingRequest, parse_variants
    from samestep.config import Config

    config = asked.load(lambda: Config(name="bench", steps=1))
    built_in = (workload or Workload.mlp).value if workload or asked.file is None else None
    request = ScalingRequest(
        mode.value, built_in, size.value, lanes, parse_variants(variants), rounds, asked.quick,
        max(most_ranks, *asked.start.counts, 1),
    )  # fmt: skip
    request.check(config)

    def measure(place: RunContext) -> Document:
        from samestep.bench.scaling import measure_scaling

        return measure_scaling(request, config, place)

    more = threads_of_ranks(request, config) if asked.start.counts else []
    return Measurement(config, request.options(), measure, more)
