"""Reads a sweep's file into a checked sweep: every mistake at once, before anything starts."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from samestep.config import Config, load_config
from samestep.config.aliases import ALIASES
from samestep.config.layers import LAYER_KEYS, ONLY_IN_FILES, Layer, read_layers
from samestep.config.reference import flatten_schema, schema_keys, suggest_key
from samestep.config.secrets import without_passwords
from samestep.errors import ConfigError, Mistake, TextError
from samestep.parsing.limits import check_values, short
from samestep.parsing.plain_yaml import parse_yaml
from samestep.sweep.database import check_storage
from samestep.sweep.optuna_parts import import_optuna, part_mistakes
from samestep.sweep.placing import via_mistakes
from samestep.sweep.run_spec import override
from samestep.sweep.schema import SweepConfig
from samestep.sweep.space import Domain, parse_space

_EXAMPLE = "a sweep is a mapping with base, space and objective"


@dataclass
class SweepFile:
    """The values of a sweep's files, and what is wrong with them."""

    values: dict[str, Any]
    lines: dict[str, str] = field(default_factory=dict)
    """Where each key is set, by its dotted path."""
    mistakes: list[Mistake] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a person should know of how they were read."""

    @classmethod
    def of_mapping(cls, source: Mapping[str, Any]) -> SweepFile:
        """Return the values of a mapping, as a sweep's directory keeps them."""
        values, mistakes = with_objectives(source)
        mistakes += [Mistake(key, ONLY_IN_FILES) for key in LAYER_KEYS if key in values]
        values = {key: value for key, value in values.items() if key not in LAYER_KEYS}
        return cls(values, {}, mistakes)


def read_sweep_file(path: Path) -> SweepFile:
    """Return the values of a sweep's file and of those it names; the later wins, in sections key by key.

    Raises:
        ConfigError: if it cannot be read, or holds no keys.
    """
    try:
        stack = read_layers(path, _EXAMPLE)
    except ConfigError as error:
        # What is not YAML is shown as it is, and a storage's URL may be in it.
        shown = [replace(m, message=without_passwords(m.message)) for m in error.mistakes]
        raise ConfigError(error.source, shown) from None
    whole = SweepFile({}, {}, stack.mistakes)
    for layer in stack.layers:
        try:
            check_values(layer.values)
        except TextError as error:
            raise ConfigError(str(path.parent / layer.name), [Mistake("", str(error))]) from None
        _lay(whole, layer)
    names = [layer.name for layer in stack.layers]
    if len(names) > 1:
        whole.notes.append(f"the sweep is composed of {', '.join(names)}, of which the later wins")
    whole.notes += stack.platform_notes(lambda layer: layer.values)
    return whole


def _lay(whole: SweepFile, layer: Layer) -> None:
    values, mistakes = with_objectives(layer.values)
    whole.mistakes += [Mistake(m.path, m.message, m.origin or layer.lines.get(m.path, "")) for m in mistakes]
    if isinstance(values.get("base"), str):
        values["base"] = layer.placed(values["base"])
    for key, value in values.items():
        below = whole.values.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            value = {**below, **value}
        whole.values[key] = value
    whole.lines |= layer.lines


def with_objectives(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[Mistake]]:
    """Return the values with a list of objectives as the first one and further ones, and what is wrong with it."""
    given = values.get("objective")
    if not isinstance(given, list) or not given:
        return dict(values), []
    mistakes = []
    if "further_objectives" in values:
        mistakes.append(Mistake("objective", "further_objectives is set too: keep one of them"))
    return {**values, "objective": given[0], "further_objectives": given[1:]}, mistakes


_OURS = ("name", "run_dir", "resume", "fold", "refit", "best.metric", "best.mode", "preemption", "checkpoint.enabled")
"""Keys that a sweep sets itself for each of its runs."""
_FREE = ("params.", "optimizer.args.", "schedule.args.")


@dataclass(frozen=True)
class LoadedSweep:
    """A sweep whose own file, base and space are valid; its task has not been looked at."""

    sweep: SweepConfig
    base: Config
    source: str
    notes: tuple[str, ...] = ()
    """What a person should know of how its file was read."""


def load_sweep(
    source: Path | Mapping[str, Any], overrides: Sequence[str] = (), folder: Path | None = None, *, runs: bool = True
) -> LoadedSweep:
    """Load and check a sweep.

    Args:
        source: Its YAML or JSON file, or what one holds.
        overrides: `key=value` texts; `space.KEY={...}` sets one key of the space.
        folder: What the base's path is relative to; the file's folder if not given.
        runs: Whether it is to be run: then its sampler and pruner, which it can name, are imported.

    Raises:
        ConfigError: with every mistake at once.
        MissingExtraError: if Optuna is not installed.
    """
    import_optuna()
    name = "the sweep"
    if isinstance(source, Mapping):
        read = SweepFile.of_mapping(source)
    else:
        name, read = str(source), read_sweep_file(source)
        read.values.setdefault("name", source.resolve().parent.name if source.stem == "sweep" else source.stem)
        folder = source.resolve().parent if folder is None else folder
    values, lines = read.values, read.lines
    mistakes = [*read.mistakes, *_apply(values, overrides)]
    sweep = _validate(values, mistakes)
    base = None
    if sweep is not None:
        sweep._folder = folder or Path.cwd()
        sweep._space, wrong = parse_space(sweep.space)
        mistakes += wrong
        base, wrong = _load_base(sweep)
        mistakes += wrong
        if runs:
            mistakes += [*part_mistakes(sweep), *_storage_mistakes(sweep)]
        if base is not None:
            mistakes += [*_space_mistakes(sweep, base), *via_mistakes(sweep, base)]
    if mistakes or sweep is None or base is None:
        raise ConfigError(name, [_with_line(mistake, lines) for mistake in mistakes])
    return LoadedSweep(sweep, base, name, (*read.notes, *base.platform_notes))


