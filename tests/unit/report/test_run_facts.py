"""What a run's directory says of how it was made."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from samestep.config import load_config
from samestep.report.run_facts import config_fact, run_facts


def test_facts_are_what_the_directory_states(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "plan.json").write_text(json.dumps({"device": "cuda", "world": 4, "samples": 9}))
    for step, torch in ((5, "old"), (10, "new")):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text(json.dumps({"versions": {"torch": torch}}))
    assert run_facts(tmp_path) == {
        "config": f"sha256 {hashlib.sha256(b'{}').hexdigest()}",
        "device": "cuda",
        "ranks": "4",
        "trained with": "torch new",
    }


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("[1")
    assert run_facts(tmp_path) == {}
    (tmp_path / "plan.json").write_text("[1]")
    assert run_facts(tmp_path) == {}


def test_the_hash_of_a_config_is_of_its_values() -> None:
    one, same, other = (load_config({"global_batch": 8, "steps": n}) for n in (1, 1, 2))
    assert config_fact(one) == config_fact(same) != config_fact(other)
