"""From a file to a config: values, and every mistake at once."""

import json

import pytest
import yaml

from samestep.config import load_config, override_config
from samestep.errors import ConfigError
from tests.unit.config.configs import GOOD, mistakes


@pytest.mark.requirement("003-T2-13", "001-D-4")
def test_yaml_json_and_a_mapping_give_the_same_config(write):
    values = {**GOOD, "name": "digits", "loader": {"workers": 2}, "params": {"layers": [1, 2]}}
    from_yaml = load_config(write(yaml.safe_dump(values)))
    from_json = load_config(write(json.dumps(values, indent=2), "digits.json"))
    given = load_config(values)
    assert from_yaml.model_dump() == from_json.model_dump() == given.model_dump()
    assert from_yaml.loader.workers == 2
    assert from_yaml.params == {"layers": [1, 2]}


def test_a_run_is_named_after_its_file_or_its_folder(write, tmp_path):
    text = yaml.safe_dump(GOOD)
    assert load_config(write(text, "small.yaml")).name == "small"
    assert load_config(write(text, "config.yaml")).name == tmp_path.name
    assert load_config(write(text + "name: mine\n", "config.yaml")).name == "mine"


def test_a_script_in_a_configs_place_is_named_as_one(write):
    with pytest.raises(ConfigError, match="is a Python file, and a config in YAML is needed here"):
        load_config(write("class Net: ...\n", "train.py"))


def test_paths_are_relative_to_the_configs_folder(write, tmp_path):
    assert load_config(write(yaml.safe_dump(GOOD))).folder == tmp_path


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("epocs", "epochs"),
        ("global_bach", "global_batch"),
        ("gradient_accumulation", "grad_accumulation"),
        ("prefetch", "loader.prefetch"),
        ("loader.worker", "loader.workers"),
        ("distributed.backnd", "distributed.backend"),
        ("early_stoping", "early_stopping"),
        ("timeout", "distributed.timeout"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(key, meant):
    found = mistakes(GOOD, [f"{key}=1"])
    assert f"is not a key of this config: did you mean {meant}?" in found[key]


def test_a_key_like_no_other_points_to_the_list():
    assert "samestep show lists the keys" in mistakes({**GOOD, "zzz": 1})["zzz"]


def test_one_file_with_every_kind_of_mistake_reports_all_of_them(write):
    text = """\
epocs: 1
epochs: 2
steps: 3
global_batch: 10
precision: fp64
seed: -1
seed: -1
batch_size: 4
loader:
  workers: many
distributed:
  rank: 1
  device: cpu
  backend: nccl
"""
    with pytest.raises(ConfigError) as caught:
        load_config(write(text), ["clip.norm=0", "nonsense"])
    found = {mistake.path for mistake in caught.value.mistakes}
    assert found == {
        "epocs",
        "steps",
        "precision",
        "seed",
        "batch_per_rank",
        "loader.workers",
        "distributed.rank",
        "distributed.backend",
        "clip.norm",
        "nonsense",
    }
    assert str(caught.value).splitlines()[0].endswith("digits.yaml has 11 mistakes:")
    assert "  - precision (line 5): you set 'fp64', but it takes one of " in str(caught.value)


def test_a_loaded_config_is_changed_like_one_that_is_loaded(write, tmp_path):
    path = write("global_batch: 8\nepochs: 2\ntask: task.py:T\nema: {decay: 0.9}\n")
    overrides = ["epochs=null", "steps=3", "swa.start=0.5", "ema=null", "loader.workers=2"]
    changed = override_config(load_config(path), overrides)
    assert changed.model_dump() == load_config(path, overrides).model_dump()
    assert changed.folder == load_config(path).folder
    with pytest.raises(ConfigError, match="lanez"):
        override_config(changed, ["lanez=3"])