def _with_line(mistake: Mistake, lines: Mapping[str, str]) -> Mistake:
    return Mistake(mistake.path, mistake.message, mistake.origin or lines.get(mistake.path, ""))


def _apply(values: dict[str, Any], overrides: Sequence[str]) -> Iterator[Mistake]:
    """Put overrides into the values; yield those that are none."""
    for text in overrides:
        key, equals, written = text.partition("=")
        if not equals or not key:
            yield Mistake(short(without_passwords(text)), "is not an override: write key=value")
            continue
        try:
            value = parse_yaml(written)
            check_values(value)
        except TextError as error:
            message = without_passwords(f"{written!r} is not a YAML value: it {error}")
            yield Mistake(key, message, "override")
            continue
        first, dot, rest = key.partition(".")
        if first in LAYER_KEYS:
            yield Mistake(key, ONLY_IN_FILES, "override")
        elif not dot:
            values[first] = value
        else:
            # A key of the space has dots itself; other sections are one level deep.
            inner = values.get(first)
            values[first] = {**(inner if isinstance(inner, dict) else {}), rest: value}


def _validate(values: Mapping[str, Any], mistakes: list[Mistake]) -> SweepConfig | None:
    """Return the sweep; with mistakes, one without the wrong values, so that all others are reported as well."""
    try:
        return SweepConfig.model_validate(values)
    except ValidationError as error:
        wrong = error.errors()
    for path in dict.fromkeys(_key_of(found) for found in wrong):
        # A value of one of several kinds is wrong by each of them.
        first, *others = (found for found in wrong if _key_of(found) == path)
        more = "".join(f"; or: {other['msg']}" for other in others)
        if not any(mistake.path == path for mistake in mistakes):
            mistakes.append(Mistake(path, f"{_message(path, first)}{more}"))
    tops = {str(found["loc"][0]) for found in wrong}
    rest = {key: value for key, value in values.items() if key not in tops}
    if "objective" in tops:
        rest["objective"] = {"metric": "val_loss"}
    try:
        return SweepConfig.model_validate(rest)
    except ValidationError:
        return None


def _key_of(found: Any) -> str:
    """Return the key that an error of pydantic is about; where that is a value, it also names the kinds that one may be
    of.
    """
    parts = [str(part) for part in found["loc"]]
    if found["type"] != "extra_forbidden":
        parts = list(takewhile(lambda part: part.replace("_", "").isalnum(), parts))
    return ".".join(parts)


def _message(path: str, found: Any) -> str:
    if found["type"] == "extra_forbidden":
        known = [key for key, _ in flatten_schema(SweepConfig)]
        near = difflib.get_close_matches(path, known, n=1, cutoff=0.5)
        return (
            f"is not a key of a sweep: did you mean {near[0]}?"
            if near
            else f"is not a key of a sweep: there are {', '.join(known)}. A value of its base is set in that file, or as space.{path}=[VALUE]"
        )
    if found["type"] == "missing":
        return "is missing: a sweep needs base, space and objective.metric"
    return f"you set {short(without_passwords(repr(found['input'])))}: {found['msg']}"


def _load_base(sweep: SweepConfig) -> tuple[Config | None, list[Mistake]]:
    try:
        config = load_config(sweep.base_path)
    except ConfigError as error:
        return None, [Mistake("base", f"{error.source}: {mistake}") for mistake in error.mistakes]
    wrong = []
    if config.task is None:
        wrong.append(Mistake("base", f"{sweep.base} names no task, which a trial trains"))
    if config.fold is not None:
        wrong.append(Mistake("base", f"{sweep.base} is of one fold: leave out its fold section"))
    if config.refit:
        wrong.append(Mistake("base", f"{sweep.base} measures nothing, by refit: leave that out"))
    rule = config.evaluation
    if rule.every_epochs is None and rule.every_steps is None:
        wrong.append(Mistake("base", f"{sweep.base} evaluates nothing: set evaluation.every_epochs"))
    return config, wrong


def _storage_mistakes(sweep: SweepConfig) -> Iterator[Mistake]:
    try:
        check_storage(sweep.storage)
    except TextError as error:
        yield Mistake("storage", str(error))


def _space_mistakes(sweep: SweepConfig, base: Config) -> Iterator[Mistake]:
    known = {*schema_keys(), *ALIASES}
    for key, domain in sweep.domains.items():
        if any(key == ours or key.startswith(f"{ours}.") for ours in _OURS):
            yield Mistake(f"space.{key}", "is what the sweep sets itself for each trial: leave it out")
        elif key not in known and not key.startswith(_FREE):
            yield Mistake(f"space.{key}", f"is not a key of a config{suggest_key(key)}")
        else:
            yield from _value_mistakes(sweep, key, domain)


def _value_mistakes(sweep: SweepConfig, key: str, domain: Domain) -> Iterator[Mistake]:
    """Values that the base does not take."""
    for value in domain.samples():
        try:
            load_config(sweep.base_path, [override(key, value)])
        except ConfigError as error:
            for mistake in error.mistakes:
                yield Mistake(f"space.{key}", f"{value!r} cannot be used: {mistake}")
