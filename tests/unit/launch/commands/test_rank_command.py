"""The words of a rank's command."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.config import load_config
from samestep.environment.interpreter import interpreter_words
from samestep.launch.commands.rank_command import RankCommand, is_script

CONFIG = load_config({"global_batch": 8, "epochs": 1})


def test_a_scripts_own_arguments_come_last() -> None:
    command = RankCommand(CONFIG, Path("loop.py"), ("seed=3",), Path("r"), 5, ("--seed", "a b"), Path("t"), 4)
    ours = ("loop.py", "seed=3", "--record", "r", "--stop-after", "5", "--trace", "t", "--trace-from", "4")
    assert command.train("--launched") == (*interpreter_words(), "train", *ours, "--launched", "--", "--seed", "a b")
    assert command.launch()[: len(interpreter_words()) + 1] == (*interpreter_words(), "launch")


def test_a_rank_may_be_another_command_with_options_of_its_own() -> None:
    command = RankCommand(CONFIG, Path("a.yaml"), ("seed=3",), command="lanes", options=("--x", "1"))
    words = (*interpreter_words(), "lanes", "a.yaml", "seed=3")
    assert command.train("--launched") == (*words, "--x", "1", "--launched")
    more = command.with_overrides("seed=4")
    assert more.config.seed == 4
    assert more.train() == (*words, "seed=4", "--x", "1")


def test_a_config_has_no_arguments() -> None:
    assert RankCommand(CONFIG, Path("-a.yaml")).train() == (*interpreter_words(), "train", "./-a.yaml")


@pytest.mark.parametrize(("name", "script"), [("a.py", True), ("a.yaml", False), ("py", False)])
def test_a_script_is_known_by_its_name(name: str, script: bool) -> None:
    assert is_script(Path(name)) is script
