"""The command that runs all measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from samestep.cli.app import Overrides, guarded
from samestep.cli.bench.shared import Hosts, Nodes, Quick, Start, TrainingConfig, ViaOption, Worlds, bench_app

Folder = Annotated[Path, typer.Option("--output", help="Folder for the results; created if missing.")]
Only = Annotated[str, typer.Option(help="Such as comm,memory; all of them, if not given.")]


@bench_app.command("all")
def bench_all(
    output: Folder,
    config: TrainingConfig = None,
    overrides: Overrides = None,
    worlds: Worlds = "1,2",
    via: ViaOption = "torchrun",
    nodes: Nodes = 1,
    hosts: Hosts = "",
    only: Only = "",
    quick: Quick = False,
) -> None:
    """Run comm, scaling, memory, loader and checkpoint, and write their results into a folder.

    One that fails is named at the end, and the others run; the exit code is 1 then.

    Example: samestep bench all --quick --output results
    """
    with guarded():
        from samestep.bench.document import refuse_other_result
        from samestep.bench.suite import chosen_parts, run_suite, words_of
        from samestep.errors import OutputError, PlanError

        start = Start.parse(worlds, via, nodes, hosts)
        if not start.counts:
            raise PlanError("--worlds is empty: give numbers of ranks, such as 1,2")
        names = [name.strip() for name in only.split(",") if name.strip()]
        parts = chosen_parts(names, start.counts)
        try:
            output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"--output {output} cannot be a folder: {error.strerror or error}. Results are several files"
            ) from None
        for part in parts:
            refuse_other_result(output / f"{part.name}.json")
        found = run_suite(
            parts,
            lambda part: [*words_of(part, config, overrides or [], start.counts, quick, output), *start.where()],
            lambda line: typer.echo(line, err=True),
        )
    for outcome in found:
        state = f"FAILED\n{outcome.failed}" if outcome.failed else f"{output / outcome.name}.json"
        typer.echo(f"{outcome.name} ({outcome.seconds:.0f} s): {state}")
    if any(outcome.failed for outcome in found):
        raise typer.Exit(1)
