"""Other projects' names for keys."""

import json

import pytest

from samestep.config import read_config
from samestep.config.aliases import ALIASES
from tests.unit.config.configs import mistakes, rows

# A value for each key that has another name, as the other project writes it.
ALIAS_VALUES = {
    "batch_per_rank": 4,
    "global_batch": 16,
    "accumulation": 2,
    "clip.norm": 1.5,
    "base_batch": 32,
    "ema.decay": 0.99,
    "precision": False,
    "evaluation.mode": "rank0",
    "resume.checkpoint": "never",
    "distributed.enabled": True,
    "distributed.backend": "gloo",
    "distributed.num_nodes": 2,
    "launch.slurm.gpus_per_node": 4,
    "distributed.find_unused_parameters": True,
    "distributed.sync_batchnorm": True,
}


CONVERTED = {"precision": "fp32"}


def lines_around(key):
    """A config with everything that `key` needs beside it, and without `key`."""
    batch = {"global_batch": [], "batch_per_rank": []}.get(key, ["batch_per_rank: 8"])
    return ["task: task.py:Digits", "epochs: 1", "same: samples", *batch]


def lines_of(path, value):
    section, _, key = path.rpartition(".")
    entry = f"{key}: {json.dumps(value)}"
    return [f"{section}:", f"  {entry}"] if section else [entry]


@pytest.mark.requirement(
    "000-K-3", "000-K-4", "000-K-5", "001-D-2", "001-S1-4", "004-4.1-1", "004-4.1-3", "001-S1-5", "004-4.1-4"
)
@pytest.mark.parametrize("alias", ALIASES)
def test_another_projects_name_is_accepted_and_reported(write, alias):
    key = ALIASES[alias]
    value = ALIAS_VALUES[key]
    lines = [*lines_around(key), *lines_of(alias, value)]
    found = rows(read_config(write("\n".join(lines))))
    assert found[key] == (CONVERTED.get(key, value), f"line {len(lines)} as {alias}")


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("alias_first", [True, False])
def test_a_key_set_by_two_names_is_refused(write, alias, alias_first):
    key = ALIASES[alias]
    names = [alias, key] if alias_first else [key, alias]
    around = lines_around(key)
    lines = [*around, *(f"{name}: {json.dumps(ALIAS_VALUES[key])}" for name in names)]
    message = mistakes(write("\n".join(lines)))[names[1]]
    assert f"line {len(lines)}" in message
    assert f"{key} is already set (line {len(around) + 1}" in message
    assert "keep one of them" in message


@pytest.mark.parametrize("section", ["distributed", "evaluation", "resume"])
def test_an_empty_section_sets_nothing(section):
    source = {"task": "t.py:T", "epochs": 1, "global_batch": 8}
    assert rows(read_config(source | {section: {}})) == rows(read_config(source))


def test_a_value_in_the_place_of_a_section_leaves_the_rest_of_it(write):
    path = write("task: t.py:T\nepochs: 1\nglobal_batch: 8\ndistributed: {backend: gloo, timeout: 9}\n")
    found = rows(read_config(path, ["distributed=true"]))
    assert found["distributed.enabled"] == (True, "override as distributed")
    assert found["distributed.timeout"] == (9.0, "line 4")
    # A mapping is the whole section, as for sections without a short form.
    found = rows(read_config(path, ["distributed={enabled: true}"]))
    assert found["distributed.backend"][0] == "auto"
