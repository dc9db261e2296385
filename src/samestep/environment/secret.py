"""The secret of a launch: what arrives over the network counts only if it is signed with it.

`samestep launch` makes one for each launch and hands it to the ranks, never on a command line
and never in a file. No torch here.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from samestep.environment.variables import export
from samestep.errors import LaunchError, NotAuthentic

SECRET = "SAMESTEP_SECRET"
"""The variable that holds it, on every machine of a launch."""

_SHORTEST = 16
_DIGEST = "sha256"
_DIGEST_SIZE = 32


SHELL_SECRET = f"{SECRET}=$(od -vAn -N32 -tx1 /dev/urandom | tr -d ' \\n')\nexport {SECRET}"
"""Lines of shell that make one, each time the script runs."""


def new_secret() -> str:
    """Return a secret that nobody can guess."""
    return secrets.token_hex(32)


def receive_secret() -> None:
    """Take the secret of this launch from the first line of standard input."""
    line = b""
    while not line.endswith(b"\n") and (character := os.read(0, 1)):
        line += character
    export({SECRET: line.decode(errors="replace").strip()})


class Signer:
    """Signs the messages of one purpose, and refuses what somebody without the secret made."""

    def __init__(self, secret: str, purpose: str) -> None:
        # A key for each purpose: a message of one cannot be passed off as one of another.
        self._key = hmac.digest(secret.encode(), purpose.encode(), _DIGEST)

    def sign(self, message: bytes) -> bytes:
        """Return the message behind its signature."""
        return self._digest(message) + message

    def verified(self, signed: bytes) -> bytes:
        """Return the message of `sign`; raises `NotAuthentic` for anything else."""
        signature, message = signed[:_DIGEST_SIZE], signed[_DIGEST_SIZE:]
        if not hmac.compare_digest(signature, self._digest(message)):
            raise NotAuthentic(f"a message is not signed with this launch's secret ({SECRET})")
        return message

    def sign_text(self, place: str, text: str) -> str:
        """Return the text behind its signature, which holds at this place of a store only."""
        return self._digest(f"{place}\n{text}".encode()).hex() + text

    def verified_text(self, place: str, signed: str) -> str:
        """Return the text of `sign_text`; raises `NotAuthentic` for anything else."""
        size = 2 * _DIGEST_SIZE
        signature, text = signed[:size], signed[size:]
        expected = self._digest(f"{place}\n{text}".encode(errors="surrogateescape")).hex()
        if not hmac.compare_digest(signature.encode(errors="replace"), expected.encode()):
            raise NotAuthentic(f"{place} is not signed with this launch's secret ({SECRET})")
        return text

    def _digest(self, message: bytes) -> bytes:
        return hmac.digest(self._key, message, _DIGEST)


def signed(signer: Signer | None, message: bytes) -> bytes:
    """Return the message behind its signature, or behind none where there is no secret."""
    return bytes(_DIGEST_SIZE) + message if signer is None else signer.sign(message)


def message_of(signer: Signer | None, received: bytes) -> bytes:
    """Return the message of `signed`, checked as far as there is a secret; raises `NotAuthentic`."""
    if signer is not None:
        return signer.verified(received)
    if any(received[:_DIGEST_SIZE]):
        raise NotAuthentic(
            f"the other processes of this run have a secret, and {SECRET} is not set here: set the "
            "same one for all of them"
        )
    return claimed(received)


def claimed(received: bytes) -> bytes:
    """Return a message that may be anybody's: to name who sent it, and for nothing else."""
    return received[_DIGEST_SIZE:]


def signer_of(environ: Mapping[str, str], purpose: str) -> Signer | None:
    """Return what signs the messages of one purpose; None where no launcher and no user set a secret."""
    secret = environ.get(SECRET, "")
    if not secret:
        return None
    if len(secret) < _SHORTEST:
        raise LaunchError(
            f"{SECRET} has {len(secret)} characters, which can be guessed: set at least "
            f"{_SHORTEST}, such as the output of: openssl rand -hex 32"
        )
    return Signer(secret, purpose)


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
