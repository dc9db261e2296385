"""Tracebacks that show a person's own frames, without those of samestep and torch between them."""

from __future__ import annotations

import sys
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from samestep.errors import SamestepError

_HEADER = "Traceback (most recent call last):\n"
_SAMESTEP = f"{Path(__file__).parent}/"


def format_error(error: BaseException) -> str:
    """Return an error's traceback with the frames of the code that samestep runs.

    Torch's frames below the last of these stay, since they name what failed. In Python's development mode
    (`python -X dev`), and for an error outside of such code, all frames are shown.
    """
    found = traceback.TracebackException.from_exception(error)
    left_out = 0 if sys.flags.dev_mode else _leave_out(found, isinstance(error, SamestepError))
    text = "".join(found.format())
    if not left_out:
        return text
    frames = "1 frame" if left_out == 1 else f"{left_out} frames"
    note = f"  ({frames} of samestep and torch left out: python -X dev shows all)\n"
    return text.replace(_HEADER, _HEADER + note, 1)


def show_own_frames() -> None:
    """Let the interpreter show errors by `format_error`, unless somebody else shows them already."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    del kind
    sys.stderr.write(format_error(error.with_traceback(trace)))


def _leave_out(found: traceback.TracebackException, is_ours: bool) -> int:
    """Remove frames from an error and those that it came from; return how many."""
    names = [frame.filename for frame in found.stack]
    own = [at for at, name in enumerate(names) if not _is_library(name)]
    left_out = 0
    if own:
        # Torch's name what failed; samestep's do where it failed itself.
        below = [at for at in range(own[-1] + 1, len(names)) if not is_ours]
        if below and not names[-1].startswith(_SAMESTEP):
            below = [at for at in below if not names[at].startswith(_SAMESTEP)]
        kept = [frame for at, frame in enumerate(found.stack) if at in own or at in below]
        left_out = len(names) - len(kept)
        found.stack[:] = kept
    earlier = (found.__cause__, None if found.__suppress_context__ else found.__context__)
    return left_out + sum(_leave_out(one, False) for one in earlier if one is not None)


def _is_library(filename: str) -> bool:
    torch = find_spec("torch")  # finds it without an import
    folders = [_SAMESTEP, *([f"{Path(torch.origin).parent}/"] if torch is not None and torch.origin else [])]
    return filename.startswith(("<frozen ", *folders)) or Path(filename).name in ("runpy.py", "contextlib.py")
