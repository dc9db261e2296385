"""The commands that measure machines, the links between them, and trainings on them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from samestep.cli.bench.shared import Asked, Measurement, Rounds, measuring
from samestep.environment.variables import export

if TYPE_CHECKING:
    from samestep.bench.document import Document
    from samestep.distributed.context import RunContext


Directory = Annotated[Path, typer.Option(help="On the disk to measure; nothing is left in it.", metavar="DIR")]
Megabytes = Annotated[
    int | None, typer.Option(min=1, max=100_000, help="Without a config: of its state; 100 (quick: 20).")
]
Inside = Annotated[Path | None, typer.Option(hidden=True)]
"""Where ranks that this command has started write."""


@measuring
def checkpoint(
    asked: Asked,
    directory: Directory = Path(),
    megabytes: Megabytes = None,
    rounds: Rounds = None,
    inside: Inside = None,
) -> Measurement:
    """Measure how long training pauses for a save, when it is on disk, and what a restore takes.

    With --worlds it starts ranks; else it is a process alone, or a rank of any launcher.

    Example: samestep bench checkpoint --worlds 1,2 --megabytes 500
    """
    from samestep.bench.builtin import builtin_config, width_of_state
    from samestep.errors import PlanError

    if asked.file is not None and megabytes is not None:
        raise PlanError("--megabytes is for the built-in training: the config has its own size")
    turns = rounds or (3 if asked.quick else 7)
    width = width_of_state(megabytes or (20 if asked.quick else 100))
    config = asked.load(lambda: builtin_config(width=width))
    options = ["--rounds", str(turns)]
    if asked.start.counts:
        # One folder for all numbers of ranks, so that one restores what another has saved.
        folder = asked.scope.enter_context(folder_in(directory))
        options += ["--inside", str(folder.resolve())]

    def measure(place: RunContext) -> Document:
        from samestep.bench.checkpoint import measure_checkpoint

        with _folder_of_ranks(place, directory, inside) as folder:
            return measure_checkpoint(config, place, folder, turns)

    return Measurement(config, options, measure)


@contextmanager
def folder_in(directory: Path) -> Iterator[Path]:
    """A folder of our own in a directory of the user's; removed with all that is in it, and nothing else.

    Raises:
        PlanError: if there is no such directory, or nobody may write there.
    """
    import shutil
    import tempfile

    from samestep.errors import PlanError

    try:
        made = Path(tempfile.mkdtemp(prefix="samestep-bench-", dir=directory))
    except OSError as error:
        raise PlanError(
            f"--directory is {directory}, and no folder can be made in it: {error.strerror}. Give a directory "
            "that exists, on the disk to measure"
        ) from None
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


@contextmanager
def _folder_of_ranks(place: RunContext, directory: Path, inside: Path | None) -> Iterator[Path]:
    """Yield the folder that these ranks write to, which rank 0 makes and removes."""
    if inside is not None:
        yield inside
    elif place.is_main:
        with folder_in(directory) as folder:
            yield place.broadcast(folder.resolve())
            place.barrier()
    else:
        yield place.broadcast(directory)
        place.barrier()


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
        from samestep.bench.loader import measure_loader

        return measure_loader(config, place, tried, ahead, turns)

    options = ["--workers", workers, "--prefetch", prefetch, "--rounds", str(turns)]
    return Measurement(config, options, measure)


def _with_none(text: str) -> tuple[int, ...]:
    """Return numbers of workers, of which 0 is one."""
    from samestep.launch.run.worlds import parse_counts

    parts = [part.strip() for part in text.split(",")]
    some = [part for part in parts if part != "0"]
    counts = parse_counts(",".join(some), "--workers") if some else ()
    return (0, *counts) if "0" in parts else counts


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
        from samestep.bench.memory import measure_memory

        return measure_memory(config, place, lanes, leak_steps)

    options = ["--lanes-per-rank", lanes_per_rank, "--steps", str(leak_steps)]
    return Measurement(config, options, measure)


ModeOption = Annotated[
    Literal["weak", "strong", "both"], typer.Option(help="weak: the batch grows with the ranks; strong: it stays.")
]
WorkloadOption = Annotated[
    Literal["mlp", "conv", "transformer"] | None, typer.Option(help="A built-in task; mlp, if there is no config.")
]
SizeOption = Annotated[Literal["small", "medium", "large"], typer.Option(help="Of the built-in task.")]
Lanes = Annotated[int | None, typer.Option(min=1, help="Of a rank in weak scaling, of all ranks in strong scaling.")]
Variants = Annotated[str, typer.Option(help="Of samestep,ddp; both, if not given.")]
MostRanks = Annotated[int, typer.Option(hidden=True)]


@measuring
def scaling(
    asked: Asked,
    mode: ModeOption = "both",
    workload: WorkloadOption = None,
    size: SizeOption = "small",
    lanes: Lanes = None,
    variants: Variants = "",
    rounds: Rounds = None,
    most_ranks: MostRanks = 1,
) -> Measurement:
    """Measure what more ranks bring: samestep and plain DDP, interleaved, on your task or a built-in one.

    With --worlds it starts ranks; else it is a rank of any launcher. With --workload, only the config's distributed
    section counts.

    Example: samestep bench scaling config.yaml --worlds 1,2,4
    """
    from samestep.bench.programs import threads_of_ranks
    from samestep.bench.scaling_plan import ScalingRequest, parse_variants
    from samestep.config import Config

    config = asked.load(lambda: Config(name="bench", steps=1))
    built_in = (workload or "mlp") if workload or asked.file is None else None
    request = ScalingRequest(
        mode, built_in, size, lanes, parse_variants(variants), rounds, asked.quick,
        max(most_ranks, *asked.start.counts, 1),
    )  # fmt: skip
    request.check(config)

    def measure(place: RunContext) -> Document:
        from samestep.bench.scaling import measure_scaling

        return measure_scaling(request, config, place)

    more = threads_of_ranks(request, config) if asked.start.counts else []
    return Measurement(config, request.options(), measure, more)
