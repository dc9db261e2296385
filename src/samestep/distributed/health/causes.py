"""The cause of a run's end, left in the store by the first rank that knows it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from samestep.distributed.health.hang_report import Beat
from samestep.errors import SamestepError
from samestep.tracebacks import format_error

_LONGEST_TRACE = 8000


def failure_of(rank: int, host: str, error: BaseException) -> str:
    """Return a rank that fails by itself."""
    kind, first_line = type(error).__name__, next(iter(str(error).splitlines()), "")
    # The last part of its traceback, for users who cannot see the other machine's terminal.
    ours = isinstance(error, SamestepError)
    trace = "" if ours else format_error(error)[-_LONGEST_TRACE:]
    message = f"{kind}: {first_line}"
    return json.dumps({"rank": rank, "host": host, "kind": kind, "message": message, "trace": trace})


def absence_of(gone: Beat) -> str:
    """Return a rank that is gone, and cannot tell."""
    message = f"gone: it {gone.where()}"
    return json.dumps({"rank": gone.rank, "host": gone.host, "kind": "gone", "message": message})


def failed_first(cause: Mapping[str, Any]) -> str:
    """Return a cause, for people."""
    rank, host, message = (cause.get(key) for key in ("rank", "host", "message"))
    headline = f"rank {rank} on {host} failed first: {message}"
    return "\n".join(filter(None, [headline, str(cause.get("trace", "")).rstrip()]))
