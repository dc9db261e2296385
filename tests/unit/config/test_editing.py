"""One value put into a config file: nothing else in it changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.config.editing import preview, set_value, with_value
from samestep.errors import EditError
from samestep.foreign.plain_yaml import parse_yaml

HAND_WRITTEN = """\
# what this trains
task: task.py:MyTask        # the class

params:                     # its arguments
    # how wide
    hidden: 32
    lr: 0.01   # per step
best: {metric: accuracy, mode: max}

# loader: {workers: 2}
"""


@pytest.mark.parametrize(
    ("before", "key", "after"),
    [
        (HAND_WRITTEN, "params.lr", HAND_WRITTEN.replace("0.01 ", "0.003 ")),
        (
            HAND_WRITTEN,
            "params.warm",
            HAND_WRITTEN.replace("# per step\n", "# per step\n    warm: 0.003\n"),
        ),
        (
            HAND_WRITTEN,
            "optimizer.lr",
            HAND_WRITTEN.replace("max}\n", "max}\noptimizer:\n  lr: 0.003\n"),
        ),
        (HAND_WRITTEN, "best.min_delta", HAND_WRITTEN.replace("max}", "max, min_delta: 0.003}")),
        ("a: {lr: 1, b: 2}\n", "a.lr", "a: {lr: 0.003, b: 2}\n"),
        ("a: {}  # none\n", "a.lr", "a: {lr: 0.003}  # none\n"),
        ("a:  # none\nb: 1\n", "a.lr", "a: {lr: 0.003}  # none\nb: 1\n"),
        ("a: ~\n", "a.lr", "a: {lr: 0.003}\n"),
        ("lr:   # not yet\n", "lr", "lr: 0.003   # not yet\n"),
        ("lr: '0.1'\n", "lr", "lr: 0.003\n"),
        ("a: 1", "b.c.lr", "a: 1\nb:\n  c:\n    lr: 0.003\n"),
        ("a: 1\r\nb: 2  # x\r\n", "c.lr", "a: 1\r\nb: 2  # x\r\nc:\r\n  lr: 0.003\r\n"),
        ("---\na: [1, 2]\n...\n", "lr", "---\na: [1, 2]\nlr: 0.003\n...\n"),
        ("a: |\n  text\n\nb:\n- 1\n- c: 2\n", "lr", "a: |\n  text\n\nb:\n- 1\n- c: 2\nlr: 0.003\n"),
        ("a: {b: 1,\n    c: 2,  # why\n   }\n", "a.lr", "a: {b: 1,\n    c: 2, lr: 0.003,  # why\n   }\n"),
        ("a: {\n  b: 1,\n  c: 2\n}\n", "a.lr", "a: {\n  b: 1,\n  c: 2,\n  lr: 0.003\n}\n"),
        ("ä: 'é'  # ü\nlr: 1\n", "lr", "ä: 'é'  # ü\nlr: 0.003\n"),
    ],
)  # fmt: skip
def test_a_value_is_set_and_all_else_stays(before: str, key: str, after: str) -> None:
    assert with_value(before, key, 0.003) == after


@pytest.mark.parametrize(
    ("before", "key", "after"),
    [
        ('{"a": 1}', "lr", '{"a": 1, "lr": 0.003}'),
        ("{}", "a.lr", '{"a": {"lr": 0.003}}'),
        (
            '{\n\t"a": 1,\n\t"b": {\n\t\t"lr": 1\n\t}\n}\n',
            "b.lr",
            '{\n\t"a": 1,\n\t"b": {\n\t\t"lr": 0.003\n\t}\n}\n',
        ),
        ('{\n\t"a": 1\n}\n', "b.lr", '{\n\t"a": 1,\n\t"b": {"lr": 0.003}\n}\n'),
    ],
)
def test_json_stays_json(tmp_path: Path, before: str, key: str, after: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(before)
    set_value(path, key, 0.003)
    assert path.read_text() == after
    json.loads(after)


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        ("base: &rate 0.1\nlr: *rate\n", "lr", "line 1 holds an anchor or an alias"),
        ("a: &x {lr: 1}\nb: *x\n", "a.lr", "anchor or an alias"),
        ("a: 1\na: 2\n", "a", "without changing anything else"),
        ("lr: |\n  3\nb: 1\n", "lr", "without changing anything else"),
        ("a: {lr}\n", "a.lr", "without changing anything else"),
        ("a: 1\n", "a.lr", "lr cannot be set inside 1"),
        ("a: [1]\n", "a.lr", "lr cannot be set inside"),
        ("a: {b: 1}\n", "a", "a is a section or a list"),
        ("a: [1]\n", "a", "a is a section or a list"),
        ("- 1\n", "a", "holds no keys"),
        ("", "a", "holds no keys"),
        ("a: {b: 1\n", "a.lr", "not valid YAML"),
        ("a: 1\n---\nb: 1\n", "a", "not valid YAML"),
    ],
)
def test_what_cannot_be_done_safely_is_refused(text: str, key: str, words: str) -> None:
    with pytest.raises(EditError, match=words):
        with_value(text, key, 0.003)


@pytest.mark.parametrize("value", [1e-05, 3.2e-21, 2.5, 1e22, 7, True, None, "a: b #c", "1e-3"])
def test_every_kind_of_value_reads_back_as_it_was(value: Any) -> None:
    read = parse_yaml(with_value("a: 1\n", "lr", value))["lr"]
    assert (type(read), read) == (type(value), value)
    assert type(yaml.safe_load(with_value("a: 1\n", "lr", value))["lr"]) is type(value)


def test_a_file_is_replaced_whole_with_its_mode_and_through_links(tmp_path: Path) -> None:
    path, link = tmp_path / "real.yaml", tmp_path / "link.yaml"
    path.write_text("a: 1\r\nlr: 1\r\n", newline="")
    path.chmod(0o640)
    link.symlink_to(path)
    assert preview(link, "lr", 0.5) == {"a": 1, "lr": 0.5}
    assert path.read_bytes() == b"a: 1\r\nlr: 1\r\n"
    set_value(link, "lr", 0.5)
    assert path.read_bytes() == b"a: 1\r\nlr: 0.5\r\n"
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.yaml", "real.yaml"]


def test_a_refusal_names_the_file_and_the_way_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("lr: &x 1\n")
    with pytest.raises(EditError, match=r"config.yaml: line 1 .*Set lr: 0.5 there by hand"):
        set_value(path, "lr", 0.5)
    assert path.read_text() == "lr: &x 1\n"
    with pytest.raises(EditError, match="cannot be read: No such file"):
        set_value(tmp_path / "none.yaml", "lr", 0.5)


NAMES = st.text("abcdefgh_", min_size=1, max_size=5)
SCALARS = st.one_of(
    st.integers(), st.floats(allow_nan=False), st.booleans(), st.none(), st.text(max_size=12)
)
DOCUMENTS = st.dictionaries(
    NAMES,
    st.recursive(
        SCALARS,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(NAMES, inner, max_size=3)
        ),
        max_leaves=8,
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=300)
@given(DOCUMENTS, st.lists(NAMES, min_size=1, max_size=3), st.floats(1e-12, 1e3), st.data())
def test_any_document_gets_exactly_this_change_or_stays(
    document: dict[str, Any], keys: list[str], value: float, data: st.DataObject
) -> None:
    style = data.draw(st.sampled_from([None, False, True]))
    text = yaml.safe_dump(document, sort_keys=False, default_flow_style=style)
    key = ".".join(keys)
    before = parse_yaml(text)
    try:
        after = with_value(text, key, value)
    except EditError:
        place = before
        for name in keys[:-1]:
            place = place.get(name) if isinstance(place, dict) else place
        blocked = not isinstance(place, (dict, type(None)))
        there = place.get(keys[-1]) if isinstance(place, dict) else None
        assert blocked or isinstance(there, (dict, list)), text
        return
    expected = parse_yaml(text)
    place = expected
    for name in keys[:-1]:
        place[name] = place[name] if place.get(name) is not None else {}
        place = place[name]
    place[keys[-1]] = value
    assert parse_yaml(after) == expected


@settings(max_examples=200)
@given(
    st.lists(st.tuples(NAMES, st.sampled_from(["1", "'x'", "{a: 1}", "[1, 2]", ""])), max_size=6),
    st.lists(st.sampled_from(["", "  # remark", "   "]), min_size=7, max_size=7),
    st.booleans(),
)
def test_every_line_and_remark_of_a_hand_written_file_stays(
    entries: list[tuple[str, str]], tails: list[str], ends: bool
) -> None:
    unique = list({f"{name}{number}": v for number, (name, v) in enumerate(entries)}.items())
    lines = [f"{k}: {v}{tail}" for (k, v), tail in zip(unique, tails, strict=False)]
    lines = [
        "# head",
        "params:" + tails[-1],
        *(f"  {line}" for line in lines),
        "",
        *lines,
        "# foot",
    ]
    text = "\n".join(lines) + ("\n" if ends else "")
    after = with_value(text, "params.lr", 0.25)
    kept = after.splitlines()
    assert sum("lr: 0.25" in line for line in kept) == 1
    if unique:
        assert [line for line in kept if line != "  lr: 0.25"] == lines
    else:  # the section was empty: its own line holds the value
        assert [line.replace(" {lr: 0.25}", "") for line in kept] == lines
