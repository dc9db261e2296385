"""The command line by which a process of ours starts another one. No torch here."""

from __future__ import annotations

import sys


def interpreter_words(module: str = "samestep") -> tuple[str, ...]:
    """Return the interpreter's arguments that run a module of ours.

    Without the working directory on its path, where `-m` alone puts it first: a file named like a
    library, in a folder of anybody's, would be imported and run. The interpreter of
    `launch.python` is taken to be of this one's version.
    """
    if sys.version_info >= (3, 11):
        return ("-P", "-m", module)
    program = "from runpy import run_module as run; run"  # Python 3.10 has no -P
    return ("-c", f"import sys; del sys.path[0]; {program}({module!r}, run_name='__main__', alter_sys=True)")
