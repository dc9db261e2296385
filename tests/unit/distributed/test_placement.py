"""A section, a machine and a launcher decide where a rank runs."""

from dataclasses import replace

import pytest

from samestep.config import DistributedConfig
from samestep.distributed.placement import decide_placement
from samestep.environment.fact import Fact
from samestep.environment.hardware import Hardware
from samestep.environment.launch import LaunchFacts, detect_launch
from samestep.errors import LaunchError


def machine(gpus=0, cpus=8, backends=("nccl", "gloo")):
    return Hardware(
        device_count=gpus,
        devices=("card",) * gpus,
        cpus=Fact(cpus, "counted"),
        backends=backends,
        host="host",
        platform=Fact("local", "no variable"),
        cuda=Fact(gpus > 0, f"torch sees {gpus} GPU(s)" if gpus else "torch sees no GPU"),
    )


def launched(rank=0, world=1, local_world=None, **changes):
    here = local_world or world
    names = ("launcher", "rank", "world", "local_rank", "local_world", "node_rank", "nodes")
    facts = {
        "launcher": "torchrun",
        "rank": rank,
        "world": world,
        "local_rank": rank % here,
        "local_world": here,
        "node_rank": rank // here,
        "nodes": world // here,
        "master_addr": "n1",
        "master_port": 29500,
        "reasons": {name: f"{name} was set" for name in names},
    }
    return LaunchFacts(**{**facts, **changes})


ALONE = detect_launch({})


def refusal(config, hardware, launch):
    with pytest.raises(LaunchError) as caught:
        decide_placement(DistributedConfig(**config), hardware, launch)
    return str(caught.value)


@pytest.mark.requirement("000-G-3", "001-G-3", "004-KR-1", "004-5.1-4", "003-T2-1")
def test_a_lone_process_on_a_cpu_needs_nothing():
    placed = decide_placement(DistributedConfig(), machine(), ALONE)
    assert (placed.world.value, placed.rank.value, placed.launcher.value) == (1, 0, "none")
    assert (placed.device.value, placed.backend.value) == ("cpu", "gloo")
    assert (placed.master_addr.value, placed.master_port.value) == (None, None)


@pytest.mark.requirement(
    "000-P0-3",
    "004-1.1-4",
    "004-4.1-2",
    "002-M3-1",
    "000-P0-5",
    "000-K-2",
    "001-S1-2",
    "001-T-1",
    "001-G-3",
    "004-I-5",
    "004-1.2-1",
)
def test_auto_takes_nccl_and_the_local_ranks_gpu():
    placed = decide_placement(DistributedConfig(), machine(gpus=4), launched(6, 8, local_world=4))
    assert placed.device.value == "cuda:2"
    assert placed.backend.value == "nccl"
    assert (placed.node_rank.value, placed.nodes.value) == (1, 2)


@pytest.mark.requirement("000-K-2")
def test_auto_takes_gloo_on_a_machine_without_gpus():
    placed = decide_placement(DistributedConfig(), machine(), launched(1, 2))
    assert (placed.device.value, placed.backend.value) == ("cpu", "gloo")
    assert placed.device.reason == "torch sees no GPU"


@pytest.mark.requirement("000-P1-13")
def test_device_cpu_leaves_the_gpus_alone():
    placed = decide_placement(DistributedConfig(device="cpu"), machine(gpus=2), launched(3, 4))
    assert (placed.device.value, placed.backend.value) == ("cpu", "gloo")


def test_auto_takes_gloo_where_torch_has_no_nccl():
    placed = decide_placement(DistributedConfig(), machine(gpus=2, backends=("gloo",)), launched())
    assert (placed.device.value, placed.backend.value) == ("cuda:0", "gloo")
    assert "without nccl" in placed.backend.reason


def test_ranks_share_a_gpu_under_nccl_where_the_network_section_says_so():
    section = DistributedConfig(network={"NCCL_MULTI_RANK_GPU_ENABLE": "1"})
    placed = decide_placement(section, machine(gpus=1), launched(rank=1, world=2))
    assert (placed.device.value, placed.backend.value) == ("cuda:0", "nccl")


