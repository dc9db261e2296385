"""A run of Weights & Biases."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from samestep.config.trackers import WandbConfig
from samestep.errors import MissingExtraError
from samestep.tracking.contract import TrackedRun, Tracker, figure_image, figures_in, flat_values, without_figures

_LONGEST_FINISH = 300.0
"""Seconds for the upload at the end, which W&B would otherwise wait for without end."""


class WandbRun(Tracker):
    """Numbers, texts and figures over our step; files as one artifact."""

    def __init__(self, config: WandbConfig) -> None:
        try:
            import wandb
        except ImportError:
            raise MissingExtraError("trackers.wandb", "wandb") from None
        self._wandb: Any = wandb
        self._config = config
        self._run: Any = None
        self._name = ""
        self._files: dict[str, Path] = {}

    def start(self, run: TrackedRun) -> None:
        config, self._name = self._config, run.name
        number = run.id or secrets.token_hex(4)
        # What runs on several ranks writes to our own logs: W&B need not wrap the terminal.
        defaults: dict[str, Any] = {
            "project": config.project or run.name,
            "entity": config.entity,
            "group": config.group,
            "job_type": config.job_type,
            "name": run.name,
            "mode": config.mode,
            "dir": str(run.folder),
            "config": dict(run.params),
            "tags": [f"{name}={value}" for name, value in run.tags.items()],
            "settings": self._wandb.Settings(console="off", finish_timeout=_LONGEST_FINISH, finish_timeout_raises=True),
        }
        given = {name: value for name, value in defaults.items() if value is not None}
        # Before: a kill in between would leave a run at W&B that no restart continues.
        run.keep_id(number)
        self._run = self._wandb.init(**{**given, **config.args}, id=number, resume="allow")
        # W&B's own step must grow with every row; ours comes late for some of them.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, row: dict[str, Any]) -> None:
        figures = {name: self._wandb.Image(figure_image(figure)) for name, figure in figures_in(row).items()}
        self._run.log({**flat_values(without_figures(row)), **figures})

    def log_file(self, path: Path, name: str) -> None:
        self._files[name] = path

    def close(self) -> None:
        if self._files:
            artifact = self._wandb.Artifact(f"{self._run.id}-files", type="run")
            for name, path in self._files.items():
                artifact.add_file(str(path), name)
            self._run.log_artifact(artifact)
        self._run.finish()
