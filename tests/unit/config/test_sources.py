"""Values with their origins: lines of a file, and overrides."""

import json

import pytest
import yaml

from samestep.config import load_config, read_config
from tests.unit.config.configs import GOOD, mistakes, rows


def test_every_value_has_its_origin(write):
    text = "task: task.py:Digits\nepochs: 3\n\nglobal_batch: 64\nloader:\n  workers: 2\n"
    found = rows(read_config(write(text), ["seed=7", "distributed.timeout=5"]))
    assert found["global_batch"] == (64, "line 4")
    assert found["loader.workers"] == (2, "line 6")
    assert found["loader.prefetch"] == (2, "default")
    assert found["seed"] == (7, "override")
    assert found["distributed.timeout"] == (5.0, "override")
    assert found["name"] == ("digits", "default")


def test_json_values_have_their_lines(write):
    found = rows(read_config(write(json.dumps(GOOD, indent=1), "digits.json")))
    assert found["global_batch"] == (64, "line 4")


def test_values_of_a_mapping_have_that_as_their_origin():
    assert rows(read_config(GOOD))["epochs"] == (3, "mapping")


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("epochs=5", "epochs", 5),
        ("same=rounding", "same", "rounding"),
        ("drop_last=true", "drop_last", True),
        ("clip.norm=1e-1", "clip.norm", 0.1),
        ("run_dir=/a=b", "run_dir", "/a=b"),
        ("loader.workers=4", "loader.workers", 4),
        ("loader={workers: 4}", "loader.workers", 4),
        ("distributed.device_ids=[1, 0]", "distributed.device_ids", (1, 0)),
        ("evaluation.every_epochs=null", "evaluation.every_epochs", None),
        ("params.width=32", "params", {"depth": 2, "width": 32}),
        ("params.depth=3", "params", {"depth": 3}),
    ],
)
def test_an_override_replaces_a_value(override, key, value):
    source = {**GOOD, "loader": {"workers": 1}, "params": {"depth": 2}}
    assert rows(read_config(source, [override]))[key][0] == value


def test_the_last_override_of_a_key_counts():
    assert load_config(GOOD, ["seed=1", "seed=2"]).seed == 2


def test_steps_can_take_the_place_of_epochs():
    config = load_config(GOOD, ["steps=10", "epochs=null"])
    assert (config.steps, config.epochs) == (10, None)


def test_an_override_replaces_a_value_that_the_file_sets_by_another_name():
    source = {"task": "task.py:Digits", "epochs": 1, "batch_size": 4}
    loaded = read_config(source, ["batch_per_rank=8"])
    assert rows(loaded)["batch_per_rank"] == (8, "override")
    renamed = read_config({**GOOD, "max_grad_norm": 1.0}, ["clip.norm=2"])
    assert rows(renamed)["clip.norm"] == (2.0, "override")


def test_an_override_may_use_another_name():
    loaded = read_config({**GOOD, "clip": {"norm": 1.0}}, ["max_grad_norm=2"])
    assert rows(loaded)["clip.norm"] == (2.0, "override as max_grad_norm")


def test_the_insides_of_free_form_keys_can_be_overridden_one_by_one():
    source = {**GOOD, "distributed": {"network": {"NCCL_DEBUG": "INFO"}}}
    config = load_config(source, ["distributed.network.NCCL_IB_DISABLE=1", "launch.environment.OMP_PROC_BIND=close"])
    assert config.distributed.network == {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1"}
    assert config.launch.environment == {"OMP_PROC_BIND": "close"}


def test_a_doubled_key_inside_a_section_is_refused_with_both_lines(write):
    text = yaml.safe_dump(GOOD) + "loader:\n  workers: 1\n  prefetch: 2\n  workers: 2\n"
    message = mistakes(write(text))["loader.workers"]
    assert "(line 7): is already set on line 5" in message