def test_two_ranks_share_one_gpu_under_gloo():
    devices = {
        decide_placement(DistributedConfig(backend="gloo"), machine(gpus=1), launched(rank, 2)).device.value
        for rank in (0, 1)
    }
    assert devices == {"cuda:0"}


@pytest.mark.requirement("003-T2-3", "003-T2-9")
def test_device_ids_are_given_to_the_local_ranks_in_order():
    section = DistributedConfig(device_ids=(3, 1))
    places = [decide_placement(section, machine(gpus=4), launched(rank, 2)) for rank in (0, 1)]
    assert [place.device.value for place in places] == ["cuda:3", "cuda:1"]


@pytest.mark.parametrize(
    ("section", "contradiction"),
    [
        ({"world_size": 8}, "distributed.world_size is 8 but 4 according to torchrun"),
        ({"rank": 0, "world_size": 4}, "distributed.rank is 0 but 3 according to torchrun"),
        ({"num_nodes": 4}, "distributed.num_nodes is 4 but 2 according to torchrun"),
        ({"node_rank": 0}, "distributed.node_rank is 0 but 1 according to torchrun"),
        ({"num_gpus_per_node": 4}, "distributed.num_gpus_per_node is 4 but 2 according to torchrun"),
    ],
)
def test_a_section_that_contradicts_its_launcher_is_refused(section, contradiction):
    message = refusal(section, machine(), launched(3, 4, local_world=2))
    assert contradiction in message
    assert ": auto, or launch accordingly" in message


def test_a_section_that_agrees_with_its_launcher_is_taken():
    section = DistributedConfig(world_size=4, rank=3, num_nodes=2, node_rank=1, num_gpus_per_node=2, enabled=True)
    placed = decide_placement(section, machine(), launched(3, 4, local_world=2))
    assert (placed.rank.value, placed.world.value) == (3, 4)


def test_a_world_size_of_one_needs_no_launcher():
    assert decide_placement(DistributedConfig(world_size=1), machine(), ALONE).world.value == 1


EVERYWHERE = "set MASTER_{0} or distributed.master_{1} to the same on every rank"


@pytest.mark.parametrize(
    ("section", "hardware", "launch", "words"),
    [
        ({"backend": "nccl"}, machine(), launched(0, 2), ["nccl, which needs GPUs", "set backend: gloo or auto"]),
        ({"backend": "nccl"}, machine(gpus=1, backends=("gloo",)), launched(), ["this torch is built without it: set gloo"]),
        ({"device": "cuda"}, machine(), ALONE, ["device is cuda but torch sees no GPU: set device: cpu or auto"]),
        ({}, machine(gpus=2), launched(3, 4),
         ["4 ranks on this machine but torch sees 2 GPU(s)", "Start 2 ranks, or set backend: gloo, or device: cpu"]),
        ({"device_ids": (0,)}, machine(gpus=2), launched(1, 2), ["names 1 GPUs for 2 ranks on this machine: name one per rank"]),
        ({"device_ids": (0, 5)}, machine(gpus=2), launched(0, 2), ["names GPU 5 but torch sees 2: ids run from 0 to 1"]),
        ({"world_size": 4}, machine(), ALONE,
         ["this process was started alone: use samestep launch --nproc 4, torchrun, mpirun or srun"]),
        ({"enabled": False}, machine(), launched(1, 4), ["this process is rank 1 of 4",
         "4 separate runs would write to one place. Start one process, or set enabled: auto"]),
        ({"rank": 0, "world_size": 2}, machine(), ALONE, [EVERYWHERE.format("ADDR", "addr"), EVERYWHERE.format("PORT", "port")]),
    ],
)  # fmt: skip
def test_what_cannot_be_placed_is_refused_with_the_fix(section, hardware, launch, words):
    message = refusal(section, hardware, launch)
    assert all(text in message for text in words), message


@pytest.mark.requirement("000-K-1", "001-S1-1")
def test_enabled_false_runs_alone():
    assert decide_placement(DistributedConfig(enabled=False), machine(), ALONE).world.value == 1


