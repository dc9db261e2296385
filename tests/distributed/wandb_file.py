"""Reads what W&B writes offline: its records, in LevelDB's log format."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_BLOCK, _HEADER = 32768, 7
_FULL, _FIRST, _LAST = 1, 2, 4


def _parts(data: bytes) -> Iterator[bytes]:
    """The records; W&B's own header of 7 bytes comes before the first."""
    at, record = 7, b""
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        if kind == 0:
            return
        part = data[at + _HEADER : at + _HEADER + length]
        record = part if kind in (_FULL, _FIRST) else record + part
        at += _HEADER + length
        if kind in (_FULL, _LAST):
            yield record


def records(path: Path) -> list[Any]:
    """Every record of one offline run."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for part in _parts(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(part)
        found.append(record)
    return found


def history(path: Path) -> list[dict[str, Any]]:
    """The rows of one offline run."""
    return [
        {(item.key or "/".join(item.nested_key)): json.loads(item.value_json) for item in r.history.item}
        for r in records(path)
        if r.WhichOneof("record_type") == "history"
    ]
