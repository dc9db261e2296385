"""The section on where measurements go, and what of a config they may show."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any, Literal

from pydantic import Field

from samestep.config.bounds import MOST_ENTRIES
from samestep.config.launch import Line
from samestep.config.optim import Section
from samestep.config.secrets import is_secret, without_passwords, without_values
from samestep.errors import Mistake


class WandbConfig(Section):
    """A run of Weights & Biases. Its key is W&B's own: `wandb login`, or WANDB_API_KEY."""

    project: Line | None = Field(None, description="W&B's project; the run's name if not set")
    entity: Line | None = Field(None, description="the user or team that it belongs to")
    group: Line | None = Field(None, description="runs that W&B shows together")
    job_type: Line | None = Field(None, description="what W&B calls the kind of run; a sweep sets sweep, trial or fold")
    mode: Literal["online", "offline"] | None = Field(
        None, description="offline writes files for `wandb sync`; WANDB_MODE if not set"
    )
    args: dict[str, Any] = Field({}, max_length=MOST_ENTRIES, description="further arguments of wandb.init")


class MlflowConfig(Section):
    """A run of MLflow."""

    uri: Line | None = Field(None, description="such as sqlite:///mlflow.db; MLFLOW_TRACKING_URI, or that, if not set")
    experiment: Line | None = Field(None, description="MLflow's experiment; the run's name if not set")
    parent: Line | None = Field(None, description="the id of the run that this one belongs to; a sweep sets it")


class TrackerClassConfig(Section):
    """A tracker of the user's own."""

    name: Line = Field(description="module:Class or FILE.py:Class, the path relative to this config")
    args: dict[str, Any] = Field({}, max_length=MOST_ENTRIES, description="keyword arguments for the class")

    @property
    def is_file(self) -> bool:
        """Return whether it names a file, and not a module."""
        return self.name.rpartition(":")[0].endswith(".py")


class TrackersConfig(Section):
    """Destinations of measurements besides metrics.jsonl."""

    tensorboard: bool = Field(False, description="also write TensorBoard events")
    csv: bool = Field(False, description="also write metrics.csv, a column for each value")
    wandb: WandbConfig | None = None
    mlflow: MlflowConfig | None = None
    classes: tuple[TrackerClassConfig, ...] = Field(
        (), max_length=MOST_ENTRIES, description="your own trackers: name (FILE.py:Class), args"
    )
    tags: dict[Line, Line] = Field(
        {}, max_length=MOST_ENTRIES, description="tags of the run, for W&B, MLflow and own trackers"
    )
    artifacts: tuple[Line, ...] = Field(
        (),
        max_length=MOST_ENTRIES,
        description="files for these trackers at the run's end: patterns in the run directory",
    )

    def mistakes(self) -> list[Mistake]:
        """Return the contradictions within this section."""
        inside = "name files of the run's directory, such as model.safetensors or checkpoints/*"
        found = [
            Mistake("trackers.artifacts", f"{pattern!r} leads elsewhere: {inside}")
            for pattern in self.artifacts
            if PurePosixPath(pattern).is_absolute() or ".." in PurePosixPath(pattern).parts
        ]
        found += [
            Mistake("trackers.classes", f"{entry.name!r} names no class: module:Class or FILE.py:Class")
            for entry in self.classes
            if not entry.name.rpartition(":")[0] or not entry.name.rpartition(":")[2].isidentifier()
        ]
        uri = None if self.mlflow is None else self.mlflow.uri
        if uri is not None and without_passwords(uri) != uri:
            message = (
                f"{without_passwords(uri)!r} holds a password, and a run's config is stored with it: write ${{NAME}} "
                "in its place, or set MLFLOW_TRACKING_PASSWORD where the run starts"
            )
            found.append(Mistake("trackers.mlflow.uri", message))
        given = {} if self.wandb is None else self.wandb.args
        return found + [
            Mistake("trackers.wandb.args", f"{name} is set by the run, which resumes: remove it")
            for name in ("id", "resume")
            if name in given
        ]


HIDDEN = "..."
"""What stands for a value that trackers must not show."""


def public_params(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a config's values by their dotted keys, as others may read them: secrets are hidden."""
    return dict(_public(document, prefix))


def may_hold_secret(document: Mapping[str, Any]) -> bool:
    """Return whether a config has a value that looks like a secret, by its name or as a URL with a password."""
    return HIDDEN in str(list(public_params(document).values()))


def _public(document: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        key = f"{prefix}{name}"
        value = without_values(key, value)
        if isinstance(value, Mapping):
            yield from _public(value, f"{key}.")
        else:
            yield key, _public_value(str(name), value)


def _public_value(name: str, value: Any) -> Any:
    if isinstance(value, str):
        return HIDDEN if is_secret(name, value) else value
    if isinstance(value, Mapping):
        return {inner: _public_value(str(inner), found) for inner, found in value.items()}
    if isinstance(value, (list, tuple)):
        return [_public_value(name, entry) for entry in value]
    return value
