"""From a file to a config: values, where they came from, and every mistake at once."""

import json
import math

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from samestep.config import DistributedConfig, load_config, read_config
from samestep.config.aliases import ALIASES
from samestep.config.loading import describe_key, schema_keys
from samestep.config.plain_yaml import parse_yaml
from samestep.environment.launch import detect_launch
from samestep.errors import ConfigError

unhurried = settings(deadline=None)

GOOD = {"task": "task.py:Digits", "epochs": 3, "global_batch": 64}


@pytest.fixture
def write(tmp_path):
    def write_text(text, name="digits.yaml"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_text


def mistakes(source, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return {mistake.path: str(mistake) for mistake in caught.value.mistakes}


def rows(loaded):
    return {key: (value, origin) for key, value, origin in loaded.rows()}


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


def test_the_run_lives_under_its_name_unless_told():
    assert str(load_config({**GOOD, "name": "x"}).run_path) == "runs/x"
    assert str(load_config({**GOOD, "run_dir": "/data/x"}).run_path) == "/data/x"


def test_paths_are_relative_to_the_configs_folder(write, tmp_path):
    assert load_config(write(yaml.safe_dump(GOOD))).folder == tmp_path


def test_every_value_knows_where_it_came_from(write):
    text = "task: task.py:Digits\nepochs: 3\n\nglobal_batch: 64\nloader:\n  workers: 2\n"
    found = rows(read_config(write(text), ["seed=7", "distributed.timeout=5"]))
    assert found["global_batch"] == (64, "line 4")
    assert found["loader.workers"] == (2, "line 6")
    assert found["loader.prefetch"] == (2, "default")
    assert found["seed"] == (7, "override")
    assert found["distributed.timeout"] == (5.0, "override")
    assert found["name"] == ("digits", "default")


def test_json_values_know_their_lines(write):
    found = rows(read_config(write(json.dumps(GOOD, indent=1), "digits.json")))
    assert found["global_batch"] == (64, "line 4")


def test_values_of_a_mapping_say_so():
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


def test_an_override_replaces_what_the_file_says_by_another_name():
    source = {"task": "task.py:Digits", "epochs": 1, "batch_size": 4}
    loaded = read_config(source, ["batch_per_rank=8"])
    assert rows(loaded)["batch_per_rank"] == (8, "override")
    renamed = read_config({**GOOD, "max_grad_norm": 1.0}, ["clip.norm=2"])
    assert rows(renamed)["clip.norm"] == (2.0, "override")


def test_an_override_may_use_another_name():
    loaded = read_config({**GOOD, "clip": {"norm": 1.0}}, ["max_grad_norm=2"])
    assert rows(loaded)["clip.norm"] == (2.0, "override as max_grad_norm")


@pytest.mark.parametrize("override", ["epochs", "=3"])
def test_an_override_without_key_and_value_is_refused(override):
    assert "write section.key=value" in mistakes(GOOD, [override])[override]


def test_an_override_that_is_not_yaml_is_refused():
    assert "'[1' is not a YAML value" in mistakes(GOOD, ["seed=[1"])["seed"]


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


@pytest.mark.parametrize("alias", ALIASES)
def test_another_projects_name_is_taken_and_reported(write, alias):
    key = ALIASES[alias].key
    value = ALIAS_VALUES[key]
    lines = [*lines_around(key), *lines_of(alias, value)]
    found = rows(read_config(write("\n".join(lines))))
    assert found[key] == (CONVERTED.get(key, value), f"line {len(lines)} as {alias}")


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("alias_first", [True, False])
def test_a_key_set_by_two_names_is_refused(write, alias, alias_first):
    key = ALIASES[alias].key
    names = [alias, key] if alias_first else [key, alias]
    around = lines_around(key)
    lines = [*around, *(f"{name}: {json.dumps(ALIAS_VALUES[key])}" for name in names)]
    message = mistakes(write("\n".join(lines)))[names[1]]
    assert f"line {len(lines)}" in message
    assert f"{key} is already set (line {len(around) + 1}" in message
    assert "keep one of them" in message


def test_two_other_names_of_one_key_are_refused():
    source = {"task": "t.py:T", "epochs": 1, "batch_size": 4}
    doubled = {**source, "grad_accum_steps": 2, "accumulation_steps": 2}
    message = mistakes(doubled)["accumulation_steps"]
    assert "accumulation is already set (mapping as grad_accum_steps)" in message


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
    assert "samestep config show lists the keys" in mistakes({**GOOD, "zzz": 1})["zzz"]


def test_a_doubled_yaml_key_is_refused_with_both_lines(write):
    text = "task: task.py:Digits\nepochs: 1\nglobal_batch: 8\nepochs: 2\n"
    message = mistakes(write(text))["epochs"]
    assert "(line 4)" in message
    assert "is already set on line 2: keep one of them" in message


def test_a_doubled_key_inside_a_section_is_refused_with_both_lines(write):
    text = yaml.safe_dump(GOOD) + "loader:\n  workers: 1\n  prefetch: 2\n  workers: 2\n"
    message = mistakes(write(text))["loader.workers"]
    assert "(line 7): is already set on line 5" in message


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


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("epochs", 0, "you set 0, but it takes a whole number (at least 1)"),
        ("clip.norm", 0, "you set 0, but it takes a number (above 0)"),
        ("same", "bit", "you set 'bit', but it takes one of bits, rounding, samples"),
        ("drop_last", "often", "you set 'often', but it takes true or false"),
        ("loader", 3, "you set 3, but it takes a mapping"),
        ("loader.pin_memory", "no way", "it takes true or false or auto"),
        ("distributed.master_port", 70000, "(at least 1, at most 65535)"),
        ("distributed.device_ids", [0, -1], "a list of whole numbers (at least 0)"),
    ],
)
def test_a_wrong_value_is_shown_beside_what_the_key_takes(key, value, expected):
    assert expected in mistakes(GOOD, [f"{key}={json.dumps(value)}"])[key]


