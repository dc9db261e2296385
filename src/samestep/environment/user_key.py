"""A key of this user's own, by which they recognise what they have written themselves."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

_BYTES = 32


def key_path() -> Path:
    """Return where the key is: in the user's state directory, as XDG calls it."""
    state = Path(os.environ.get("XDG_STATE_HOME", ""))
    folder = state if state.is_absolute() else Path.home() / ".local" / "state"
    return folder / "samestep" / "key"


def read_key() -> bytes | None:
    """Return the key; None if there is none that can be used."""
    try:
        found = key_path().read_bytes()
    except (OSError, RuntimeError):  # without a home directory, Path.home() is a RuntimeError
        return None
    return found if len(found) == _BYTES else None


def make_key() -> bytes | None:
    """Return the key, made when it is first needed; None where it cannot be kept."""
    found = read_key()
    if found is not None:
        return found
    try:
        path = key_path()
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fresh = path.with_name(f".{path.name}-{secrets.token_hex(8)}")
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(_BYTES))
        try:
            os.link(fresh, path)  # whole, and of whoever comes first
        finally:
            fresh.unlink()
    except (OSError, RuntimeError):
        return read_key()
    return read_key()
