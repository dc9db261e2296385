"""One config out of several files: what a file includes lies below it, its platform's file above it.

    config/train.yaml                     config/env/kaggle.yaml
      include: common.yaml                  distributed: {world_size: 2, backend: nccl}
      platforms: {kaggle: env/kaggle.yaml}

A path is relative to the file that names it. Who reads the layers merges them, the later over the
earlier.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from samestep.environment.fact import Fact
from samestep.environment.hardware import PLATFORMS, detect_platform
from samestep.environment.variables import process_environment
from samestep.errors import ConfigError, Mistake, TextError
from samestep.parsing.files import is_file, read_text
from samestep.parsing.limits import check_text, short
from samestep.parsing.plain_yaml import LARGEST_YAML, parse_yaml

INCLUDE, BY_PLATFORM = "include", "platforms"
LAYER_KEYS = (INCLUDE, BY_PLATFORM)
"""Keys that name files. They are in no merged config: that one is whole."""
ONLY_IN_FILES = "names files that a file is composed of: write it into a file"
_MOST_LAYERS = 50


@dataclass
class Layer:
    """One file of several."""

    name: str
    """Its path as seen from the first file's folder."""
    values: dict[str, Any]
    """Without the keys that name other files."""
    lines: dict[str, str]
    """Where its keys are, by their dotted paths."""
    mistakes: list[Mistake] = field(default_factory=list)
    """Keys that are set twice."""
    platform: Fact[str] | None = None
    """Where it is for, if it is only there because this runs there."""

    def placed(self, text: str) -> str:
        """Return a path that this file names, relative to the first file's folder."""
        return os.path.join(os.path.dirname(self.name), text)  # noqa: PTH118, PTH120


@dataclass
class Stack:
    """The layers of one config, the lowest first, and what is wrong with how they are named."""

    layers: list[Layer] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    unnamed: Fact[str] | None = None
    """The platform, if files are named for others only."""

    def platform_notes(self, keys: Callable[[Layer], Iterable[str]]) -> list[str]:
        """Return what the platform that this runs on has changed, and why."""
        notes = []
        if self.unnamed is not None:
            notes.append(f"{_described(self.unnamed)}: no file is named for it")
        for layer in self.layers:
            if layer.platform is not None:
                names = short(", ".join(keys(layer))) or "nothing"
                notes.append(f"{_described(layer.platform)}: {layer.name} sets {names}")
        return notes


def read_layers(path: Path, example: str) -> Stack:
    """Return the files that make up a config.

    Args:
        example: What a file must hold, for the message if it holds no keys.

    Raises:
        ConfigError: If the first file cannot be read. Whatever is wrong with others is one of the
            mistakes, so that all are reported together.
    """
    walk = _Walk(path, example)
    try:
        if path.suffix == ".py" and path.is_file():
            raise TextError(
                "is a Python file, and a config in YAML is needed here. Scripts are run by train, launch and "
                "verify, and read by check"
            )
        if (path / "config.yaml").is_file():
            raise TextError(f"is a folder: give the file in it, {path / 'config.yaml'}")
        walk.add(path.name, ())
    except TextError as error:
        raise ConfigError(short(repr(str(path))[1:-1]), [Mistake("", str(error))]) from None
    stack = walk.stack
    if len(stack.layers) > 1:
        for layer in stack.layers:
            layer.lines = {key: f"{layer.name} {line}" for key, line in layer.lines.items()}
            layer.mistakes = [replace(m, origin=f"{layer.name} {m.origin}") for m in layer.mistakes]
    stack.mistakes += [mistake for layer in stack.layers for mistake in layer.mistakes]
    return stack


