"""The command that measures what a training's memory consists of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.bench.shared import Asked, Measurement, measuring
from samestep.environment.variables import export

if TYPE_CHECKING:
    from samestep.bench.document import Document
    from samestep.distributed.context import RunContext

_STEPS, _QUICK_STEPS = 2000, 200
_NO_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
"""torch remembers the last 2,000 collectives: memory that grows until then, and is no leak."""

LanesPerRank = Annotated[str, typer.Option(help="Numbers of lanes of a rank; 1,2,4,8 (quick: 1,4), if not given.")]
Steps = Annotated[
    int | None, typer.Option(min=0, help="Of the leak test: 2000 (quick: 200), if not given; 0 for none.")
]


@measuring
def memory(asked: Asked, lanes_per_rank: LanesPerRank = "", steps: Steps = None) -> Measurement:
    """Measure what memory consists of, what lanes cost, and whether it leaks; predicted beside it.

    With --worlds it starts ranks; else it is a process alone, or a rank of any launcher.

    Example: samestep bench memory config.yaml --worlds 1,2
    """
    from samestep.bench.builtin import builtin_config
    from samestep.launch.run.worlds import parse_counts

    lanes_per_rank = lanes_per_rank or ("1,4" if asked.quick else "1,2,4,8")
    lanes = parse_counts(lanes_per_rank, "--lanes-per-rank")
    leak_steps = (_QUICK_STEPS if asked.quick else _STEPS) if steps is None else steps
    config = asked.load(builtin_config)
    export(_NO_FLIGHT_RECORDER)

    def measure(place: RunContext) -> Document:
        from samestep.bench.memory import MemoryPlan, measure_memory

        return measure_memory(config, place, MemoryPlan(lanes, leak_steps))

    options = ["--lanes-per-rank", lanes_per_rank, "--steps", str(leak_steps)]
    return Measurement(config, options, measure)