def test_a_config_cannot_be_changed():
    config = load_config(GOOD)
    with pytest.raises(ValidationError, match="frozen"):
        config.epochs = 9
    with pytest.raises(ValidationError, match="frozen"):
        config.distributed.rank = 0
    with pytest.raises(ValidationError, match="frozen"):
        config.loader.workers = 9


def test_the_batch_is_cut_into_eight_lanes_unless_told():
    assert load_config(GOOD).batch_plan(world=2).lanes == 8
    assert load_config({**GOOD, "lanes": 4}).batch_plan(world=2).lanes == 4


def test_a_batch_per_rank_grows_with_the_world():
    source = {"task": "t.py:T", "epochs": 1, "batch_per_rank": 4, "accumulation": 2}
    plan = load_config(source).batch_plan(world=3)
    assert (plan.global_batch, plan.lanes) == (24, 6)


def test_every_key_has_a_sentence():
    keys = schema_keys()
    assert len(keys) > 100
    for key in keys:
        assert describe_key(key)[3], key


auto = st.just("auto")
booleans = st.booleans()
SECTION_FIELDS = {
    "enabled": booleans | auto,
    "backend": st.sampled_from(["auto", "nccl", "gloo"]),
    "device": st.sampled_from(["auto", "cpu", "cuda"]),
    "world_size": st.integers(1, 10_000) | auto,
    "rank": st.integers(0, 10_000) | auto,
    "num_nodes": st.integers(1, 1000) | auto,
    "node_rank": st.integers(0, 1000) | auto,
    "num_gpus_per_node": st.integers(1, 16) | auto,
    "device_ids": st.none() | st.lists(st.integers(0, 15), max_size=8).map(tuple),
    "master_addr": st.sampled_from(["auto", "10.0.0.1", "fd00::2"])
    | st.from_regex(r"node-[0-9]{1,3}(\.local)?", fullmatch=True),
    "master_port": st.integers(1, 65535) | auto,
    "timeout": st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    "lost_after": st.floats(min_value=5, allow_infinity=False),
    "on_init_failure": st.sampled_from(["fail", "fallback"]),
    "launch_method": st.sampled_from(["torchrun", "torch.distributed.launch", "slurm"]),
    "network": st.dictionaries(st.sampled_from(["NCCL_DEBUG", "GLOO_X"]), st.text(max_size=5)),
    "threads_per_rank": st.integers(1, 256) | auto,
    "lane_weights": st.none() | st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8).map(tuple),
    "find_unused_parameters": booleans,
    "sync_batchnorm": booleans,
    "broadcast_buffers": booleans,
    "gradient_as_bucket_view": booleans,
    "static_graph": booleans,
}


def test_the_round_trip_below_covers_every_field():
    assert SECTION_FIELDS.keys() == DistributedConfig.model_fields.keys()


@unhurried
@given(st.fixed_dictionaries({}, optional=SECTION_FIELDS))
def test_a_section_survives_the_environment(fields):
    section = DistributedConfig(**fields)
    environ = section.to_env_dict()
    assert all(isinstance(text, str) for text in environ.values())
    assert DistributedConfig.from_env(environ) == section


def test_a_default_section_sets_no_variables():
    assert DistributedConfig().to_env_dict() == {}
    assert DistributedConfig.from_env({"PATH": "/bin"}) == DistributedConfig()


