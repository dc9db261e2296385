"""YAML as people mean it: a time or a date is text, and every number is a number.

Bounded: PyYAML itself would follow `&a [*a]` for ever, and 700 bytes of aliases are gigabytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml
from yaml.constructor import ConstructorError

from samestep.errors import TextError
from samestep.parsing.limits import DEEPEST, short

LARGEST_YAML = 1_000_000
"""Characters, counted as often as an alias repeats them; a value counts for ten more."""
_CORE = ("null", "bool", "int", "float", "str", "seq", "map")
_TAG = "tag:yaml.org,2002:"


class PlainLoader(yaml.SafeLoader):
    """The safe loader for values that JSON has too, with numbers as people write them.

    In YAML 1.1 `time: 12:00:00` is 43200, a number to the base of 60, `account: 0123` is 83,
    `lr: 1e-3` is text, and `tag: 2024-01-01` a date, which a checkpoint would give back as text.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open: list[str | None] = []
        """Anchors of the nodes around the current one."""
        self._size = 0
        self._sizes: dict[str, int] = {}
        """What each alias stands for, in characters."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        anchor, line = event.anchor, event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if anchor in self._open:
                raise TextError(f"contains itself by the alias *{short(anchor)} on line {line}")
            self._grow(self._sizes.get(anchor, 0))
            return super().compose_node(parent, index)
        is_scalar = isinstance(event, yaml.ScalarEvent)
        if len(self._open) >= DEEPEST and not is_scalar:
            raise TextError(f"is nested more than {DEEPEST} levels deep, on line {line}")
        before = self._size
        self._grow(10 + len(event.value) if is_scalar else 10)
        self._open.append(anchor)
        node = super().compose_node(parent, index)
        self._open.pop()
        if anchor is not None:
            self._sizes[anchor] = self._size - before
        return node

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > LARGEST_YAML:
            raise TextError(
                f"is too large: more than {LARGEST_YAML:,} characters, with ten for each value, "
                "counted as often as aliases (*) repeat them"
            )

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep=deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # How PyYAML fails at a value that its tag does not allow.
            kind, value = node.tag.removeprefix(_TAG), short(repr(node.value))
            raise ConstructorError(None, None, f"{value} is no {kind}", node.start_mark) from None


PlainLoader.yaml_constructors = {
    tag: make
    for tag, make in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix(_TAG) in _CORE
}
PlainLoader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern) for tag, pattern in found if tag.removeprefix(_TAG) not in ("int", "float", "timestamp", "value")
    ]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
PlainLoader.add_implicit_resolver(
    f"{_TAG}int",
    re.compile(r"^[-+]?(?:0b_*[01][01_]*|0o_*[0-7][0-7_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*|0|[1-9][0-9_]*)$"),
    list("-+0123456789"),
)
PlainLoader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?[0-9]+[eE][-+]?[0-9]+"
        r"|[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def parse_yaml(text: str, visit: Callable[[yaml.Node | None], None] = lambda root: None) -> Any:
    """Return the value of a YAML text; raises a `TextError` if it has none. No code in it is run.

    Its size and depth are limited; `check_values` tells which values cannot be used.

    Args:
        text: one YAML document.
        visit: gets its root as it is written, before `<<` is resolved.
    """
    if len(text) > LARGEST_YAML:
        raise TextError(f"is too large: it has {len(text):,} characters")
    try:
        loader = PlainLoader(text)
        root = loader.get_single_node()
        visit(root)
        return None if root is None else loader.construct_document(root)
    except yaml.YAMLError as error:
        message = short(" ".join(str(error).split()), 500)
        raise TextError(f"is not valid YAML: {message}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # How PyYAML fails at escapes such as "\UFFFFFFFF".
        raise TextError(f"is not valid YAML: {short(str(error))}") from None
    except RecursionError:
        raise TextError(f"is nested more than {DEEPEST} levels deep") from None
