"""The `distributed:` section: its environment variables and its contradictions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from samestep.config import DistributedConfig
from samestep.environment.launch import detect_launch
from samestep.errors import ConfigError

auto = st.just("auto")


booleans = st.booleans()
variables = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=5)


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
    "timeout": st.floats(0.1, 31_536_000),
    "lost_after": st.floats(5, 31_536_000),
    "on_init_failure": st.sampled_from(["fail", "fallback"]),
    "launch_method": st.sampled_from(["torchrun", "torch.distributed.launch", "slurm"]),
    "network": st.dictionaries(st.sampled_from(["NCCL_DEBUG", "GLOO_X"]), variables),
    "threads_per_rank": st.integers(1, 256) | auto,
    "lane_weights": st.none() | st.lists(st.floats(0.01, 100.0), min_size=1, max_size=8).map(tuple),
    "shard": st.sampled_from(["none", "optimizer", "weights"]),
    "shard_blocks": st.lists(st.sampled_from(["layers.*", "blocks.?"]), max_size=2).map(tuple),
    "find_unused_parameters": booleans,
    "sync_batchnorm": booleans,
    "broadcast_buffers": booleans,
    "gradient_as_bucket_view": booleans,
    "static_graph": booleans,
}


def test_the_round_trip_below_covers_every_field():
    assert SECTION_FIELDS.keys() == DistributedConfig.model_fields.keys()


@pytest.mark.requirement("003-T2-6", "003-T2-7", "003-T2-11", "003-U-1")
@given(st.fixed_dictionaries({}, optional=SECTION_FIELDS))
def test_a_section_survives_the_environment(fields):
    section = DistributedConfig(**fields)
    environ = section.to_env_dict()
    assert all(isinstance(text, str) for text in environ.values())
    assert DistributedConfig.from_env(environ) == section


@pytest.mark.parametrize("text", ["\0", "\ud800"])
@pytest.mark.parametrize("field", ["network", "master_addr"])
def test_text_that_no_environment_takes_is_refused(field, text):
    with pytest.raises(ValidationError, match=r"null character|surrogate"):
        DistributedConfig(**{field: {"NCCL_DEBUG": text} if field == "network" else text})


def test_a_default_section_sets_no_variables():
    assert DistributedConfig().to_env_dict() == {}
    assert DistributedConfig.from_env({"PATH": "/bin"}) == DistributedConfig()


@pytest.mark.requirement("003-T2-1", "003-T2-2", "003-T2-4", "003-T2-5")
def test_what_is_not_set_is_found_out_or_as_in_distributed_data_parallel():
    section = DistributedConfig()
    placed = ("enabled", "backend", "world_size", "rank", "num_nodes", "node_rank")
    met = ("num_gpus_per_node", "master_addr", "master_port")
    assert {getattr(section, name) for name in (*placed, *met)} == {"auto"}
    assert (section.device_ids, section.launch_method) == (None, "torchrun")
    assert (section.find_unused_parameters, section.broadcast_buffers) == (False, True)
    assert section.gradient_as_bucket_view is True


@pytest.mark.requirement("003-T3-7", "003-SC-2")
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


@pytest.mark.requirement("003-T2-10")
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


@pytest.mark.requirement("001-S1-6", "003-T2-12")
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


@pytest.mark.requirement("003-T2-8")
def test_validation_gives_every_reason():
    section = DistributedConfig(rank=2, device="cpu", backend="nccl", device_ids=(1, 1))
    assert [reason.split(":")[0] for reason in section.validate().reasons] == [
        "distributed.rank",
        "distributed.backend",
        "distributed.device_ids",
        "distributed.device_ids",
    ]
