"""Params that refer to other keys of the config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from samestep.cli import app
from samestep.config import load_config, override_config, read_config
from samestep.errors import ConfigError

GOOD: dict[str, Any] = {"task": "task.py:Good", "epochs": 3, "global_batch": 8}


def params(given: dict[str, Any], *overrides: str, **changes: Any) -> Any:
    return load_config({**GOOD, **changes, "params": given}, overrides).params


def mistakes(given: dict[str, Any], *overrides: str, **changes: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        params(given, *overrides, **changes)
    return {mistake.path: mistake.message for mistake in caught.value.mistakes}


def test_a_reference_is_the_value_with_its_type_after_overrides() -> None:
    given = {
        "total": "${epochs}", "rate": "${optimizer.lr}", "inside": [{"seed": "${seed}"}],
        "also": "${params.total}", "same": "${same}", "workers": "${loader.workers}",
    }  # fmt: skip
    found = params(given, "epochs=7", optimizer={"name": "adamw", "lr": 0.1})
    workers = load_config(GOOD).loader.workers
    assert found == {"total": 7, "rate": 0.1, "inside": [{"seed": 0}], "also": 7, "same": "bits", "workers": workers}
    assert params({}, "params.total=${epochs}") == {"total": 3}
    assert params({"total": "${epochs}"}, "params.total=5") == {"total": 5}
    assert params({"batch": "${global_batch_size}"}) == {"batch": 8}, "by its other name"


@pytest.mark.parametrize("text", ["${HOME}", "${epochs}.pt", "x${epochs}", "$epochs", "${}", "${1}"])
def test_other_texts_are_the_tasks_own(text: str) -> None:
    assert params({"path": text}) == {"path": text}


def test_what_cannot_be_referred_to_is_reported_at_once() -> None:
    found = mistakes(
        {
            "a": "${epoch}", "b": "${loader}", "c": "${steps}", "d": {"e": ["${params.zero}"]},
            "f": "${launch.environment}", "g": "${ema.decay}",
        }
    )  # fmt: skip
    assert found == {
        "params.a": "${epoch}: epoch is not a key of this config: did you mean epochs?",
        "params.b": "${loader}: loader is a section: name a key in it",
        "params.c": "${steps}: steps is not set: set it, or give the value here",
        "params.d.e.0": "${params.zero}: there is no params.zero; there are params.a, params.b, params.c, params.d, params.f, params.g",
        "params.f": "${launch.environment}: what launch holds is not for tasks",
        "params.g": "${ema.decay}: ema.decay is not set: set it, or give the value here",
    }


def test_nothing_that_was_set_is_a_value() -> None:
    assert params({"clip": "${clip.norm}"}, "clip.norm=null") == {"clip": None}


def test_circles_are_shown() -> None:
    found = mistakes({"a": "${params.b}", "b": "${params.a}", "c": {"d": "${params.c}"}})
    assert found["params.a"].endswith("leads back to itself: params.a -> params.b -> params.a")
    assert found["params.b"].endswith("leads back to itself: params.b -> params.a -> params.b")
    assert "params.c.d -> params.c" in found["params.c.d"]


def test_references_cannot_grow_without_end() -> None:
    given: dict[str, Any] = {f"p{at}": [f"${{params.p{at + 1}}}"] * 3 for at in range(40)}
    found = mistakes({**given, "p40": 1})
    assert any("more than 1,000 times" in message for message in found.values())


def test_a_value_that_is_wrong_itself_is_reported_once() -> None:
    assert mistakes({"total": "${epochs}"}, epochs="many").keys() == {"epochs"}


def test_a_config_that_is_changed_later_keeps_what_was_resolved() -> None:
    config = load_config({**GOOD, "params": {"total": "${epochs}"}})
    assert override_config(config, ["epochs=1"]).params == {"total": 3}


def test_config_show_says_which_key_a_value_is_from(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("task: task.py:Good\nepochs: 3\nglobal_batch: 8\nparams:\n  total: ${epochs}\n")
    loaded = read_config(path)
    assert loaded.origins["params"] == "line 4; total from epochs"
    done = CliRunner().invoke(app, ["show", str(path), "--json", "epochs=5"])
    assert done.exit_code == 0, done.output
    assert "total from epochs" in done.stdout
    assert '"total": 5' in done.stdout
    path.write_text(path.read_text().replace("${epochs}", "${epok}"))
    with pytest.raises(ConfigError, match=r"params\.total \(line 4\): \$\{epok\}"):
        load_config(path)
