"""Files to start a project from: they train and verify as they are."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from samestep.config import read_config
from samestep.errors import ConfigError, LaunchError, PlanError, TextError
from samestep.parsing.python_text import parse_python

TASK = "task.py:MyTask"
"""The starter's own, which is written beside its config."""
OWN_OPTIMIZER = "task"
"""In the place of an optimizer's name: the task makes it."""
_COMMENTS_AT = 28
_OWN_TASK = "params", "hidden", "lr", "best"
"""Keys of the starter's config that only its own task knows."""


@dataclass(frozen=True)
class Answers:
    """Decisions about a new config; the defaults are those of `samestep init`."""

    name: str | None = None
    """None: the config's folder."""
    task: str = TASK
    global_batch: int = 64
    lanes: int = 8
    epochs: int = 3
    optimizer: str = OWN_OPTIMIZER
    """A class of torch.optim."""
    lr: float | None = None
    """Learning rate of the named optimizer, or of the starter's own task."""
    precision: str = "fp32"
    via: str = "torchrun"
    """What starts its ranks."""

    @property
    def is_starter(self) -> bool:
        return self.task == TASK


def write_starter(folder: Path) -> list[Path]:
    """Write a config and a task; refuses to overwrite any, and then writes none."""
    return write_config(folder / "config.yaml", Answers())


def write_config(path: Path, answers: Answers) -> list[Path]:
    """Write a commented config, and the starter's task beside it if it names that.

    Raises:
        LaunchError: a file exists already, or cannot be written.
        ConfigError: the answers make no config; nothing is left behind.
    """
    texts = {path: config_text(answers)}
    if answers.is_starter:
        texts[path.parent / "task.py"] = task_text(answers)
    return write_files(texts)


def write_files(texts: Mapping[Path, str]) -> list[Path]:
    """Write files, the first of which is a config that needs the others.

    Raises:
        LaunchError: a file exists already, or cannot be written.
        ConfigError: it is no config; nothing is left behind.
    """
    path = next(iter(texts))
    refuse_existing(list(texts))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise LaunchError(f"{path.parent} cannot be written: {error.strerror or error}") from None
    try:
        read_config(path, [], look=True).config.batch_plan(1)
    except (ConfigError, PlanError):
        for file in texts:
            file.unlink()
        raise
    return list(texts)


def refuse_existing(paths: Sequence[Path]) -> None:
    """Raise a `LaunchError` if one of the files exists."""
    taken = [path for path in paths if path.exists() or path.is_symlink()]
    if taken:
        raise LaunchError(f"{', '.join(map(str, taken))} already exist: nothing was written. Name another folder")


def config_text(answers: Answers) -> str:
    """Return the starter's config with these values."""
    text = _resource("config.yaml")
    for key in ("task", "global_batch", "lanes", "epochs", "precision"):
        text = _with_value(text, key, getattr(answers, key))
    if answers.name is not None:
        line = _line("name", answers.name, "the run's name; it is in runs/<name>")
        text = re.sub(r"(?m)^(seed: )", lambda found: line + found[0], text)
    if not answers.is_starter:
        text = re.sub(rf"(?m)^ *({'|'.join(_OWN_TASK)}):.*\n", "", text)
        text = re.sub(r"\n{3,}", "\n\n", text)
    if answers.optimizer == OWN_OPTIMIZER:
        if answers.lr is not None:
            text = re.sub(r"(?m)^  lr: .*$", f"  lr: {answers.lr:g}", text)
    else:
        text = re.sub(r"(?m)^  lr: .*\n", "", text)
        lr = "" if answers.lr is None else f", lr: {answers.lr:g}"
        pair = f"optimizer: {{name: {_scalar(answers.optimizer)}{lr}}}"
        line = _commented(pair, "in place of the task's own; docs/optimizers.md")
        text = re.sub(r"(?m)^clip: ", lambda found: line + found[0], text)
    if answers.via != "torchrun":
        pair = f"distributed: {{launch_method: {_scalar(answers.via)}}}"
        text = re.sub(r"(?m)^# distributed: .*$", pair, text)
    return text


def task_text(answers: Answers) -> str:
    """Return the starter's task; without an optimizer of its own if the config names one."""
    text = _resource("task.py.txt")
    if answers.optimizer == OWN_OPTIMIZER:
        return text
    text = re.sub(r"    def optimizers.*?\n\n", "", text, flags=re.DOTALL)
    text = text.replace("hidden=32, lr=0.01", "hidden=32")
    return text.replace("self.hidden, self.lr = hidden, lr", "self.hidden = hidden")


def makes_optimizers(task: str, folder: Path) -> bool:
    """Return whether a task of a person's own defines `optimizers`, as far as its file shows."""
    name, _, wanted = task.rpartition(":")
    try:
        tree = parse_python(folder / name)
    except TextError:
        return False  # the config's check says what is wrong with the file
    return any(
        isinstance(inner, ast.FunctionDef) and inner.name == "optimizers"
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == wanted
        for inner in node.body
    )


def _resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _with_value(text: str, key: str, value: str | int) -> str:
    """Return the text with another value in the line of a key; its comment stays."""
    found = re.search(rf"(?m)^{key}: .*?(?: +# (.*))?$", text)
    assert found is not None, f"the starter's config has {key}"
    return text[: found.start()] + _line(key, value, found[1]).rstrip("\n") + text[found.end() :]


def _line(key: str, value: str | int, comment: str | None) -> str:
    pair = f"{key}: {_scalar(value)}"
    return f"{pair}\n" if comment is None else _commented(pair, comment)


def _commented(pair: str, comment: str) -> str:
    return f"{pair + ' ':<{_COMMENTS_AT}}# {comment}\n"


def _scalar(value: str | int) -> str:
    """Return a value as YAML reads it back; text that it might take for something else is quoted."""
    plain = isinstance(value, int) or (
        re.fullmatch(r"[A-Za-z_][\w./-]*(:\w+)?", value, re.ASCII)
        and value.lower() not in ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
    )
    return str(value) if plain else json.dumps(value)
