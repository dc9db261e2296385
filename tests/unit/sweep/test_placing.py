"""Where trials run: options of their launches, shares of hosts, and what does not fit together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samestep.errors import ConfigError
from samestep.sweep.loading import LoadedSweep, load_sweep
from samestep.sweep.placing import allocate
from samestep.sweep.run_spec import RunSpec


def loaded(folder: Path, base: str = "", **values: Any) -> LoadedSweep:
    (folder / "base.yaml").write_text(f"task: task.py:Mine\nglobal_batch: 64\nepochs: 2\n{base}")
    given = {
        "base": "base.yaml", "space": {"params.x": {"uniform": [0, 1]}}, "objective": {"metric": "val_loss"},
        **values,
    }  # fmt: skip
    return load_sweep(given, folder=folder)


def launches(folder: Path, base: str = "", **values: Any) -> list[str]:
    """What follows the config and the run's own overrides, for each of the trials side by side."""
    found = loaded(folder, base, **{"parallel": 1, **values})
    shared = allocate(found.sweep, found.base, 20, {})
    spec = RunSpec("trial 0", Path("base.yaml"), (), Path("run"), shared.ranks, Path("asked"))
    slots = range(shared.parallel)
    words = [" ".join(shared.placed(spec, slot).words()) for slot in slots]
    return [line.replace("base.yaml ", "").replace('run_dir="run" --prune-dir asked', "*") for line in words]


def test_processes_of_this_machine_are_as_they_were(tmp_path: Path) -> None:
    assert launches(tmp_path) == ["train *"]
    assert launches(tmp_path, ranks_per_trial=2) == ["launch * --nproc 2 --via torchrun"]
    assert launches(tmp_path, via="torchrun") == ["launch * --via torchrun --nproc 1"]
    assert launches(tmp_path, via="mpirun", ranks_per_trial=2) == ["launch * --via mpirun --nproc 2"]


def test_jobs_and_steps_have_nodes_and_ranks_on_each(tmp_path: Path) -> None:
    by_key = {"via": "slurm", "ranks_per_trial": 4, "nodes_per_trial": 2}
    assert launches(tmp_path, **by_key) == ["launch * --via slurm --nodes 2 --nproc 2 --own-job"]
    gpus = "launch: {slurm: {gpus_per_node: 4}}\n"
    assert launches(tmp_path, gpus, via="srun") == ["launch * --via srun --nodes 1 --nproc 4"]
    eight = launches(tmp_path, gpus, via="srun", ranks_per_trial=8)
    assert eight == ["launch * --via srun --nodes 2 --nproc 4"]
    nodes = "distributed: {num_nodes: 3}\n"
    assert launches(tmp_path, nodes, via="srun", ranks_per_trial=3) == ["launch * --via srun --nodes 3 --nproc 1"]


def test_hosts_are_shared_out_whole_or_in_parts_with_their_own_gpus(tmp_path: Path) -> None:
    hosts = {"via": "ssh", "hosts": "a:4,b:2"}
    parts = launches(tmp_path, **hosts, ranks_per_trial=2, parallel=3)
    gpus = 'launch.environment.CUDA_VISIBLE_DEVICES="{}" '
    assert parts == [
        f"launch {gpus.format('0,1')}* --via ssh --hosts a:2",
        f"launch {gpus.format('2,3')}* --via ssh --hosts a:2",
        "launch * --via ssh --hosts b:2",
    ]
    cpus = launches(tmp_path, "distributed: {device: cpu}\n", **hosts, ranks_per_trial=2, parallel=3)
    assert cpus == [f"launch * --via ssh --hosts {host}" for host in ("a:2", "a:2", "b:2")]
    whole = {"via": "mpirun", "hosts": "a:2,b:2,c:4", "ranks_per_trial": 8}
    assert launches(tmp_path, **whole) == ["launch * --via mpirun --hosts a:2,b:2,c:4"]


def test_auto_fills_the_hosts_and_gives_slurm_a_round(tmp_path: Path) -> None:
    hosts = {"via": "ssh", "hosts": "a:4,b:2", "ranks_per_trial": 2, "parallel": "auto"}
    assert len(launches(tmp_path, **hosts)) == 3
    assert len(launches(tmp_path, via="slurm", parallel="auto", round=6)) == 6
    with pytest.raises(ConfigError, match="all is about this machine"):
        loaded(tmp_path, via="slurm", ranks_per_trial="all")


@pytest.mark.parametrize(
    ("values", "base", "message"),
    [
        ({"hosts": "a:2"}, "", "hosts: are for via: mpirun and via: ssh"),
        ({"via": "ssh"}, "", "via: ssh must know the machines"),
        ({"nodes_per_trial": 2}, "", "nodes_per_trial: is for via: slurm and via: srun"),
        (
            {"via": "slurm", "ranks_per_trial": 3, "nodes_per_trial": 2}, "",
            "ranks_per_trial: is 3, which 2 nodes cannot share evenly",
        ),
        (
            {"via": "slurm", "ranks_per_trial": 2}, "launch: {slurm: {gpus_per_node: 4}}\n",
            "makes 2 ranks on each of 1 node(s), and launch.slurm.gpus_per_node is 4",
        ),
        ({"via": "slurm"}, "launch: {slurm: {array: 0-3}}\n", "base: has launch.slurm.array"),
        ({"via": "ssh", "hosts": "a,b"}, "", "hosts need their numbers of ranks"),
        (
            {"via": "ssh", "hosts": "a:2,b:2", "ranks_per_trial": 3}, "",
            "a:2,b:2 have 4 ranks, and a trial takes 3",
        ),
        (
            {"via": "ssh", "hosts": "a:2,b:2", "ranks_per_trial": 2, "parallel": 3}, "",
            "parallel: is 3, and a:2,b:2 has places for 2 trials of 2 ranks",
        ),
        (
            {"via": "ssh", "hosts": "a:1,b:1", "ranks_per_trial": 3}, "",
            "parallel: is auto, and a:1,b:1 has places for 0 trials of 3 ranks",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_before_anything_starts(
    tmp_path: Path, values: dict[str, Any], base: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, base, **values)
    assert message in str(caught.value)
