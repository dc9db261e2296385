"""The command that measures messages between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from samestep.cli.bench.shared import Asked, Measurement, Rounds, measuring

if TYPE_CHECKING:
    from samestep.bench.document import Document
    from samestep.distributed.context import RunContext

Operations = Annotated[str, typer.Option(help="Such as all-reduce,broadcast; all of them, if not given.")]
Smallest = Annotated[str, typer.Option(help="Bytes of the smallest message.", metavar="SIZE")]
Largest = Annotated[
    str, typer.Option(help="Bytes of the largest one; 16MB (quick: 1MB), if not given.", metavar="SIZE")
]


@measuring
def comm(
    asked: Asked, operations: Operations = "", smallest: Smallest = "1KB", largest: Largest = "", rounds: Rounds = None
) -> Measurement:
    """Measure what messages between ranks take: all-reduce, our tree sum, all-gather, broadcast, ring.

    With --worlds it starts ranks; else it is a rank of any launcher. Of a config, the distributed section counts.

    Example: samestep bench comm --worlds 2,4
    """
    from samestep.bench.sizes import sizes_between
    from samestep.config import Config

    largest = largest or ("1MB" if asked.quick else "16MB")
    turns = rounds or (3 if asked.quick else 7)
    sizes, wanted = sizes_between(smallest, largest), _operations(operations)

    def measure(place: RunContext) -> Document:
        from samestep.bench.comm import measure_comm

        return measure_comm(place, wanted, sizes, turns)

    options = ["--operations", ",".join(wanted), "--rounds", str(turns)]
    options += ["--smallest", smallest, "--largest", largest]
    return Measurement(asked.load(lambda: Config(name="bench", steps=1)), options, measure)


def _operations(given: str) -> list[str]:
    from samestep.bench.sizes import OPERATIONS
    from samestep.errors import PlanError

    names = [name.strip() for name in given.split(",") if name.strip()] or list(OPERATIONS)
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        raise PlanError(f"--operations has {', '.join(unknown)}: there are {', '.join(OPERATIONS)}")
    return list(dict.fromkeys(names))
