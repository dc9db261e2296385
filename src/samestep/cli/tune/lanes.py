"""The command that measures what lanes cost: tune lanes."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from samestep.cli.app import AsJson, ConfigFile, Overrides, Via, guarded, reporting
from samestep.cli.bench.shared import Hosts, Nodes, Page, Start, ViaOption, Worlds, print_presentation, refuse_files
from samestep.cli.tune.shared import Rounds, Steps, tune_app
from samestep.distributed.signals import DeferredSignals

Lanes = Annotated[str, typer.Option(help="Numbers of lanes; 1,2,4,8,16 and the config's own, if not given.")]
Parallel = Annotated[str, typer.Option(help="On GPUs: lanes side by side, such as 1,4,8; as configured, if not given.")]


@tune_app.command()
def lanes(
    config: ConfigFile,
    overrides: Overrides = None,
    lanes: Lanes = "",
    parallel: Parallel = "",
    worlds: Worlds = "1",
    via: ViaOption = Via.torchrun,
    nodes: Nodes = 1,
    hosts: Hosts = "",
    rounds: Rounds = 5,
    steps: Steps = None,
    as_json: AsJson = False,
    report: Page = None,
) -> None:
    """Measure what lanes cost, and recommend how many.

    Trains for some seconds with each number of lanes; saves nothing.

    Example: samestep tune lanes config.yaml --worlds 1,2
    """
    with guarded(), DeferredSignals():
        from samestep.bench.tuning.recommend import Request, tune_lanes
        from samestep.config import load_config
        from samestep.launch.run.worlds import parse_counts, parse_worlds

        wanted = parse_counts(lanes, "--lanes") if lanes else ()
        widths = parse_counts(parallel, "--parallel") if parallel else ()
        start = Start.parse(worlds, via, nodes, hosts)
        sizes = parse_worlds(",".join(map(str, start.counts)), via.value)
        loaded = load_config(config, overrides or [])
        refuse_files(None, report)
        with reporting() as line:
            request = Request(loaded, config, tuple(overrides or ()), rounds=rounds, steps=steps, report=line)
            costs, document = tune_lanes(request, wanted, widths, sizes, start.machines)
        shown = costs.present(f"{loaded.name}: what lanes cost", document.machine["device"])
        if as_json:
            typer.echo(json.dumps(costs.as_json()))
        else:
            print_presentation(shown)
        if report is not None:
            from samestep.bench.presentation import write_html
            from samestep.report.run_facts import config_fact

            write_html(document.with_facts(config_fact(loaded)), shown, report)
            typer.echo(f"Page: {report}", err=True)
