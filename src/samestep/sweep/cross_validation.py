"""Trains one run for each fold of a training set, and combines their results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from samestep.checkpoint.files import sha256_of, write_whole
from samestep.checkpoint.run_result import RunResult
from samestep.config import Config, load_config
from samestep.data.folds import Folds
from samestep.environment.hardware import owned_cpus
from samestep.environment.variables import process_environment
from samestep.errors import LaunchError, PlanError, RankFailed, Stopped, TaskError
from samestep.parsing.files import is_file
from samestep.parsing.json_text import read_json_lines
from samestep.sweep.children import Children, warm_server
from samestep.sweep.placing import rank_threads
from samestep.sweep.run_spec import RunSpec, override, why_failed
from samestep.sweep.study_folder import locked, same_study, shape_of, write_document
from samestep.sweep.tracked_study import TrackedStudy

Report = Callable[[str], None]
Which = Literal["best", "last"]

OUT_OF_FOLD = "out_of_fold.jsonl"


@dataclass(frozen=True)
class CvRequest:
    """Settings of a cross-validation."""

    config: Path
    overrides: tuple[str, ...]
    k: int | None = None
    """Number of folds; as many as the file has, if there is one."""
    stratify: str = "auto"
    seed: int = 0
    file: Path | None = None
    """The folds; in the directory if not given."""
    folder: Path | None = None
    """Where everything goes; beside the run's directory if not given."""
    ranks: int = 1
    which: Which = "best"
    """Which evaluation of a fold counts."""
    predicts: bool = True
    hang_timeout: float | None = None
    """Seconds in which something must move in a run on one rank."""
    start_timeout: float | None = None


def metrics_of(result: RunResult, which: Which) -> Mapping[str, Any]:
    """Return the values of a run's best evaluation, or of its last one."""
    if which == "best" and result.best is not None:
        found: Mapping[str, Any] = result.best["metrics"]
        return found
    return result.metrics


def cross_validate(request: CvRequest, report: Report) -> dict[str, Any]:
    """Train a run for each fold; those that are done already are kept.

    Args:
        request: What to train.
        report: Called with a line for whatever happens.

    Returns:
        Per-fold results, their mean and standard deviation, and where the predictions are.

    Raises:
        RankFailed: if a fold failed, when all others have been trained.
    """
    config = load_config(request.config, request.overrides)
    if config.fold is not None:
        raise LaunchError("the config is of one fold already: leave out its fold section")
    folder = request.folder or config.run_path.with_name(f"{config.run_path.name}-cv")
    environ = process_environment()
    threads = rank_threads(config, owned_cpus(environ), request.ranks, environ).value
    with (
        locked(folder, "cv", report),
        Children() as children,
        warm_server(config, threads, folder / "warm.txt", True, report) as server,
    ):
        path = (request.file or folder / "folds.json").resolve()
        _make_folds(request, path, children, folder, report)  # while the server imports
        children.fork_from(server, report)
        folds = Folds.read(path)
        if request.k not in (None, len(folds.valid)):
            raise PlanError(
                f"--folds is {request.k}, and {path} has {len(folds.valid)}: leave out --folds, or give "
                "another file or directory"
            )
        definition = {"config": shape_of(config), "folds": sha256_of(path), "which": request.which}
        same_study(folder / "definition.json", definition)
        specs = fold_specs(request, folder, path, len(folds.valid))
        study = TrackedStudy(folder.name, "cv", config.trackers, folder, report)
        with study.started({"folds": len(specs), "which": request.which}):
            specs = [_tracked(spec, study, config.name) for spec in specs]
            failed = _train(specs, children, folder, report)
            for number, spec in enumerate(specs):
                if (result := spec.result()) is not None and result.is_done:
                    study.write(number, metrics_of(result, request.which))
        if failed:
            lines = "\n  - ".join(f"{name}: {reason}" for name, reason in failed.items())
            raise RankFailed(
                f"{len(failed)} of {len(specs)} folds failed:\n  - {lines}\nStart it again to train them; "
                f"the others are kept in {folder}"
            )
        predictions = _predict(specs, folds, children, folder, report) if request.predicts else None
    return _summary(config, request, specs, folder, predictions)


def fold_specs(request: CvRequest, folder: Path, folds: Path, count: int) -> list[RunSpec]:
    """Return the run of each fold."""
    return [
        RunSpec(
            f"fold {number}",
            request.config,
            (*request.overrides, override("fold", {"file": str(folds), "number": number})),
            folder / f"fold-{number}",
            request.ranks,
            hang_timeout=request.hang_timeout,
            start_timeout=request.start_timeout,
        )
        for number in range(count)
    ]


