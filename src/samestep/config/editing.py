"""Sets one value in a YAML or JSON file; every comment and the layout stay as they are.

The value is spliced into the text at the place where PyYAML reports its node. A round trip with
ruamel.yaml (0.19) is no substitute: it keeps most comments, but it drops those inside a flow
mapping of several lines, indents every section alike, joins flow lines, turns CRLF into LF, drops
`---`, and writes unquoted keys into JSON.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from samestep.errors import EditError, TextError
from samestep.foreign.files import read_text
from samestep.foreign.plain_yaml import LARGEST_YAML, first_anchor, parse_yaml

Scalar = bool | int | float | str | None
_NULL = "tag:yaml.org,2002:null"
_INDENT = 2


def set_value(path: Path, key: str, value: Scalar) -> None:
    """Set one value in a config file. The file is replaced atomically, or left as it is.

    Args:
        path: a YAML or JSON file.
        key: the dotted key, such as `optimizer.lr`; missing sections are added.
        value: the new value.

    Raises:
        EditError: if the key cannot be set without changing anything else, with the reason.

    Example:
        >>> set_value(Path("config.yaml"), "optimizer.lr", 3e-4)
    """
    text, _ = _edit(path, key, value)
    target = path.resolve()  # replaces the file that a link points to, not the link
    partial = target.with_name(f".{target.name[:100]}-{secrets.token_hex(8)}.partial")
    try:
        with partial.open("w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, partial)
        os.replace(partial, target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise EditError(f"{path} cannot be written: {error.strerror or error}") from None


def preview(path: Path, key: str, value: Scalar) -> dict[str, Any]:
    """The content of the file with `section.key` set; raises what `set_value` would raise."""
    return _edit(path, key, value)[1]


def _edit(path: Path, key: str, value: Scalar) -> tuple[str, dict[str, Any]]:
    try:
        text = read_text(path, LARGEST_YAML)
    except TextError as error:
        raise EditError(f"{path} {error}") from None
    is_json = path.suffix == ".json"
    try:
        edited = with_value(text, key, value, is_json)
    except EditError as error:
        raise EditError(f"{path}: {error}. Set {key}: {_written(value)} there by hand") from None
    return edited, parse_yaml(_readable(edited, is_json))


def with_value(text: str, key: str, value: Scalar, is_json: bool = False) -> str:
    """The text with one value set and nothing else changed.

    Args:
        text: the content of a YAML or JSON file.
        key: the dotted key.
        value: the new value.
        is_json: whether the text must stay JSON.

    Raises:
        EditError: if that is not possible.
    """
    keys = key.split(".")
    readable = _readable(text, is_json)
    roots: list[yaml.Node | None] = []
    try:
        _refuse_anchors(readable)
        before = parse_yaml(readable, roots.append)
    except TextError as error:
        raise EditError(f"it {error}") from None
    root = roots[0]
    if not isinstance(root, yaml.MappingNode):
        raise EditError("it holds no keys")
    expected = _with_change(before, keys, value)
    edited = _Splicer(text, root, is_json).splice(keys, value)
    try:
        # Types and order count as well: 1 is not true, and a key keeps its place.
        is_exact = repr(parse_yaml(_readable(edited, is_json))) == repr(expected)
    except TextError:
        is_exact = False
    if not is_exact:
        raise EditError(f"{key} cannot be set without changing anything else")
    return edited


def _readable(text: str, is_json: bool) -> str:
    """The text as a config is loaded: JSON may be indented with tabs. All positions stay."""
    return text.replace("\t", " ") if is_json else text


def _refuse_anchors(text: str) -> None:
    line = first_anchor(text)
    if line is not None:
        raise EditError(
            f"line {line} holds an anchor or an alias (& or *): one value may be used in several places"
        )


def _with_change(document: Any, keys: Sequence[str], value: Scalar) -> Any:
    first, *rest = keys
    document = {} if document is None else document
    if not isinstance(document, dict):
        raise EditError(f"{first} cannot be set inside {document!r}")
    if not rest and isinstance(document.get(first), (dict, list)):
        raise EditError(f"{first} is a section or a list, not a value")
    inner = _with_change(document.get(first), rest, value) if rest else value
    return {**document, first: inner}


def _written(value: Scalar) -> str:
    """The value as text that YAML and JSON both read; 1e-05 is a string to other YAML readers."""
    text = json.dumps(value, ensure_ascii=False)
    if isinstance(value, float) and "." not in text:
        return text.replace("e", ".0e")
    return text


class _Splicer:
    """Finds where a value is in a text, or belongs, and puts another one there."""

    def __init__(self, text: str, root: yaml.MappingNode, quotes_keys: bool) -> None:
        self._text, self._root = text, root
        self._newline = "\r\n" if "\r\n" in text else "\n"
        self._quotes_keys = quotes_keys

    def splice(self, keys: Sequence[str], value: Scalar) -> str:
        node: yaml.Node = self._root
        for depth, key in enumerate(keys):
            if not isinstance(node, yaml.MappingNode):  # an empty section: `params:`
                return self._replace(node, self._in_one_line(keys[depth:], value))
            inner = next((v for k, v in node.value if k.value == key), None)
            if inner is None:
                return self._insert(node, keys[depth:], value)
            node = inner
        return self._replace(node, _written(value))

    def _replace(self, node: yaml.Node, text: str) -> str:
        start, end = node.start_mark.index, node.end_mark.index
        space = " " if start == end and node.tag == _NULL else ""  # nothing after the colon yet
        return self._text[:start] + space + text + self._text[end:]

    def _insert(self, node: yaml.MappingNode, keys: Sequence[str], value: Scalar) -> str:
        if not node.flow_style:
            return self._insert_lines(node, keys, value)
        first, *rest = keys
        entry = f"{self._key(first)}: {self._in_one_line(rest, value)}"
        if not node.value:
            return self._at(node.start_mark.index + 1, entry)
        key, last = node.value[-1]
        place = max(key.end_mark.index, last.end_mark.index)
        start: int = key.start_mark.index
        indent = self._text[start - key.start_mark.column : start]
        # A comment after the last entry would move to the new one.
        ends_line = not self._text[place:].partition("\n")[0].strip()
        separator = f",{self._newline}{indent}" if ends_line and not indent.strip() else ", "
        return self._at(place, separator + entry)

    def _insert_lines(self, node: yaml.MappingNode, keys: Sequence[str], value: Scalar) -> str:
        column = node.value[0][0].start_mark.column
        *sections, last = keys
        lines = [
            " " * (column + _INDENT * depth) + f"{self._key(name)}:"
            for depth, name in enumerate(sections)
        ]
        indent = " " * (column + _INDENT * len(sections))
        lines.append(f"{indent}{self._key(last)}: {_written(value)}")
        place = self._line_after(node)
        missing = "" if self._text[:place].endswith("\n") else self._newline
        return self._at(place, missing + "".join(line + self._newline for line in lines))

    def _line_after(self, node: yaml.Node) -> int:
        """Where the line after a block's content starts."""
        while isinstance(node, yaml.CollectionNode) and node.value and not node.flow_style:
            last = node.value[-1]
            node = last[1] if isinstance(last, tuple) else last
        end: int = node.end_mark.index
        if end and self._text[end - 1] == "\n":  # a block scalar ends with its line
            return end
        return self._text.find("\n", end) + 1 or len(self._text)

    def _in_one_line(self, keys: Sequence[str], value: Scalar) -> str:
        if not keys:
            return _written(value)
        first, *rest = keys
        return f"{{{self._key(first)}: {self._in_one_line(rest, value)}}}"

    def _key(self, name: str) -> str:
        return json.dumps(name) if self._quotes_keys else name

    def _at(self, place: int, text: str) -> str:
        return self._text[:place] + text + self._text[place:]
