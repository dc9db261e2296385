"""What the launchers' variables mean; the fixtures were recorded under real launchers."""

from pathlib import Path

import pytest

from samestep.environment.launch import check_local_rank, detect_launch
from samestep.errors import LaunchError

RECORDED = Path(__file__).parents[2] / "fixtures" / "launch"


def recorded(name):
    lines = (RECORDED / f"{name}.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines)


FACTS = ("launcher", "rank", "world", "local_rank", "local_world", "node_rank", "nodes")


def place(launch):
    return (*(getattr(launch, fact) for fact in FACTS), launch.master_addr)


ALONE = ("none", 0, 1, 0, 1, 0, 1, None)
# launcher, rank, world, local rank, local world, node rank, nodes, master address
PLACES = {
    "torchrun_2.13_rank0": ("torchrun", 0, 1, 0, 1, 0, 1, "n1"),
    "openmpi4.1_rank0": ("openmpi", 0, 4, 0, 2, 0, 2, None),
    "openmpi4.1_rank3": ("openmpi", 3, 4, 1, 2, 1, 2, None),
    "openmpi4.1_single_rank0": ("openmpi", 0, 1, 0, 1, 0, 1, "127.0.0.1"),
    "mpich4.0_hydra_rank0": ("mpich", 0, 4, 0, 2, 0, 2, None),
    "mpich4.0_hydra_rank3": ("mpich", 3, 4, 1, 2, 1, 2, None),
    "mpich4.0_hydra_single_rank3": ("mpich", 3, 4, 3, 4, 0, 1, "127.0.0.1"),
    # Of these two, the variables that their guides name: they do not run here.
    "intelmpi2021_rank3": ("mpich", 3, 4, 1, 2, 1, 2, None),
    "mvapich2_2.3_rank5": ("mvapich2", 5, 8, 1, 4, 1, 2, None),
    "slurm_sbatch_task_rank0": ("slurm", 0, 4, 0, 2, 0, 2, "n1"),
    "slurm_sbatch_task_rank3": ("slurm", 3, 4, 1, 2, 1, 2, "n1"),
    "slurm_srun_direct_rank0": ("slurm", 0, 2, 0, 1, 0, 2, "n1"),
    "slurm_srun_direct_rank1": ("slurm", 1, 2, 0, 1, 1, 2, "n1"),
    "slurm_sbatch_batchstep": ALONE,
    "slurm_salloc": ALONE,
    "slurm_array_0_restart1": ALONE,
    "slurm_array_0_restartunset": ALONE,
    "slurm_array_1_restart1": ALONE,
}
ONLY_PMIX = {"slurm_srun_pmix_rank0", "slurm_srun_pmix_rank3"}


@pytest.mark.requirement(
    "000-P1-2", "003-U-2", "004-1.1-2", "004-5.1-2", "004-I-1", "004-I-2", "004-I-3", "004-1.1-1", "004-AO-1"
)
@pytest.mark.parametrize(("name", "expected"), PLACES.items(), ids=PLACES)
def test_a_recorded_environment_gives_the_rank_its_place(name, expected):
    launch = detect_launch(recorded(name))
    assert place(launch) == expected
    assert all(launch.reasons[fact] for fact in FACTS)


def test_every_recorded_environment_is_expected_above():
    assert {path.stem for path in RECORDED.glob("*.env")} == PLACES.keys() | ONLY_PMIX


@pytest.mark.parametrize("rank", [0, 3])
def test_pmix_beside_a_slurm_step_leaves_the_place_to_slurm(rank):
    step = recorded(f"slurm_sbatch_task_rank{rank}")
    both = {**step, **recorded(f"slurm_srun_pmix_rank{rank}")}
    assert detect_launch(both) == detect_launch(step)


@pytest.mark.parametrize("name", [name for name in PLACES if name.startswith("slurm")])
def test_only_a_slurm_step_is_a_rank(name):
    launch = detect_launch(recorded(name))
    assert launch.external == ("SLURM_STEP_ID" in recorded(name))
    if not launch.external:
        assert "srun did not start this process" in launch.reasons["rank"]


@pytest.mark.requirement("004-I-4", "004-1.2-2")
def test_an_empty_environment_is_one_process():
    launch = detect_launch({})
    assert place(launch) == ALONE
    assert launch.reasons["launcher"] == "no launcher's variables are set"


def test_a_world_of_one_needs_no_rank():
    assert place(detect_launch({"WORLD_SIZE": "1"})) == ALONE


@pytest.mark.requirement("000-P4-1")
def test_ranks_set_by_hand_are_understood():
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "29500"}
    launch = detect_launch(environ)
    assert place(launch) == ("environment", 1, 2, 1, 2, 0, 1, "head")
    assert launch.master_port == 29500


