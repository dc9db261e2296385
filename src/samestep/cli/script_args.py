"""Splits a command line into options of ours and arguments of a script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

MODULE_OPTION = "-m"


def split_args(
    words: Sequence[str], options: Mapping[str, bool], takes_any: bool = False
) -> tuple[list[str], tuple[str, ...]] | None:
    """Return our words, with the script or module among them and no `--`, and the script's own; None if there is none.

    Options before the script are ours and everything behind it is the script's, as torchrun has it.
    Where the script comes first, so do our options and overrides behind it, and the script's own
    arguments start with the first word that is neither. A `--` behind nothing but words of ours ends
    them anyway.

    Args:
        takes_any: Whether the script may be one that opens no run: it has no overrides.
    """
    at = _skip_options(words, 0, options)
    if at == len(words) or words[at].startswith("-"):
        return None
    from samestep.launch.commands.rank_command import is_script

    is_module = MODULE_OPTION in words[:at]
    if not is_module and not is_script(Path(words[at])):
        return None
    behind = at + 1
    takes_overrides = not takes_any
    if takes_any and not is_module:
        from samestep.launch.commands.plain_script import opens_run  # here: a rank's start need not wait for it

        takes_overrides = opens_run(Path(words[at]))
    end = _skip_options(words, behind, options, takes_overrides)
    if end < len(words) and words[end] == "--":
        return list(words[:end]), tuple(words[end + 1 :])
    if at > 0:
        end = behind
    return list(words[:end]), tuple(words[end:])


def _skip_options(words: Sequence[str], at: int, options: Mapping[str, bool], overrides: bool = False) -> int:
    """Return where the first word is that is no option of ours, nor an override if these count."""
    while at < len(words):
        name, equals, _ = words[at].partition("=")
        if name in options:
            at = min(len(words), at + (2 if options[name] and not equals else 1))
        elif overrides and equals and not name.startswith("-"):
            at += 1
        else:
            break
    return at
