"""JSON and text files that a disk or a person has changed."""

import json
import math
from pathlib import Path

import pytest

from samestep.errors import TextError
from samestep.parsing.files import LARGEST_FILE, read_text
from samestep.parsing.json_text import parse_json, read_json, read_json_lines


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not valid JSON"), ("{", "is not valid JSON"), ("{'a': 1}", "is not valid JSON"), ("9" * 5000, "is not valid JSON"),
        ("[" * 100_000 + "]" * 100_000, "nested more than 200 levels"), ("[" * 201 + "]" * 201, "nested more than 200 levels"),
        ('"\\ud800"', "half of a surrogate"), ('{"a\\u0000": 1}', "null character"), ("9" * 200, "100 digits"),
    ],
)  # fmt: skip
def test_what_is_no_value_is_one_kind_of_error(text, reason):
    with pytest.raises(TextError, match=reason):
        parse_json(text)


def test_what_we_write_is_read():
    value = {"loss": math.inf, "x": [1, None, True, -2.5e-300], "ü": "𝄞", "big": 2**63}
    assert parse_json(json.dumps(value)) == value
    assert math.isnan(parse_json("NaN"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"\xff", "is not UTF-8 text"), (b"[1", "is not valid JSON"), (None, "cannot be read: No such file")],
)
def test_a_file_that_cannot_be_read_is_the_same_kind(tmp_path, content, reason):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TextError, match=reason):
        read_json(path)


def test_a_folder_a_null_character_and_an_endless_file_are_too(tmp_path):
    with pytest.raises(TextError, match="cannot be read: Is a directory"):
        read_text(tmp_path)
    with pytest.raises(TextError, match="null character"):
        read_text(tmp_path / "a\x00b")
    with pytest.raises(TextError, match="is larger than 64 MB"):
        read_text(Path("/dev/zero"))
    assert LARGEST_FILE == 64_000_000


def test_lines_are_read_one_by_one_and_half_a_line_is_none(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 1}\n[1]\n\n\xff\n' + b"[" * 100_000 + b'\n{"b": 2}\n{"c": ')
    assert list(read_json_lines(path)) == [{"a": 1}, None, None, None, {"b": 2}, None]
    with pytest.raises(TextError, match="No such file"):
        list(read_json_lines(tmp_path / "missing"))