def _tracked(spec: RunSpec, study: TrackedStudy, name: str) -> RunSpec:
    """Return the run of a fold as trackers are to show it."""
    shown = study.overrides("fold", f"{name[:80]}-{spec.folder.name}")
    return replace(spec, overrides=(*spec.overrides, *shown))


def _make_folds(request: CvRequest, path: Path, children: Children, folder: Path, report: Report) -> None:
    """Split the data in a process of its own, which ends with the training set that it loads."""
    if is_file(path):
        report(f"the folds are those of {path}")
        return
    if request.k is None:
        raise PlanError(f"there is no {path}: say how many folds with --folds")
    words = ["cv", str(request.config), *request.overrides, "--only-split", "--file", str(path)]
    words += ["--folds", str(request.k), "--stratify", request.stratify, "--seed", str(request.seed)]
    output = folder / "folds.txt"
    output.unlink(missing_ok=True)
    child = children.start("the split", words, output)
    if not children.wait(child, request.start_timeout):
        raise TaskError(
            f"the training set was not split in {request.start_timeout:g} s: give a longer --start-timeout, "
            f"or none, if its data takes longer to prepare. All it printed: {output}"
        )
    if child.code != 0:
        raise TaskError(f"the training set could not be split: {child.ending()}")
    report(child.last_words())


def _train(specs: Sequence[RunSpec], children: Children, folder: Path, report: Report) -> dict[str, str]:
    """One after the other; why some of them failed, by name."""
    failed: dict[str, str] = {}
    for spec in specs:
        result = spec.result()
        if result is not None and result.is_done:
            report(f"{spec.name} is done already")
            continue
        report(f"{spec.name} {'resumes' if result is not None else 'starts'}")
        child = spec.start(children, folder)
        children.wait(child)
        children.refuse_stopped()
        result = spec.result()
        if child.code == Stopped.exit_code:
            raise Stopped(f"{spec.name} was stopped, and is saved: start it again to resume")
        if child.code != 0 or result is None or not result.is_done:
            failed[spec.name] = why_failed(spec, child)
            report(f"{spec.name} failed: {failed[spec.name]}")
    return failed


def _predict(specs: Sequence[RunSpec], folds: Folds, children: Children, folder: Path, report: Report) -> str | None:
    """Return every sample's prediction by the model that was not trained on it, in one file."""
    for spec in specs:
        target = spec.folder / "predictions.jsonl"
        if is_file(target):
            continue
        # The person has named the config, and so its task, in this very command.
        words = ["predict", str(spec.folder), "valid", "--output", str(target), "--trust"]
        child = children.start(f"the predictions of {spec.name}", words, folder / "predict.txt")
        children.wait(child)
        if child.code != 0:
            report(f"no predictions: {child.ending()}")
            return None
    rows: list[tuple[int, str]] = []
    for number, spec in enumerate(specs):
        for row in read_json_lines(spec.folder / "predictions.jsonl"):
            if row is None:
                raise TaskError(f"{spec.folder / 'predictions.jsonl'} is damaged: remove it")
            at = folds.valid[number][row["index"]]
            rows.append((at, json.dumps({**row, "index": at, "fold": number})))
    path = folder / OUT_OF_FOLD
    write_whole(path, "".join(f"{text}\n" for _, text in sorted(rows)))
    return str(path)


def _summary(
    config: Config, request: CvRequest, specs: Sequence[RunSpec], folder: Path, predictions: str | None
) -> dict[str, Any]:
    results: list[dict[str, Any]] = []
    for number, spec in enumerate(specs):
        found = spec.result()
        assert found is not None, "every fold is done"
        result = {key: getattr(found, key) for key in ("status", "reason", "steps", "seconds")}
        metrics = metrics_of(found, request.which)
        results.append({"fold": number, **result, "metrics": metrics, "run": str(spec.folder)})
    mean, std = mean_and_std([result["metrics"] for result in results])
    summary = {
        "folder": str(folder),
        "metric": config.best.metric,
        "which": request.which,
        "mean": mean,
        "std": std,
        "folds": results,
        "out_of_fold": predictions,
    }
    write_document(folder / "cv.json", summary)
    return summary


def mean_and_std(metrics: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], dict[str, float]]:
    """Return mean and standard deviation of every number that all folds have; that of a sample (k - 1)."""
    names = [name for name in metrics[0] if all(isinstance(fold.get(name), (int, float)) for fold in metrics)]
    values = {name: [float(fold[name]) for fold in metrics] for name in names}
    mean = {name: math.fsum(numbers) / len(numbers) for name, numbers in values.items()}
    squares = {name: math.fsum((x - mean[name]) ** 2 for x in numbers) for name, numbers in values.items()}
    return mean, {name: math.sqrt(total / (len(metrics) - 1)) for name, total in squares.items()}
