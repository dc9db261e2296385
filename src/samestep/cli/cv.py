"""The command of cross-validation: cv."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from samestep.cli.app import TRAINING, AsJson, ConfigFile, Overrides, app, guarded, print_rows, usable
from samestep.distributed.signals import DeferredSignals

Stratify = Literal["auto", "by_label", "by_group", "none"]
"""The rule by which folds are alike."""


Which = Literal["best", "last"]
"""The evaluation of a run that counts."""


StratifyOption = Annotated[
    Stratify, typer.Option(help="auto: by the task's groups, else by its labels if each has a sample for every fold.")
]
SeedOption = Annotated[int, typer.Option(min=0, help="Which samples are in a fold together.")]


@app.command(rich_help_panel=TRAINING)
def cv(
    config: ConfigFile,
    overrides: Overrides = None,
    k: Annotated[
        int | None, typer.Option("--folds", min=2, max=1000, help="Number of folds; 5, or the file's.")
    ] = None,
    stratify: StratifyOption = "auto",
    seed: SeedOption = 0,
    file: Annotated[
        Path | None, typer.Option(callback=usable, help="The folds; written if missing, else used as they are.")
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(callback=usable, help="Where the runs go; runs/NAME-cv if not given.")
    ] = None,
    only_split: Annotated[
        bool, typer.Option("--only-split", help="Write the folds to --file, and train nothing.")
    ] = False,
    nproc: Annotated[int, typer.Option(min=1, help="Ranks of each run, on this machine.")] = 1,
    which: Annotated[Which, typer.Option(help="The evaluation that counts.")] = "best",
    predict: Annotated[bool, typer.Option(help="Also predict every sample by the model that has not seen it.")] = True,
    hang_timeout: Annotated[
        str, typer.Option(help="How long a fold on one rank may hang before it fails; or none.")
    ] = "30m",
    start_timeout: Annotated[str, typer.Option(help="How long such a fold may take to reach its first step.")] = "2h",
    as_json: AsJson = False,
) -> None:
    """Cross-validate: train a run for each fold of the training set; started again, it resumes.

    Example: samestep cv config.yaml --folds 5
    """
    with guarded(), DeferredSignals():
        if only_split:
            return _split(config, overrides or [], k or 5, stratify, seed, file, as_json)
        from samestep.sweep.cross_validation import CvRequest, cross_validate
        from samestep.sweep.schema import parse_duration

        if k is None and (file is None or not file.exists()):
            k = 5
        request = CvRequest(
            config, tuple(overrides or ()), k, stratify, seed, file, directory, nproc,
            which, predict, parse_duration(hang_timeout), parse_duration(start_timeout),
        )  # fmt: skip
        found = cross_validate(request, lambda line: typer.echo(line, err=True))
        if as_json:
            typer.echo(json.dumps(found))
        else:
            _show(found)


def _split(
    config: Path, overrides: list[str], k: int, stratify: Stratify, seed: int, file: Path | None, as_json: bool
) -> None:
    """Write the folds of a config's training set."""
    from samestep.config import load_config
    from samestep.errors import OutputError, PlanError
    from samestep.train.choose_folds import SplitRequest, make_folds

    if file is None:
        raise PlanError("--only-split writes the folds: name their file with --file")
    if file.exists() or file.is_symlink():
        raise OutputError(f"{file} exists already: remove it, or name another file")
    if not file.parent.is_dir():
        raise OutputError(f"{file} cannot be written: there is no folder {file.parent}")
    made, why = make_folds(load_config(config, overrides), SplitRequest(k, stratify, seed))
    made.write(file)
    if as_json:
        sizes = [len(fold) for fold in made.valid]
        document = {"file": str(file), "samples": made.samples, "sizes": sizes, "how": why}
        typer.echo(json.dumps(document))
    else:
        typer.echo(f"{file}: {k} folds of {made.samples} samples, {why}")


def _show(found: dict[str, Any]) -> None:
    # Values of single classes, such as per_entity/NAME/f1, would leave no column for any.
    names = [name for name in found["mean"] if "/" not in name] or list(found["mean"])
    rows: list[tuple[Any, ...]] = [
        (fold["fold"], fold["steps"], *(f"{fold['metrics'][name]:.4g}" for name in names)) for fold in found["folds"]
    ]
    rows.append(("mean", "", *(f"{found['mean'][name]:.4g}" for name in names)))
    rows.append(("std", "", *(f"{found['std'][name]:.2g}" for name in names)))
    print_rows(("fold", "steps", *names), rows)
    if hidden := len(found["mean"]) - len(names):
        typer.echo(f"and {hidden} more values in cv.json")
    if found["out_of_fold"]:
        typer.echo(f"predictions of every sample: {found['out_of_fold']}")