def test_launch_facts_go_by_the_names_every_launcher_knows():
    section = DistributedConfig(
        rank=3,
        world_size=4,
        num_nodes=2,
        node_rank=1,
        num_gpus_per_node=2,
        master_addr="n1",
        master_port=29500,
        timeout=5,
    )
    environ = section.to_env_dict()
    assert environ == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "n1",
        "MASTER_PORT": "29500",
        "SAMESTEP_DISTRIBUTED_TIMEOUT": "5.0",
    }
    launch = detect_launch(environ)
    assert (launch.rank, launch.world, launch.local_rank) == (3, 4, 1)
    assert (launch.node_rank, launch.nodes, launch.master_addr) == (1, 2, "n1")


def test_the_environment_is_the_processes_own_unless_given(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.setenv("RANK", "5")
    section = DistributedConfig.from_env()
    assert (section.world_size, section.rank) == (6, 5)


def test_a_wrong_variable_is_named():
    with pytest.raises(ConfigError, match=r"the environment has .*\n.*WORLD_SIZE: .*integer"):
        DistributedConfig.from_env({"WORLD_SIZE": "many"})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rank": 3, "world_size": 4},
        {"world_size": 4, "num_nodes": 2, "num_gpus_per_node": 2, "node_rank": 1},
        {"enabled": False, "world_size": 1},
        {"device": "cpu", "backend": "gloo"},
        {"device_ids": (1, 0)},
        {"lane_weights": (3, 1), "world_size": 2},
    ],
)
def test_a_sound_section_is_valid(fields):
    validation = DistributedConfig(**fields).validate()
    assert bool(validation) is True
    assert validation.reasons == ()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rank": 1}, "distributed.rank: you set rank 1 without world_size: set both"),
        ({"rank": 4, "world_size": 4}, "ranks run from 0 to 3"),
        ({"node_rank": 2, "num_nodes": 2}, "nodes run from 0 to 1"),
        (
            {"world_size": 4, "num_nodes": 2, "num_gpus_per_node": 4},
            "you set world_size 4, but 2 nodes x 4 ranks are 8",
        ),
        ({"enabled": False, "world_size": 2}, "set enabled: true, or world_size: 1"),
        ({"device": "cpu", "backend": "nccl"}, "set backend: gloo or device: auto"),
        ({"device_ids": (0, 0)}, "[0, 0] names a GPU twice"),
        ({"device_ids": (0,), "device": "cpu"}, "names GPUs but device is cpu"),
        ({"lane_weights": (1, 1), "world_size": 4}, "2 weights for world_size 4"),
    ],
)
def test_a_section_that_contradicts_itself_is_not_valid(fields, reason):
    validation = DistributedConfig(**fields).validate()
    assert bool(validation) is False
    assert len(validation.reasons) == 1
    assert reason in validation.reasons[0]


def test_validation_gives_every_reason():
    section = DistributedConfig(rank=2, device="cpu", backend="nccl", device_ids=(1, 1))
    assert [reason.split(":")[0] for reason in section.validate().reasons] == [
        "distributed.rank",
        "distributed.backend",
        "distributed.device_ids",
        "distributed.device_ids",
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12:00:00", "12:00:00"), ("1:30", "1:30"), ("190:20:30.15", "190:20:30.15"),
        ("1e-3", 1e-3), ("1E5", 1e5), ("-2.5e+3", -2500.0), (".5", 0.5), ("-.inf", -math.inf),
        ("1_000", 1000), ("0x1f", 31), ("012", "012"), ("0o17", 15), ("-.5", -0.5), ("-3", -3), ("true", True), ("~", None),
        ("1e5x", "1e5x"), ("1.2.3", "1.2.3"), ("[1, 2e3]", [1, 2000.0]),
    ],
)  # fmt: skip
def test_numbers_are_numbers_and_times_are_times(text, value):
    assert parse_yaml(text) == value
    assert type(parse_yaml(text)) is type(value)


def test_yaml_runs_no_code():
    with pytest.raises(yaml.YAMLError):
        parse_yaml("!!python/object/apply:os.getcwd []")


def test_the_insides_of_free_form_keys_can_be_overridden_one_by_one():
    source = {**GOOD, "distributed": {"network": {"NCCL_DEBUG": "INFO"}}}
    config = load_config(
        source, ["distributed.network.NCCL_IB_DISABLE=1", "launch.environment.OMP_PROC_BIND=close"]
    )
    assert config.distributed.network == {"NCCL_DEBUG": "INFO", "NCCL_IB_DISABLE": "1"}
    assert config.launch.environment == {"OMP_PROC_BIND": "close"}