def test_an_mpich_that_names_its_local_ranks_as_pmi_does_is_understood():
    environ = {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"}
    launch = detect_launch(environ)
    assert place(launch) == ("mpich", 3, 4, 1, 2, 1, 2, None)
    assert launch.reasons["local_rank"] == "PMI_LOCAL_RANK=1"
    hydras = {**environ, "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "1"}
    assert detect_launch(hydras).local_rank == 0


def test_torchrun_inside_srun_goes_by_rank_and_not_by_slurms_task():
    torchrun = {
        "RANK": "6",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "head",
        "MASTER_PORT": "4000",
        "TORCHELASTIC_RUN_ID": "x",
    }
    launch = detect_launch({**recorded("slurm_srun_direct_rank1"), **torchrun})
    assert place(launch) == ("torchrun", 6, 8, 2, 4, 1, 2, "head")
    assert launch.master_port == 4000


def test_mpirun_inside_a_slurm_step_goes_by_mpirun():
    both = {**recorded("slurm_srun_direct_rank0"), **recorded("openmpi4.1_rank3")}
    assert place(detect_launch(both))[:3] == ("openmpi", 3, 4)


@pytest.mark.requirement("003-T1-5")
@pytest.mark.parametrize(("node", "rank", "tasks"), [(0, 1, 2), (1, 3, 2), (2, 4, 2), (3, 6, 1)])
def test_uneven_slurm_nodes_each_know_their_own_tasks(node, rank, tasks):
    environ = {
        **recorded("slurm_sbatch_task_rank0"),
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(rank - 2 * node),
        "SLURM_STEP_NUM_TASKS": "7",
        "SLURM_STEP_NUM_NODES": "4",
        "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
        "SLURM_STEP_NODELIST": "n[1-4]",
    }
    expected = ("slurm", rank, 7, rank - 2 * node, tasks, node, 4, "n1")
    assert place(detect_launch(environ)) == expected


def test_a_step_smaller_than_its_job_counts_the_steps_tasks():
    environ = {
        **recorded("slurm_sbatch_task_rank0"),
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "1",
        "SLURM_STEP_NODELIST": "n2",
    }
    assert place(detect_launch(environ)) == ("slurm", 0, 1, 0, 1, 0, 1, "n2")


@pytest.mark.parametrize(
    ("first", "last"),
    [
        ("slurm_sbatch_task_rank0", "slurm_sbatch_task_rank3"),
        ("slurm_srun_direct_rank0", "slurm_srun_direct_rank1"),
        ("openmpi4.1_rank0", "openmpi4.1_rank3"),
    ],
)
def test_all_ranks_of_one_launch_find_the_same_port(first, last):
    ports = {detect_launch(recorded(name)).master_port for name in (first, last)}
    assert len(ports) == 1
    assert 20000 <= ports.pop() < 40000


def test_two_steps_of_one_job_meet_on_different_ports():
    step = recorded("slurm_sbatch_task_rank0")
    ports = {detect_launch({**step, "SLURM_STEP_ID": n}).master_port for n in ("0", "1", "2")}
    assert len(ports) == 3


def test_master_variables_win_over_slurms_node_list():
    step = recorded("slurm_sbatch_task_rank3")
    launch = detect_launch({**step, "MASTER_ADDR": "other", "MASTER_PORT": "1234"})
    assert (launch.master_addr, launch.master_port) == ("other", 1234)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "0"}, "RANK is set but WORLD_SIZE is not.*Set WORLD_SIZE, or unset RANK"),
        (
            {"WORLD_SIZE": "4"},
            "WORLD_SIZE=4 is set but RANK is not.*Unset WORLD_SIZE for a single process.*samestep launch or torchrun",
        ),
        (
            {"RANK": "x", "WORLD_SIZE": "4"},
            "RANK is 'x', which is not a whole number.*look at what was exported before the launch",
        ),
        ({"RANK": "", "WORLD_SIZE": "4"}, "RANK is '', which is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "four"}, "WORLD_SIZE is 'four'"),
        ({"RANK": "5", "WORLD_SIZE": "4"}, "RANK=5 does not fit.*ranks run from 0 to 3"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK=-1 does not fit.*ranks run from 0 to 3"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "a"}, "LOCAL_RANK is 'a'"),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "http"}, "MASTER_PORT is 'http'"),
        ({"PMI_RANK": "0"}, "PMI_RANK is set but PMI_SIZE is not"),
        ({"OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_RANK is set but OMPI_COMM_WORLD_SIZE"),
    ],
)
def test_variables_that_contradict_themselves_are_refused(environ, message):
    with pytest.raises(LaunchError, match=message):
        detect_launch(environ)


def test_a_local_rank_argument_must_agree_with_the_launcher():
    launch = detect_launch(recorded("openmpi4.1_rank3"))
    check_local_rank(None, launch)
    check_local_rank(1, launch)
    with pytest.raises(LaunchError, match=r"--local-rank is 0 but 1 according to openmpi.*so leave it out"):
        check_local_rank(0, launch)