class _Walk:
    """Reads a file and all that it names, depth first."""

    def __init__(self, top: Path, example: str) -> None:
        self._folder, self._example = top.parent, example
        self._read = 0
        self._platform: Fact[str] | None = None
        self.stack = Stack()

    def add(self, name: str, way: tuple[str, ...], platform: Fact[str] | None = None) -> None:
        """Add a file's layers; raises a `TextError` if the file itself has none."""
        if name in way or _real(self._folder / name) in {_real(self._folder / n) for n in way}:
            raise TextError(f"includes itself: {' -> '.join((*way, name))}")
        self._read += 1
        if self._read > _MOST_LAYERS:
            raise TextError(f"is one file too many: a config has at most {_MOST_LAYERS}")
        layer = self._layer(name, platform)
        layer_keys = {key: layer.values.pop(key) for key in LAYER_KEYS if key in layer.values}
        for text in self._included(layer, layer_keys.get(INCLUDE, [])):
            self._add_named(INCLUDE, text, layer, (*way, name), platform)
        self.stack.layers.append(layer)
        if BY_PLATFORM in layer_keys:
            self._add_platform(layer, layer_keys[BY_PLATFORM], (*way, name))

    def _layer(self, name: str, platform: Fact[str] | None) -> Layer:
        path = self._folder / name
        text = read_text(path, LARGEST_YAML)
        # JSON may be indented with tabs, which YAML refuses; otherwise YAML reads it too.
        text = text.replace("\t", " ") if path.suffix == ".json" else text
        layer = Layer(name, {}, {}, platform=platform)
        found = parse_yaml(text, lambda root: layer.mistakes.extend(_lines(root, "", layer.lines)))
        if not isinstance(found, dict):
            raise TextError(f"holds no keys: {self._example}")
        layer.values = found
        return layer

    def _included(self, layer: Layer, given: Any) -> list[str]:
        names = given if isinstance(given, list) else [given]
        if all(isinstance(name, str) and name for name in names):
            return names
        self._wrong(INCLUDE, f"you set {_shown(given)}, but it takes a file or a list of files", layer)
        return []

    def _add_named(self, key: str, text: str, layer: Layer, way: tuple[str, ...], platform: Fact[str] | None) -> None:
        try:
            check_text(text)
            self.add(self._plain_name(layer.placed(text)), way, platform)
        except TextError as error:
            self._wrong(key, f"{short(ascii(text)[1:-1])} {error}", layer)

    def _plain_name(self, name: str) -> str:
        """Return a path without detours, unless it then leads elsewhere: behind a link, `..` may."""
        plain = os.path.normpath(name)
        same = _real(self._folder / plain) == _real(self._folder / name)
        return plain if same else name

    def _add_platform(self, layer: Layer, given: Any, way: tuple[str, ...]) -> None:
        """Add the file for the platform that this runs on; all others must be there, too."""
        if not isinstance(given, Mapping) or not given:
            takes = "such as {kaggle: env/kaggle.yaml}"
            self._wrong(BY_PLATFORM, f"you set {_shown(given)}, but it takes files, {takes}", layer)
            return
        here = self._platform = self._platform or detect_platform(process_environment())
        for platform, text in given.items():
            key = f"{BY_PLATFORM}.{short(str(platform))}"
            if platform not in PLATFORMS:
                near = get_close_matches(str(platform), PLATFORMS, n=1)
                hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PLATFORMS)}"
                self._wrong(key, f"is not a platform: {hint}", layer)
            elif not isinstance(text, str) or not text:
                self._wrong(key, f"you set {_shown(text)}, but it takes a file", layer)
            elif platform == here.value:
                self._add_named(key, text, layer, way, here)
            elif not is_file(self._folder / layer.placed(text)):
                self._wrong(key, f"{short(ascii(text)[1:-1])} is not there", layer)
        if here.value not in given:
            self.stack.unnamed = here

    def _wrong(self, key: str, message: str, layer: Layer) -> None:
        line = layer.lines.get(key, layer.lines.get(key.partition(".")[0], ""))
        self.stack.mistakes.append(Mistake(key, message, f"{layer.name} {line}".rstrip()))


def _described(platform: Fact[str]) -> str:
    return f"Platform {platform.value} ({platform.reason})"


def _real(path: Path) -> str:
    return os.path.realpath(path)  # the method raises for links that lead in a circle


def _shown(value: Any) -> str:
    return "nothing" if value is None else short(repr(value))


def _lines(node: yaml.Node | None, prefix: str, lines: dict[str, str]) -> Iterator[Mistake]:
    """Note the line of every key of a mapping; those that are set twice are mistakes."""
    if not isinstance(node, yaml.MappingNode):
        return
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            continue  # which no key can be: what reads the values says so
        path = f"{prefix}{key_node.value}"
        line = f"line {key_node.start_mark.line + 1}"
        if path in lines:
            yield Mistake(path, f"is already set on {lines[path]}: keep one of them", line)
        lines[path] = line
        yield from _lines(value_node, f"{path}.", lines)
