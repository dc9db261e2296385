"""What a valid config gives."""

import pytest
from pydantic import ValidationError

from samestep.config import load_config
from tests.unit.config.configs import GOOD


def test_the_run_directory_is_named_after_the_run_by_default():
    assert str(load_config({**GOOD, "name": "x"}).run_path) == "runs/x"
    assert str(load_config({**GOOD, "run_dir": "/data/x"}).run_path) == "/data/x"


def test_a_config_cannot_be_changed():
    config = load_config(GOOD)
    with pytest.raises(ValidationError, match="frozen"):
        config.epochs = 9
    with pytest.raises(ValidationError, match="frozen"):
        config.distributed.rank = 0
    with pytest.raises(ValidationError, match="frozen"):
        config.loader.workers = 9


def test_the_batch_is_split_into_eight_lanes_by_default():
    assert load_config(GOOD).batch_plan(world=2).lane_count == 8
    assert load_config({**GOOD, "lanes": 4}).batch_plan(world=2).lane_count == 4
