"""Which commands a server can run. Imports next to nothing, for programs that must start fast."""

from __future__ import annotations

import sys
from typing import NamedTuple

STAND_IN = "/of-samesteps-tests/python"
"""How the path of a program ends that stands in for the interpreter."""

LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch")
OURS = ("samestep", "samestep.launch.run.plain_rank")


class Command(NamedTuple):
    """`python [-u] [-P] (-m MODULE | SCRIPT.py) ARGUMENTS`."""

    unbuffered: bool
    module: str | None
    words: list[str]
    """What follows the module, or the script and what follows it."""


def parse(argv: list[str]) -> Command:
    words = argv[1:]
    unbuffered = words[:1] == ["-u"]
    words = words[1:] if unbuffered else words
    words = words[1:] if words[:1] == ["-P"] else words
    if words[:1] == ["-m"] and len(words) > 1:
        return Command(unbuffered, words[1], words[2:])
    return Command(unbuffered, None, words)


def is_known(argv: list[str]) -> bool:
    """Whether a server can run it: our command line, torch's launchers, or somebody's script."""
    if not argv or not (argv[0] == sys.executable or argv[0].endswith(STAND_IN)):
        return False
    command = parse(argv)
    if command.module is None:
        return bool(command.words) and command.words[0].endswith(".py")
    return command.module in (*OURS, *LAUNCHERS)


def starts_others(argv: list[str]) -> bool:
    """Whether the command starts ranks."""
    _, module, words = parse(argv)
    if module != "samestep":
        return module in LAUNCHERS
    starting = (["launch"], ["resume"], ["verify"], ["cv"], ["sweep"], ["tune"])
    return words[:1] in starting or words[:2] == ["bench", "all"] or "--worlds" in words
