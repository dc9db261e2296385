"""Tracebacks that show a person's own frames, without those of samestep and torch between them."""

from __future__ import annotations

import contextlib
import functools
import runpy
import sys
import sysconfig
import traceback
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType

from samestep.errors import SamestepError

_HEADER = "Traceback (most recent call last):\n"
_SAMESTEP = f"{Path(__file__).parent}/"


def format_error(error: BaseException) -> str:
    """Return an error's traceback with the frames of the code that samestep runs.

    Frames below the last of these stay, but for all of samestep's except the deepest. In Python's development mode
    (PYTHONDEVMODE=1), and for an error outside of such code, all frames are shown.
    """
    text, left_out = _formatted(error)
    if not left_out:
        return text
    frames = "1 frame" if left_out == 1 else f"{left_out} frames"
    note = f"  ({frames} of samestep and torch left out: PYTHONDEVMODE=1 shows all)\n"
    return text.replace(_HEADER, _HEADER + note, 1)


def show_own_frames() -> None:
    """Let the interpreter show errors by `format_error`, unless somebody else shows them already."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    error = error.with_traceback(trace)
    if sys.stderr is None or not _formatted(error)[1]:
        sys.__excepthook__(kind, error, trace)
    else:
        sys.stderr.write(format_error(error))


def _formatted(error: BaseException) -> tuple[str, int]:
    """Return an error's text, and how many frames are left out of it."""
    if not sys.flags.dev_mode:
        with contextlib.suppress(Exception):  # a report of an error must not raise another one
            found = traceback.TracebackException.from_exception(error)
            left_out = _leave_out(found, isinstance(error, SamestepError))
            return "".join(found.format()), left_out
    return "".join(traceback.format_exception(error)), 0


def _leave_out(error: traceback.TracebackException, is_ours: bool) -> int:
    """Remove frames from an error and those that it came from; return how many."""
    left_out, found, first = 0, [error], True
    while found:
        one = found.pop()
        if getattr(one, "exceptions", None):  # a group, whose errors are shown whole
            return 0
        names = [_SAMESTEP if _is_of_a_dataclass(frame) else frame.filename for frame in one.stack]
        # A file that cannot be parsed has no frame: its name is the error's.
        kept = _kept([*names, *filter(None, [getattr(one, "filename", None)])], first and is_ours)
        kept = [at for at in kept if at < len(one.stack)]
        left_out += len(one.stack) - len(kept)
        one.stack[:] = [one.stack[at] for at in kept]
        earlier = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        found += [] if earlier is None else [earlier]
        first = False
    return left_out


def _is_of_a_dataclass(frame: traceback.FrameSummary) -> bool:
    """Return whether a frame is an `__init__` that the library made: it has no file."""
    return (frame.filename, frame.name) == ("<string>", "__init__")


def _kept(names: list[str], is_ours: bool) -> list[int]:
    """Return which frames of a stack stay, by their files."""
    own = [at for at, name in enumerate(names) if not name.startswith((*_hidden(), *_others()))]
    if not own:
        return list(range(len(names)))
    kept = [at for at, name in enumerate(names) if at <= own[-1] and not name.startswith(_hidden())]
    if is_ours:  # its message says what to do
        return kept
    below = range(own[-1] + 1, len(names))
    deepest = max((at for at in below if names[at].startswith(_SAMESTEP)), default=-1)
    return [*kept, *(at for at in below if at == deepest or not names[at].startswith(_SAMESTEP))]


@functools.cache
def _hidden() -> tuple[str, ...]:
    """Files whose frames are left out, as the beginnings of their paths."""
    places = [_SAMESTEP, "<frozen ", *(str(module.__file__) for module in (runpy, contextlib))]
    with contextlib.suppress(ImportError, ValueError):
        torch = find_spec("torch")  # finds it without an import
        if torch is not None and torch.origin is not None:
            places.append(f"{Path(torch.origin).parent}/")
    return tuple(places)


@functools.cache
def _others() -> tuple[str, ...]:
    """Folders of libraries, whose frames are nobody's own, but stay between those."""
    return tuple({f"{sysconfig.get_paths()[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")})