@pytest.mark.parametrize(("cpus", "ranks_here", "threads"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 4, 1)])
def test_the_ranks_of_a_machine_share_its_cpus(cpus, ranks_here, threads):
    launch = launched(0, 2 * ranks_here, local_world=ranks_here)
    placed = decide_placement(DistributedConfig(), machine(cpus=cpus), launch, same="rounding")
    assert placed.threads.value == threads
    assert placed.shares_cpus


@pytest.mark.requirement("002-M1-1")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("cpus", [1, 2, 64])
def test_same_bits_on_cpus_is_one_thread_whatever_the_machine(cpus, ranks):
    placed = decide_placement(DistributedConfig(), machine(cpus=cpus), launched(0, ranks))
    assert placed.threads == Fact(1, "same: bits on CPUs is one thread, whatever the machine has")
    assert not placed.shares_cpus


def test_beside_a_gpu_threads_are_a_share_of_the_cpus():
    placed = decide_placement(DistributedConfig(), machine(gpus=2, cpus=8), launched(0, 2))
    assert placed.threads.value == 4


@pytest.mark.parametrize("same", ["bits", "rounding"])
def test_threads_that_the_environment_requests_are_taken(same):
    launch = replace(launched(0, 2), threads=Fact(3, "OMP_NUM_THREADS=3"))
    placed = decide_placement(DistributedConfig(), machine(cpus=8), launch, same)
    assert placed.threads == Fact(3, "OMP_NUM_THREADS=3")
    section = DistributedConfig(threads_per_rank=5)
    assert decide_placement(section, machine(), launch, same).threads.value == 5


@pytest.mark.requirement("002-M2-4")
def test_threads_per_rank_is_taken_as_set():
    section = DistributedConfig(threads_per_rank=3)
    assert decide_placement(section, machine(), launched(0, 2)).threads == Fact(3, "set in the config")


@pytest.mark.requirement("003-T2-2", "003-T2-9", "000-P4-1")
def test_ranks_can_be_placed_by_hand():
    section = DistributedConfig(rank=5, world_size=8, num_nodes=2, master_addr="head", master_port=4000)
    placed = decide_placement(section, machine(gpus=4), ALONE)
    assert (placed.rank.value, placed.world.value) == (5, 8)
    assert (placed.local_rank.value, placed.local_world.value) == (1, 4)
    assert (placed.node_rank.value, placed.nodes.value) == (1, 2)
    assert (placed.device.value, placed.master_addr.value) == ("cuda:1", "head")


def test_a_launcher_that_does_not_say_where_rank_0_is_is_refused():
    launch = launched(0, 4, local_world=2, launcher="mpich", master_addr=None)
    message = refusal({}, machine(), launch)
    assert "master_addr is auto, but mpich gave none" in message
    assert "master_port" not in message


def test_the_sections_master_wins_over_the_launchers():
    section = DistributedConfig(master_addr="other", master_port=1234)
    placed = decide_placement(section, machine(), launched(0, 2))
    assert (placed.master_addr.value, placed.master_port.value) == ("other", 1234)


def test_every_contradiction_is_in_one_error():
    section = {"enabled": False, "world_size": 8, "device": "cuda", "backend": "nccl"}
    launch = launched(1, 4, master_addr=None)
    lines = refusal(section, machine(), launch).splitlines()
    assert [line.split()[0] for line in lines] == [
        "distributed.world_size",
        "distributed.enabled",
        "distributed.device",
        "distributed.backend",
        "distributed.master_addr",
    ]


@pytest.mark.requirement("001-S1-7", "001-S1-3")
def test_everything_that_auto_stood_for_has_a_reason():
    rows = decide_placement(DistributedConfig(), machine(gpus=2), launched(1, 2)).rows()
    assert all(key.startswith("distributed.") for key, _, _ in rows)
    assert {key: reason for key, _, reason in rows}["distributed.rank"] == "rank was set"
    assert all(value is None or reason for _, value, reason in rows)
