"""Texts as nobody should write them: values, keys and whole documents that a reader must survive."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from samestep.config.aliases import ALIASES
from samestep.config.reference import schema_keys

KEYS = (*schema_keys(), *ALIASES, "optimizer", "schedule", "loader", "ema", "swa", "zzz", "")

BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
)
MERGE_BOMB = "\n".join(
    ["a0: &a0 {x: 1, y: 2}"] + [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}" for n in range(1, 10)]
)

VALUES = (
    # Numbers that are none, or too many digits of one.
    "0x_", "0b_", "0o_", "-0x_", "0x", "1_", "1__0", "+-1", "9" * 5000, "-" + "9" * 4000, "9" * 400,
    "0x" + "f" * 5000, "1e999", "-1e999", "1e-999", ".nan", ".inf", "-.inf", "1e5", "0.5", "-1", "0",
    "1", "2", "8", "18446744073709551616", "9223372036854775807", "100000000", "²", "٣", "1:30",
    # Dates, and what looks like them.
    "2024-99-99", "2024-02-30", "2024-01-01", "0000-00-00", "2024-01-01T99:99:99Z", "12:00:00",
    "2001-12-14 21:59:43.10 -99:99", "2024-01-01T00:00:00+24:60",
    # Tags with values that they do not take.
    "!!int abc", "!!int ''", "!!int [1]", "!!int -", "!!int 1:", "!!int 0x", "!!float x", "!!float ''",
    "!!bool x", "!!bool ''", "!!null x", "!!timestamp x", "!!timestamp ''", "!!timestamp 2024-99-99",
    "!!binary x", "!!binary é", "!!binary ''", "!!binary '////'", "!!set [a]", "!!set {a}", "!!omap [a]",
    "!!omap [{a: 1}]", "!!pairs [[1]]", "!!pairs [{a: 1}]", "!!map x", "!!seq x", "!!str 1", "!!str [1]",
    "!!python/object/apply:os.system [exit]", "!!python/name:os.system", "!unknown x", "! x", "!<x> y",
    "!!merge x", "!!value x", "!!yaml x", "=", "<<",
    # Characters that no text holds, and escapes of them.
    '"\\ud800"', '"\\udfff\\ud800"', '"\\0"', '"\\x00"', '"\\UFFFFFFFF"', '"\\U00110000"', '"\\xZZ"',
    "\ud800", "\x00", "\x07", "\ufeff", "\u2028", '"a\\nb"', "'a\n\nb'", "|\n  a", ">-\n  a",
    # Nesting, anchors and aliases.
    "[" * 2000 + "]" * 2000, "{a: " * 2000 + "}" * 2000, "[" * 150, "]", "[" * 60 + "]" * 60,
    "&a [*a]", "&a {b: *a}", "&a {*a : 1}", "*a", "&a", "{<<: x}", "{<<: [x]}", "&a {<<: *a}",
    "{? [a] : b}", "{? {a: b} : c}", "{1: 2}", "{null: 1}", "{true: 1}", "{.nan: 1}", "{a: {1: 2}}",
    "{" + BOMB.replace("\n", ", ") + "}", "{" + MERGE_BOMB.replace("\n", ", ") + "}",
    # Plain ones.
    "null", "~", "true", "auto", "''", '""', "[]", "{}", "[1, 2]", "[a]", "{a: 1}", "x", "../..", "/",
    ".", "a/b", "a" * 300, "%", "#", "# x", "@x", "`x`", "? x", "- x", "a: b", "a: b: c", "---", "...",
    "--- 1\n--- 2", "%YAML 9.9\n---\nx", "%TAG ! x\n---\n!y z", "\t", "'", '"', "|", ">", "&", "*", "!",
    "[{match: x}]", "[{match: [x], lr: 1}]", "[{match: [x], zzz: 1}]", "adamw", "lbfgs", "one_cycle",
    "task.py:T", "n:1", "cosine",
)  # fmt: skip

nested: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)

values = st.one_of(
    st.sampled_from(VALUES), st.integers().map(str), st.floats().map(str), st.text(max_size=20), nested.map(json.dumps)
)

keys = st.one_of(
    st.sampled_from(KEYS),
    st.sampled_from(KEYS).map(lambda key: f"{key}.x"),
    st.sampled_from(
        ("params" + ".a" * 2000, "a" + ".a" * 2000, "optimizer.args" + ".a" * 300, ".", "..", "a..b",
         "params.", "params..a", "\ud800", "\x00", "params.\ud800", "launch.environment.\x00")
    ),
    st.text(max_size=10),
)  # fmt: skip

overrides = st.lists(
    st.one_of(st.tuples(keys, values).map("=".join), st.text(max_size=20), st.sampled_from(VALUES)), max_size=4
)


def _block(pairs: list[tuple[str, str]]) -> str:
    return "".join(f"{key}: {value}\n" for key, value in pairs)


def _nested(pairs: list[tuple[str, str]]) -> str:
    text = ""
    for key, value in pairs:
        section, _, name = key.rpartition(".")
        text += f"{section}:\n  {name}: {value}\n" if section else f"{key}: {value}\n"
    return text


GOOD = "global_batch: 8\nepochs: 1\n"

documents = st.one_of(
    st.lists(st.tuples(keys, values), max_size=4).map(lambda pairs: GOOD + _nested(pairs)),
    st.lists(st.tuples(keys, values), max_size=4).map(lambda pairs: GOOD + _block(pairs)),
    st.tuples(keys, values).map(lambda pair: GOOD + _nested([pair])),
    values,
    st.text(max_size=60),
)


def bent(document: str, data: Any) -> str:
    """A document with a piece cut out, doubled or replaced."""
    start = data.draw(st.integers(0, len(document)))
    end = data.draw(st.integers(start, min(len(document), start + 20)))
    piece = data.draw(st.one_of(st.just(""), st.just(document[start:end] * 2), st.sampled_from(VALUES)))
    return document[:start] + piece + document[end:]
