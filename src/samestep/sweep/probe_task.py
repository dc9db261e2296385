"""Asks a task's own code: which metrics it has, and whether its data can be split.

It runs in a process of its own: a sweep that waits for its trials holds no dataset in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samestep.config import Config
from samestep.data.folds import Folds
from samestep.errors import ConfigError, Mistake, TaskError, TextError, UserError
from samestep.parsing.files import is_file
from samestep.parsing.json_text import read_json
from samestep.sweep.children import Children
from samestep.sweep.loading import LoadedSweep
from samestep.sweep.run_spec import override
from samestep.sweep.schema import SweepConfig, seconds_of


@dataclass(frozen=True)
class TaskInfo:
    """The answers of a task."""

    metrics: tuple[str, ...]
    validates: bool
    """Whether it has validation data of its own."""
    folds: str = ""
    """How its data was split."""
    wrong_folds: str = ""
    """Why it could not be."""


def task_info(config: Config, split: tuple[int, str, int] | None, file: Path) -> dict[str, Any]:
    """Load a config's task and ask it."""
    from samestep.train.choose_folds import SplitRequest, metric_names, split_dataset
    from samestep.train.task import load_task

    task = load_task(config)
    task.prepare_data()
    info: dict[str, Any] = {"metrics": metric_names(task, config), "validates": True}
    if split is None:
        info["validates"] = task.valid_data() is not None
        return info
    k, stratify, seed = split
    try:
        dataset = task.train_data()
        if is_file(file):
            folds, how = Folds.read(file), "as the file has them"
            if len(folds.valid) != k or folds.samples != len(dataset):
                raise TaskError(
                    f"{file} has {len(folds.valid)} folds of {folds.samples} samples, and here are {k} of "
                    f"{len(dataset)}"
                )
        else:
            folds, how = split_dataset(task, dataset, SplitRequest(k, stratify, seed))  # type: ignore[arg-type]
            folds.write(file)
        info["folds"] = f"{k} folds of {folds.samples} samples, {how}"
    except UserError as error:
        info["wrong_folds"] = str(error)
    return info


def probe_task(loaded: LoadedSweep, folder: Path, children: Children) -> TaskInfo:
    """Have a child process ask the task; raises every mistake that follows.

    Raises:
        ConfigError: for a metric that the task does not have, or data that cannot be split.
        TaskError: if the task's code fails.
    """
    sweep, answer, output = loaded.sweep, folder / "task.json", folder / "task.txt"
    answer.unlink(missing_ok=True)
    output.unlink(missing_ok=True)
    words = ["probe", str(sweep.base_path), *_example(sweep), "--result", str(answer)]
    if sweep.folds is not None:
        rule = sweep.folds
        words += ["--folds", str(rule.k), "--stratify", rule.stratify, "--seed", str(rule.seed)]
        words += ["--output", str(folds_file(sweep, folder))]
    child = children.start("probing the task", words, output)
    if not children.wait(child, seconds_of(sweep.start_timeout)):
        raise TaskError(
            f"the task was not loaded in start_timeout, {sweep.start_timeout}: set a longer one, or none, if "
            f"its data takes longer to prepare. All it printed: {output}"
        )
    if child.code != 0 or not is_file(answer):
        raise TaskError(f"the task could not be loaded: {child.ending()}. All it printed: {output}")
    try:
        info = TaskInfo(**read_json(answer))
    except (TextError, TypeError) as error:
        raise TaskError(f"{answer} {error}") from None
    mistakes = _mistakes(sweep, info)
    if mistakes:
        raise ConfigError(loaded.source, mistakes)
    return info


def folds_file(sweep: SweepConfig, folder: Path) -> Path:
    """Return where a sweep's folds are."""
    if sweep.folds is None or sweep.folds.file is None:
        return (folder / "folds.json").resolve()
    return (sweep.base_path.parent / sweep.folds.file).resolve()


def _example(sweep: SweepConfig) -> Sequence[str]:
    """One value of each key: the task may not do without them."""
    return [override(key, next(domain.samples())) for key, domain in sweep.domains.items()]


def _mistakes(sweep: SweepConfig, info: TaskInfo) -> list[Mistake]:
    found = []
    for metric in sweep.metrics:
        if metric.partition("/")[0] not in info.metrics:
            message = f"the task has no {metric!r}: it has {', '.join(info.metrics)}"
            found.append(Mistake("objective.metric", message))
    if not info.validates:
        message = "the task has no valid_data to measure a trial on: define it, or set folds"
        found.append(Mistake("objective", message))
    if info.wrong_folds:
        found.append(Mistake("folds", info.wrong_folds))
    return found
