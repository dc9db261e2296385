"""The commands that measure machines, the links between them, and trainings on them; one page of their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from samestep.cli.app import AsJson, Force, guarded, print_rows, refuse_outputs, usable
from samestep.cli.bench.shared import BenchArguments, Measurement, Rounds, bench_app, measuring
from samestep.environment.variables import export

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
    given: BenchArguments,
    operations: Operations = "",
    smallest: Smallest = "1KB",
    largest: Largest = "",
    rounds: Rounds = None,
) -> Measurement:
    """Measure what messages between ranks take: all-reduce, our tree sum, all-gather, broadcast, ring.

    With --worlds it starts ranks; else it is a rank of any launcher. Of a config, the distributed section counts.

    Example: samestep bench comm --worlds 2,4
    """
    from samestep.bench.sizes import sizes_between
    from samestep.config import Config

    largest = largest or ("1MB" if given.quick else "16MB")
    turns = rounds or (3 if given.quick else 7)
    sizes, wanted = sizes_between(smallest, largest), _operations(operations)

    def measure(place: RunContext) -> Document:
        from samestep.bench.comm import measure_comm

        return measure_comm(place, wanted, sizes, turns)

    options = ["--operations", ",".join(wanted), "--rounds", str(turns)]
    options += ["--smallest", smallest, "--largest", largest]
    return Measurement(given.load(lambda: Config(name="bench", steps=1)), options, measure)


def _operations(given: str) -> list[str]:
    from samestep.bench.sizes import OPERATIONS
    from samestep.errors import PlanError

    names = [name.strip() for name in given.split(",") if name.strip()] or list(OPERATIONS)
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown:
        raise PlanError(f"--operations has {', '.join(unknown)}: there are {', '.join(OPERATIONS)}")
    return list(dict.fromkeys(names))


_STEPS, _QUICK_STEPS = 2000, 200
_NO_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "0"}
"""torch remembers the last 2,000 collectives: memory that grows until then, and is no leak."""

LanesPerRank = Annotated[str, typer.Option(help="Numbers of lanes of a rank; 1,2,4,8 (quick: 1,4), if not given.")]
Steps = Annotated[
    int | None, typer.Option(min=0, help="Of the leak test: 2000 (quick: 200), if not given; 0 for none.")
]


@measuring
def memory(given: BenchArguments, lanes_per_rank: LanesPerRank = "", steps: Steps = None) -> Measurement:
    """Measure what memory consists of, what lanes cost, and whether it leaks.

    With --worlds it starts ranks; else it is a process alone, or a rank of any launcher.

    Example: samestep bench memory config.yaml --worlds 1,2
    """
    from samestep.bench.scaling_plan import builtin_config
    from samestep.launch.run.worlds import parse_counts

    lanes_per_rank = lanes_per_rank or ("1,4" if given.quick else "1,2,4,8")
    lanes = parse_counts(lanes_per_rank, "--lanes-per-rank")
    leak_steps = (_QUICK_STEPS if given.quick else _STEPS) if steps is None else steps
    config = given.load(builtin_config)
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
    given: BenchArguments,
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

    config = given.load(lambda: Config(name="bench", steps=1))
    built_in = (workload or "mlp") if workload or given.file is None else None
    request = ScalingRequest(
        mode, built_in, size, lanes, parse_variants(variants), rounds, given.quick,
        max(most_ranks, *(world.ranks for world in given.start.worlds), 1),
    )  # fmt: skip
    request.check(config)

    def measure(place: RunContext) -> Document:
        from samestep.bench.scaling import measure_scaling

        return measure_scaling(request, config, place)

    more = threads_of_ranks(request, config) if given.start.worlds else []
    return Measurement(config, request.options(), measure, more)


Results = Annotated[
    list[Path], typer.Argument(callback=usable, help="Results of samestep bench, or folders of them.", metavar="RESULT")
]
Page = Annotated[Path | None, typer.Option("--report", callback=usable, help="Where the HTML page goes.")]
Csv = Annotated[Path | None, typer.Option(callback=usable, help="Where all rows go.", metavar="FILE.csv")]
Picture = Annotated[Path | None, typer.Option(callback=usable, help="Where the plots go, in .png, .svg or .pdf.")]


@bench_app.command()
def report(
    results: Results,
    page: Page = None,
    csv: Csv = None,
    picture: Picture = None,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Join results of any machines and worlds into one page, and judge every target by them.

    Example: samestep bench report results --report bench.html
    """
    with guarded():
        from samestep.bench.report.report import TARGET_COLUMNS, TITLE, make_report, write_csv, write_report
        from samestep.bench.report.results import read_results
        from samestep.checkpoint.files import refuse_existing
        from samestep.report.picture import write_panels

        refuse_outputs(page, picture, force=force)
        if csv is not None and not force:
            refuse_existing(csv)
        made = make_report(read_results(results))
        if as_json:
            typer.echo(json.dumps(made.as_json()))
        else:
            print_rows(TARGET_COLUMNS, made.target_cells())
            typer.echo(f"{made.summary}.")
        if csv is not None:
            write_csv(made, csv)
            typer.echo(f"Rows: {csv}", err=True)
        if picture is not None:
            write_panels(TITLE, made.panels, picture, force)
            typer.echo(f"Plots: {picture}", err=True)
        if page is not None:
            write_report(made, page, force)
            typer.echo(f"Page: {page}", err=True)
