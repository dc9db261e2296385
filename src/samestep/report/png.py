"""Small pictures as PNG, with nothing but the standard library."""

from __future__ import annotations

import struct
import zlib

_KINDS = {1: 0, 3: 2}
"""PNG's number for gray and for RGB, by how many bytes a pixel has."""


def png(pixels: bytes, width: int, height: int) -> bytes:
    """Return a PNG file of 8-bit gray or RGB pixels, row by row."""
    channels, rest = divmod(len(pixels), width * height)
    if rest or channels not in _KINDS:
        raise ValueError(f"{len(pixels)} bytes are no {width}x{height} pixels of 1 or 3 bytes")
    row = width * channels
    # Each row begins with its filter: none.
    rows = b"".join(b"\0" + pixels[start : start + row] for start in range(0, len(pixels), row))
    header = struct.pack(">IIBBBBB", width, height, 8, _KINDS[channels], 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    check = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check)
