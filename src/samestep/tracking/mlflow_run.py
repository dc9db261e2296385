"""A run of MLflow."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from samestep.config.trackers import MlflowConfig
from samestep.environment.variables import process_environment
from samestep.errors import MissingExtraError
from samestep.tracking.contract import TrackedRun, Tracker, figure_image, figures_in, flat_values

_METRICS_AT_ONCE, _PARAMS_AT_ONCE, _LONGEST_PARAM = 1000, 100, 6000
"""MLflow's own limits."""
_PARENT = "mlflow.parentRunId"
"""The tag by which MLflow shows runs under another one."""
_FORBIDDEN = re.compile(r"[^\w\-. /:]")
"""In names."""

T = TypeVar("T")


def _filled(uri: str | None) -> str | None:
    """Return a URI with the values of the variables that it names."""
    if uri is None:
        return None
    environ = process_environment()
    return re.sub(r"\$\{(\w+)\}", lambda found: environ.get(found[1], found[0]), uri)


class MlflowRun(Tracker):
    """Numbers by step, the config as params, figures and files as artifacts.

    By MLflow's client: its fluent functions have one active run in a process, which is the user's.
    """

    def __init__(self, config: MlflowConfig) -> None:
        try:
            import mlflow
            import mlflow.entities
        except ImportError:
            raise MissingExtraError("trackers.mlflow", "mlflow") from None
        self._mlflow: Any = mlflow
        self._config = config
        self._client: Any = None
        self._run = ""
        self._metrics: list[Any] = []

    def start(self, run: TrackedRun) -> None:
        self._client = self._mlflow.MlflowClient(tracking_uri=_filled(self._config.uri))
        if run.id is not None:
            self._run = run.id
            # Its params stay: MLflow refuses to change one.
            self._client.update_run(self._run, status="RUNNING")
            self._set_tags(run)
            return
        name = self._config.experiment or run.name
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        self._run = self._client.create_run(experiment, run_name=run.name).info.run_id
        run.keep_id(self._run)
        self._set_tags(run)
        params = [
            self._mlflow.entities.Param(_name(key), str(value)[:_LONGEST_PARAM]) for key, value in run.params.items()
        ]
        for some in _cut(params, _PARAMS_AT_ONCE):
            self._client.log_batch(self._run, params=some)

    def _set_tags(self, run: TrackedRun) -> None:
        parent = {} if self._config.parent is None else {_PARENT: self._config.parent}
        for name, value in {**run.tags, **parent}.items():
            self._client.set_tag(self._run, name, value)

    def write(self, row: dict[str, Any]) -> None:
        now, step = int(time.time() * 1000), row["step"]
        self._metrics += [
            self._mlflow.entities.Metric(_name(name), float(value), now, step)
            for name, value in flat_values(row).items()
            if name != "step" and isinstance(value, (int, float))
        ]
        for name, figure in figures_in(row).items():
            self._client.log_image(self._run, figure_image(figure), key=_name(name), step=step)

    def log_file(self, path: Path, name: str) -> None:
        folder = Path(name).parent
        self._client.log_artifact(self._run, str(path), None if folder == Path() else folder.as_posix())

    def flush(self) -> None:
        metrics, self._metrics = self._metrics, []
        for some in _cut(metrics, _METRICS_AT_ONCE):
            self._client.log_batch(self._run, metrics=some)

    def close(self) -> None:
        self.flush()
        self._client.set_terminated(self._run)


def _name(text: str) -> str:
    """Return a name as MLflow takes it."""
    return _FORBIDDEN.sub("_", text)


def _cut(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))
