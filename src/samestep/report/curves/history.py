"""The measurements of runs, read from their directories: finished, interrupted or still training."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from samestep.errors import RunDirError, TextError
from samestep.parsing.files import NewLines, is_file
from samestep.parsing.json_text import parse_json, read_json

METRICS = "metrics.jsonl"
_LONGEST_LIST = 16
"""Values in a list that are curves of their own, such as the rates of parameter groups."""
_RUNS_NAMED = 5


@dataclass(frozen=True)
class Series:
    """One metric of one run, by ascending step."""

    steps: Sequence[int]
    values: Sequence[float]
    """May be NaN or infinite."""


@dataclass(frozen=True)
class History:
    """All numbers of one run."""

    run: Path
    label: str
    metrics: Mapping[str, Series]
    skipped: Sequence[int] = ()
    """Steps that changed nothing, since they were not finite."""
    unread: int = 0
    """Whole lines that hold no row."""
    best: tuple[str, str] | None = None
    """The metric that the run's config names as the one to judge by, and min or max."""
    global_batch: int | None = None
    """None if it is not known."""

    def better(self, metric: str) -> Literal["min", "max"] | None:
        """Return whether lower or higher is better; None if that cannot be known."""
        if self.best is not None and self.best[0] == metric:
            return "max" if self.best[1] == "max" else "min"
        if "loss" in metric.lower() and metric != "loss_scale":
            return "min"
        return "max" if metric == "samples_per_second" else None


def read_histories(runs: Sequence[Path]) -> list[History]:
    """Return the numbers of several runs, each with a label of its own; a run named twice is read once.

    Raises:
        RunDirError: if one is no run's directory.
    """
    named: dict[Path, Path] = {}
    for run in runs:
        named.setdefault(run.resolve(), run)
    distinct = list(named.values())
    return [read_history(run, name) for run, name in zip(distinct, labels(distinct), strict=True)]


def read_history(run: Path, label: str) -> History:
    """Return the numbers of one run.

    Raises:
        RunDirError: if it is no run's directory.
    """
    reader = HistoryReader(run, label)
    reader.read()
    return reader.history()


class HistoryReader:
    """Reads the numbers of a run, and later only what it has written since."""

    def __init__(self, run: Path, label: str) -> None:
        self._run, self._label = run, label
        self._begin(None)

    def _begin(self, file: int | None) -> None:
        self._file, self._end, self._unread = file, 0, 0
        self._found: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._skipped: set[int] = set()

    def read(self) -> bool:
        """Read what is new; return whether something is.

        A resumed run replaces the file, and it is read again.

        Raises:
            RunDirError: If the directory is not that of a run.
        """
        path = self._run / METRICS
        try:
            lines = NewLines(path, self._end, self._file)
            if lines.is_other_file:
                self._begin(lines.file)
            for line in lines:
                self._add(line)
        except TextError as error:
            raise RunDirError(f"{path} {error}. {_advice(self._run)}") from None
        is_new, self._end = lines.end > self._end or lines.is_other_file, lines.end
        return is_new

    def _add(self, line: str) -> None:
        if line.isspace():
            return
        try:
            row = parse_json(line)
        except TextError:
            row = None
        step = row.get("step") if isinstance(row, dict) else None
        if not isinstance(row, dict) or not isinstance(step, int) or isinstance(step, bool):
            # A run that trains, or was killed, has half a line at its end.
            self._unread += line.endswith("\n")
            return
        if row.get("skipped") is True:
            self._skipped.add(step)
        for name, value in row.items():
            if type(value) is float:  # nearly all of them
                self._found[name][step] = value  # the later row counts
                continue
            for full, plain in _numbers(name, value):
                self._found[full][step] = plain

    def history(self) -> History:
        """Return all that was read so far."""
        metrics = {name: _series(values) for name, values in self._found.items() if name != "step"}
        run, skipped = self._run, sorted(self._skipped)
        return History(run, self._label, metrics, skipped, self._unread, _best(run), _global_batch(run))


def labels(runs: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that tell them apart.

    Args:
        runs: paths that differ.
    """
    parts = [run.resolve().parts for run in runs]
    lengths = [3 if path[-2:-1] == ("earlier",) else 1 for path in parts]
    while True:
        names = ["/".join(path[-size:]) for path, size in zip(parts, lengths, strict=True)]
        doubled = [place for place, name in enumerate(names) if names.count(name) > 1]
        grown = [place for place in doubled if lengths[place] < len(parts[place])]
        if not grown:
            return names
        for place in grown:
            lengths[place] += 1


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a value, each with the name of its curve."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(f"{name}/{key}", inner)
    elif isinstance(value, list) and len(value) <= _LONGEST_LIST:
        for place, inner in enumerate(value):
            if not isinstance(inner, (list, dict)):
                yield from _numbers(f"{name}[{place}]", inner)


def _series(values: Mapping[int, float]) -> Series:
    steps = sorted(values)
    return Series(steps, [values[step] for step in steps])


def _best(run: Path) -> tuple[str, str] | None:
    try:
        rule = read_json(run / "config.json")["best"]
        metric, mode = rule["metric"], rule["mode"]
    except (TextError, KeyError, TypeError):
        return None
    return (metric, mode) if isinstance(metric, str) and isinstance(mode, str) else None


def _global_batch(run: Path) -> int | None:
    try:
        size = read_json(run / "plan.json")["global_batch"]
    except (TextError, KeyError, TypeError):
        return None
    return size if isinstance(size, int) else None


def _advice(run: Path) -> str:
    """Return what to give instead."""
    inside = sorted(path.parent for path in run.glob(f"*/{METRICS}") if is_file(path))
    if not inside:
        return "Give a run's directory"
    names = ", ".join(map(str, inside[:_RUNS_NAMED]))
    return f"Give the runs in it: {names}{', ...' if len(inside) > _RUNS_NAMED else ''}"
