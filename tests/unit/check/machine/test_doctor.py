"""Every check of the doctor, on machines and ranks that are made up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samestep.check.machine import network
from samestep.check.machine.agreement import check_agreement
from samestep.check.machine.facts import Load, Machine, RankReport, Space, inspect_machine
from samestep.check.machine.findings import CheckReport, Finding, Place, at, merge, ok, print_report, spans, summary
from samestep.check.machine.machine import (
    GB,
    MB,
    check_backend,
    check_cpus,
    check_disk,
    check_gpus,
    check_machine,
    check_memory,
    check_numa,
    check_omp,
    check_open_files,
    check_shared_memory,
)
from samestep.check.machine.network import check_interfaces, check_master
from samestep.check.machine.planned import check_lane_cost, check_lanes, check_optim, check_plan, check_task, digest
from samestep.check.machine.ranks import check_all_reduce, check_clocks, check_sharing
from samestep.check.machine.run_checks import check_launch, run_checks
from samestep.config import Config, load_config
from samestep.distributed.probe import Reduced
from samestep.environment.fact import Fact
from samestep.environment.hardware import Hardware
from samestep.environment.interfaces import Interface, resolve
from samestep.environment.launch import detect_launch

CPU_ONLY = Hardware(
    device_count=0,
    devices=(),
    cpus=Fact(8, "counted"),
    backends=("gloo",),
    host="n1",
    platform=Fact("local", "no variable"),
    cuda=Fact(False, "torch 2.6.0 is built without CUDA"),
)
TWO_GPUS = replace(
    CPU_ONLY,
    device_count=2,
    devices=("card", "card"),
    backends=("nccl", "gloo"),
    cuda=Fact(True, "torch sees 2 GPU(s)"),
)
MACHINE = Machine(
    hardware=CPU_ONLY,
    versions={"python": "3.11.7", "torch": "2.6.0", "samestep": "0.1.0"},
    processor="x86_64 AVX2",
    cpus=tuple(range(8)),
    numa=(tuple(range(8)),),
    cpu_quota=None,
    memory=Space(32 * GB, 16 * GB),
    shared_memory=Space(8 * GB, 8 * GB),
    open_files=(1024, 4096),
    nvidia_devices=0,
    gpu_ids=(),
    interfaces=(Interface("lo", "127.0.0.1"), Interface("eth0", "10.0.0.1")),
    variables={},
)
WITH_GPUS = replace(MACHINE, hardware=TWO_GPUS, nvidia_devices=2, gpu_ids=("a", "b"))
LOAD = Load(world=2, ranks_here=2, threads=4)
TWO_NODES = Load(world=4, nodes=2, ranks_here=2, threads=4)


def with_variables(machine: Machine, **variables: str) -> Machine:
    return replace(machine, variables=variables)


def reports(*machines: Machine, load: Load = LOAD, config: str | None = None) -> list[RankReport]:
    return [RankReport(Place(rank, machine.host), machine, load, config, ()) for rank, machine in enumerate(machines)]


def named(findings: list[Finding], check: str) -> Finding:
    (finding,) = [finding for finding in findings if finding.check == check]
    return finding


def is_reported(finding: Finding, severity: str, *words: str) -> bool:
    """Everything but a fine value explains why it matters and what to do."""
    assert finding.severity == severity, finding
    assert severity == "ok" or (finding.why and finding.advice), finding
    assert all(word in finding.what for word in words), finding.what
    return True


# -- findings ------------------------------------------------------------------------------


def test_a_good_machine_is_fine_throughout() -> None:
    findings = [*check_machine(MACHINE, LOAD), check_interfaces(MACHINE, LOAD)]
    assert {finding.severity for finding in findings} == {"ok"}
    assert len({finding.check for finding in findings}) == len(findings)


def test_the_same_finding_on_several_ranks_is_one() -> None:
    warning = Finding("cpus", "warning", "too few")
    found = [
        *at([ok("launcher", "torchrun"), warning], [Place(0, "n1")]),
        *at([ok("launcher", "torchrun"), ok("cpus", "8")], [Place(1, "n2")]),
        *at([ok("launcher", "torchrun"), warning], [Place(2, "n2")]),
    ]
    merged = merge(found)
    assert [(f.check, f.what, f.ranks, f.hosts) for f in merged] == [
        ("launcher", "torchrun", (0, 1, 2), ("n1", "n2")),
        ("cpus", "too few", (0, 2), ("n1", "n2")),
        ("cpus", "8", (1,), ("n2",)),
    ]
    result = CheckReport(merged, world=3)
    assert [row[-1] for row in result.rows()] == ["all", "0, 2 on n1, n2", "1 on n2"]


def test_a_finding_that_names_its_ranks_keeps_them() -> None:
    (kept,) = at([Finding("clocks", "warning", "late", ranks=(1,))], [Place(0, "a"), Place(1, "b")])
    assert kept.ranks == (1,)


@pytest.mark.parametrize(
    ("severities", "worst", "code"),
    [
        ((), "ok", 0),
        (("ok", "note"), "note", 0),
        (("warning", "ok", "note"), "warning", 5),
        (("warning", "error", "ok"), "error", 6),
    ],
)
def test_the_worst_finding_is_the_exit_code(severities, worst, code) -> None:
    result = CheckReport(tuple(Finding("c", s, "w") for s in severities))
    assert (result.worst, result.exit_code) == (worst, code)


def test_runs_of_ranks_are_drawn_together() -> None:
    assert spans((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"


def test_a_report_is_printed_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    findings = (
        ok("launcher", "torchrun [::1]"),
        Finding("cpus", "warning", "4 ranks on 2 CPUs", "they take turns", "start 2", (1,)),
        Finding("master", "error", "nobody answers", "no run", "start rank 0", (0, 1)),
    )
    print_report(CheckReport(findings, world=2))
    out = capsys.readouterr().out
    assert "torchrun [::1]" in out
    assert out.index("error: master: nobody answers") < out.index("warning: cpus")
    assert "warning: cpus: 4 ranks on 2 CPUs (ranks: 1)\n  why: they take turns\n" in out
    assert "  do:  start 2" in out
    assert out.rstrip().endswith("1 error, 1 warning, 1 ok")


def test_a_rank_that_stayed_alone_prints_its_number_and_only_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    findings = (ok("launcher", "by hand"), Finding("master", "error", "gone", "no run", "fix it"))
    print_report(CheckReport(findings, world=4, rank=3, alone=True))
    out = capsys.readouterr().out
    assert out.startswith("Rank 3 of 4 could not reach the others")
    assert "gone" in out
    assert "by hand" not in out
    print_report(CheckReport(findings, world=4, rank=0, alone=True))
    assert "by hand" in capsys.readouterr().out


def test_json_is_one_line_with_everything(capsys: pytest.CaptureFixture[str]) -> None:
    result = CheckReport((Finding("cpus", "warning", "w", "y", "a", (1,), ("n1",)),), world=2)
    print_report(result, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert (document["worst"], document["exit_code"], document["world"]) == ("warning", 5, 2)
    assert document["findings"] == [
        {"check": "cpus", "severity": "warning", "what": "w", "why": "y", "advice": "a", "ranks": [1], "hosts": ["n1"]}
    ]
    assert summary(result) == "1 warning"


# -- one machine ---------------------------------------------------------------------------


def test_gpus_that_torch_cannot_use_are_reported() -> None:
    hidden_by_build = replace(MACHINE, nvidia_devices=4)
    assert is_reported(check_gpus(hidden_by_build, LOAD), "warning", "4 GPUs under /dev", "without CUDA")
    blind = replace(CPU_ONLY, cuda=Fact(False, "torch is built with CUDA but sees no GPU"))
    machine = replace(MACHINE, hardware=blind, nvidia_devices=1)
    assert is_reported(check_gpus(machine, LOAD), "warning", "1 GPU under /dev", "sees no GPU")
    for value in ("", "-1"):
        hidden = with_variables(machine, CUDA_VISIBLE_DEVICES=value)
        assert is_reported(check_gpus(hidden, LOAD), "note", "hidden by")


def test_a_visible_gpu_that_is_not_there_is_reported() -> None:
    named_three = with_variables(WITH_GPUS, CUDA_VISIBLE_DEVICES="0,1,7")
    assert is_reported(check_gpus(named_three, LOAD), "warning", "names 3 GPUs but torch sees 2")
    named_two = with_variables(WITH_GPUS, CUDA_VISIBLE_DEVICES="0,1")
    assert is_reported(check_gpus(named_two, LOAD), "ok", "card, card")


def test_a_backend_that_torch_lacks_is_an_error_only_where_it_is_needed() -> None:
    without = replace(MACHINE, hardware=replace(CPU_ONLY, backends=()))
    assert is_reported(check_backend(without, LOAD), "error", "gloo is needed", "none")
    assert is_reported(check_backend(without, Load()), "ok")


def test_torchruns_one_thread_is_reported() -> None:
    machine = with_variables(MACHINE, OMP_NUM_THREADS="1", TORCHELASTIC_RUN_ID="x")
    finding = check_omp(machine, LOAD)
    assert is_reported(finding, "note", "OMP_NUM_THREADS=1 (torchrun sets 1", "4 threads per rank")
    assert "export OMP_NUM_THREADS=4" in finding.advice
    arm = replace(machine, processor="aarch64 DEFAULT")
    assert "linear is one of them" in check_omp(arm, LOAD).why
    assert is_reported(check_omp(with_variables(MACHINE, OMP_NUM_THREADS="4"), LOAD), "ok")
    assert is_reported(check_omp(MACHINE, LOAD), "ok", "is not set")


def test_ranks_that_may_leave_their_memory_are_reported() -> None:
    two = replace(MACHINE, numa=(tuple(range(4)), tuple(range(4, 8))))
    finding = check_numa(two, LOAD)
    assert is_reported(finding, "note", "may run on 2 of them")
    assert "--cpu-bind" in finding.advice
    assert is_reported(check_numa(replace(two, cpus=(4, 5)), LOAD), "ok", "1 of them")
    assert is_reported(check_numa(two, replace(LOAD, ranks_here=1)), "ok")
    assert is_reported(check_numa(MACHINE, LOAD), "ok", "the same memory")


def test_more_omp_threads_than_cpus_are_reported() -> None:
    finding = check_omp(with_variables(MACHINE, OMP_NUM_THREADS="8"), LOAD)
    assert is_reported(finding, "warning", "OMP_NUM_THREADS=8 for 2 ranks on 8 CPUs")


@pytest.mark.parametrize(
    ("cpus", "quota", "ranks", "threads", "workers", "severity", "words"),
    [
        (8, None, 2, 8, 0, "ok", "8 CPUs for 2 ranks, 8 threads"),
        (8, None, 2, 8, 8, "ok", "8 loader workers"),
        (2, None, 4, 4, 0, "warning", "4 ranks on 2 CPUs"),
        (8, None, 2, 16, 0, "warning", "16 threads in all"),
        (8, None, 2, 8, 16, "warning", "16 loader workers in all"),
        (64, 4.0, 2, 64, 0, "warning", "the container may use 4,"),
        (64, 1.5, 2, 2, 0, "warning", "2 ranks on 64 CPUs"),
    ],
)
def test_ranks_must_fit_the_cpus(cpus, quota, ranks, threads, workers, severity, words) -> None:
    assert is_reported(check_cpus(cpus, quota, ranks, threads, workers), severity, words)


def test_small_shared_memory_is_the_worse_the_more_workers() -> None:
    small = Space(64 * MB, 64 * MB)
    assert is_reported(check_shared_memory(small, replace(LOAD, workers=4)), "error", "64 MB free")
    assert is_reported(check_shared_memory(small, replace(LOAD, workers=1)), "warning", "2 loader")
    assert is_reported(check_shared_memory(small, replace(LOAD, backend="nccl")), "warning", "nccl")
    assert is_reported(check_shared_memory(small, LOAD), "note")
    assert is_reported(check_shared_memory(Space(GB, GB), replace(LOAD, workers=4)), "ok", "1 GB")
    assert is_reported(check_shared_memory(None, LOAD), "ok", "none")


def test_memory_and_open_files_must_do_for_the_ranks() -> None:
    low = Space(4 * GB, GB)
    assert is_reported(check_memory(low, LOAD), "warning", "1 GB free of 4 GB for 2 ranks")
    assert is_reported(check_memory(low, Load()), "ok")
    many = Load(world=512, workers=8, prefetch=4)
    finding = check_open_files((1024, 65536), many)
    assert is_reported(finding, "warning", "1024 allowed, about 1792 needed")
    assert "ulimit -n 4096" in finding.advice
    assert "administrator" in check_open_files((1024, 1024), many).advice
    assert is_reported(check_open_files((1024, 1024), LOAD), "ok")
    assert is_reported(check_open_files((-1, -1), many), "ok", "unlimited")


def test_a_folder_must_be_writable_and_have_room() -> None:
    assert is_reported(check_disk("runs", Space(GB, 10 * MB), ""), "warning", "10 MB free")
    refused = check_disk("runs", Space(GB, GB), "Read-only file system")
    assert is_reported(refused, "error", "Read-only file system")
    assert is_reported(check_disk("runs", Space(9 * GB, 9 * GB), ""), "ok", "9 GB free")


# -- names, addresses, interfaces ------------------------------------------------------------


def test_an_interface_that_is_not_there_is_an_error() -> None:
    finding = check_interfaces(with_variables(MACHINE, GLOO_SOCKET_IFNAME="ib0"), LOAD)
    assert is_reported(finding, "error", "GLOO_SOCKET_IFNAME=ib0", "lo, eth0")
    nccl = replace(LOAD, backend="nccl")
    assert is_reported(check_interfaces(with_variables(MACHINE, NCCL_SOCKET_IFNAME="ib"), nccl), "error")
    for fine in ("eth", "=eth0", "^docker", "ib,eth"):
        assert is_reported(check_interfaces(with_variables(MACHINE, NCCL_SOCKET_IFNAME=fine), nccl), "ok", fine)
    assert is_reported(check_interfaces(with_variables(MACHINE, NCCL_SOCKET_IFNAME="=eth"), nccl), "error")


def test_several_interfaces_and_none_chosen_is_noted_on_several_machines() -> None:
    ways = (*MACHINE.interfaces, Interface("ib0", "10.1.0.1"), Interface("docker0", "172.17.0.1"))
    machine = replace(MACHINE, interfaces=ways)
    finding = check_interfaces(machine, TWO_NODES)
    assert is_reported(finding, "note", "eth0 (10.0.0.1), ib0 (10.1.0.1), and none is chosen")
    assert "docker0" not in finding.what
    assert is_reported(check_interfaces(machine, LOAD), "ok")
    assert is_reported(check_interfaces(with_variables(machine, GLOO_SOCKET_IFNAME="ib0"), TWO_NODES), "ok")


def test_where_ranks_were_to_meet_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"n1": ("127.0.1.1",), "localhost": ("127.0.0.1",), "far": ("10.0.0.1",)}
    monkeypatch.setattr(network, "resolve", lambda name: known.get(name, ()))

    def wrong(address: str, load: Load) -> str:
        return " ".join(finding.what for finding in check_master(address, load))

    assert "gone cannot be resolved" in wrong("gone", LOAD)
    assert "localhost is 127.0.0.1 here, in a run on 2 machines" in wrong("localhost", TWO_NODES)
    assert wrong("localhost", LOAD) == wrong("far", TWO_NODES) == ""
    # Debian's name for itself: right on rank 0's machine, wrong on every other.
    assert wrong("n1", TWO_NODES) == ""
    assert "n1 is 127.0.1.1 here" in wrong("n1", replace(TWO_NODES, node=1))


# -- between ranks -------------------------------------------------------------------------


def test_ranks_that_agree_are_fine() -> None:
    findings = check_agreement(reports(MACHINE, MACHINE, config="abc"))
    assert {finding.severity for finding in findings} == {"ok"}
    expected = {"cpus", "same versions", "same processors", "same threads"}
    assert {f.check for f in findings} == expected | {"shared gpus", "same config"}


@pytest.mark.parametrize(("name", "severity"), [("torch", "error"), ("samestep", "error"), ("python", "warning")])
def test_another_version_is_named_with_its_rank(name: str, severity: str) -> None:
    odd = replace(MACHINE, versions={**MACHINE.versions, name: "9.9"})
    finding = named(check_agreement(reports(MACHINE, MACHINE, odd)), "same versions")
    assert is_reported(finding, severity, f"{name} 9.9 on rank 2 (n1)", "on ranks 0-1")


def test_other_threads_and_processors_are_reported() -> None:
    odd = with_variables(replace(MACHINE, processor="x86_64 AVX512"), OMP_NUM_THREADS="3")
    findings = check_agreement(reports(MACHINE, odd))
    assert is_reported(named(findings, "same threads"), "warning", "OMP_NUM_THREADS=3 on rank 1")
    assert is_reported(named(findings, "same processors"), "warning", "AVX512 on rank 1")
    rounding = check_agreement(reports(MACHINE, odd, load=replace(LOAD, bits=False)))
    assert is_reported(named(rounding, "same processors"), "note")


def test_another_config_is_another_run() -> None:
    mixed = [*reports(MACHINE, config="abc"), *reports(MACHINE, MACHINE, config="xyz")[1:]]
    finding = named(check_agreement(mixed), "same config")
    assert is_reported(finding, "error", "config abc on rank 0", "config xyz on rank 1")
    without = [*reports(MACHINE, config="abc"), *reports(MACHINE, MACHINE)[1:]]
    assert is_reported(named(check_agreement(without), "same config"), "error", "config none")


def test_ranks_that_share_a_gpu_are_reported() -> None:
    first = replace(LOAD, device="cuda:0", backend="nccl")
    # Slurm gives each rank its GPU as number 0: the same number, but another GPU.
    bound = [replace(WITH_GPUS, gpu_ids=(letter,)) for letter in "ab"]
    assert is_reported(named(check_agreement(reports(*bound, load=first)), "shared gpus"), "ok")
    shared = reports(WITH_GPUS, WITH_GPUS, load=first)
    assert is_reported(named(check_agreement(shared), "shared gpus"), "warning", "ranks 0-1 on n1")


def test_bound_ranks_are_judged_by_the_cpus_of_all() -> None:
    halves = [replace(MACHINE, cpus=tuple(range(4))), replace(MACHINE, cpus=tuple(range(4, 8)))]
    finding = named(check_agreement(reports(*halves)), "cpus")
    assert is_reported(finding, "ok", "8 CPUs for 2 ranks, 8 threads")
    idle = check_agreement(reports(*halves, load=replace(LOAD, threads=2)))
    (note,) = [f for f in idle if f.check == "cpus" and f.severity == "note"]
    assert is_reported(note, "note", "bound to its own 4 CPUs, but uses 2 threads")
    both = reports(MACHINE, MACHINE, MACHINE)
    assert is_reported(named(check_agreement(both), "cpus"), "warning", "12 threads in all on 8 CPUs")


def test_clocks_are_judged_by_the_quickest_exchange() -> None:
    places = [Place(0, "n1"), Place(1, "n1"), Place(2, "n2")]
    slow = [(100.0, 5.0), (100.0, 5.0), (104.0, 5.0)]
    assert is_reported(check_clocks([slow, [(200.0, 0.01)] * 3], places), "ok")
    late = [(200.0, 0.01), (200.0, 0.01), (230.0, 0.02)]
    finding = check_clocks([slow, late], places)
    assert is_reported(finding, "warning", "30.0 s apart", "ranks 2")
    assert (finding.ranks, finding.hosts) == ((2,), ("n2",))
    # What the exchange itself took is no skew.
    assert is_reported(check_clocks([slow], places), "ok")


def test_a_folder_that_ranks_do_not_share_is_named_with_them() -> None:
    places = [Place(0, "n1"), Place(1, "n2"), Place(2, "n2")]
    assert is_reported(check_sharing("runs", [0.0, 0.1, 0.2], places, ""), "ok", "after 200 ms")
    finding = check_sharing("runs", [0.0, None, None], places, "")
    assert is_reported(finding, "error", "ranks 1-2 on n2")
    assert finding.ranks == (1, 2)
    assert is_reported(check_sharing("runs", [None] * 3, places, "No space left"), "error", "rank 0")


@pytest.mark.requirement("002-X-4")
def test_wrong_sums_and_slow_networks_are_reported() -> None:
    here, apart = [Place(0, "n1"), Place(1, "n1")], [Place(0, "n1"), Place(1, "n2")]
    right = Reduced(4096, 0.001, (), 4e6)
    (finding,) = check_all_reduce([right], here)
    assert is_reported(finding, "ok", "4 KB: right, 1 ms, 3.81 MB/s")
    (wrong,) = check_all_reduce([replace(right, wrong=(1,))], here)
    assert is_reported(wrong, "error", "a wrong sum on ranks 1")
    assert wrong.ranks == (1,)
    assert is_reported(check_all_reduce([right], apart)[-1], "note", "between machines")
    fast = replace(right, bus_bytes=1e9)
    assert len(check_all_reduce([fast], apart)) == 1


# -- the config and the launch ---------------------------------------------------------------


def configured(folder: Path, **changes: object) -> Config:
    (folder / "config.yaml").write_text("global_batch: 32\nlanes: 8\nsteps: 5\n")
    return load_config(
        folder / "config.yaml", [f"{k}={json.dumps(v) if isinstance(v, dict) else v}" for k, v in changes.items()]
    )


def test_lanes_are_dealt_to_the_world(tmp_path: Path) -> None:
    config = configured(tmp_path)
    assert is_reported(check_lanes(config, 4), "ok", "8 lanes of 4 samples, 2 a rank")
    assert is_reported(check_lanes(config, 3), "note", "2 to 3 a rank")
    assert is_reported(check_lanes(config, 9), "error", "9 ranks but only 8 lanes")
    weighted = configured(tmp_path, **{"distributed.lane_weights": "[3,1]"})
    assert is_reported(check_lanes(weighted, 2), "ok")
    assert is_reported(check_lanes(weighted, 3), "error", "lane_weights")


def test_lanes_without_graphs_are_a_warning_on_a_gpu(tmp_path: Path) -> None:
    on_gpu = Load(world=2, device="cuda:0")

    def found(load: Load = on_gpu, **changes: object) -> Finding:
        (finding,) = check_lane_cost(configured(tmp_path, **changes), load)
        return finding

    assert is_reported(found(), "ok", "4 lanes a rank, in CUDA graphs")
    eager = found(**{"speed.graph": "false"})
    assert is_reported(eager, "warning", "4 lanes a rank, without CUDA graphs: speed.graph is false")
    assert "samestep tune lanes CONFIG" in eager.advice
    for changes, why in (({"same": "rounding"}, "same: rounding"), ({"memory.lane_split": 2}, "memory.lane_split")):
        assert is_reported(found(**changes), "warning", why)
    # Its update runs eagerly, once a step; its lanes are graphs.
    assert is_reported(found(task="t.py:T", optimizer={"implementation": "plain"}), "ok")


def test_lanes_cost_nothing_worth_a_warning_elsewhere(tmp_path: Path) -> None:
    eager = configured(tmp_path, **{"speed.graph": "false"})
    assert check_lane_cost(eager, Load()) == []
    assert check_lane_cost(eager, Load(world=8, device="cuda:3")) == [], "one lane a rank"
    fused = configured(tmp_path, same="samples")
    assert check_lane_cost(fused, Load(device="cuda:0")) == []
    refused = check_plan(eager, Load(world=9, device="cuda:0"))
    assert [f.check for f in refused] == ["lanes", "task"], "too few lanes are one error"


def test_the_task_must_be_there(tmp_path: Path) -> None:
    config = configured(tmp_path, task="task.py:Mine")
    assert is_reported(check_task(config), "error", "task.py", "No such file")
    (tmp_path / "task.py").write_text("class Mine(\n")
    assert is_reported(check_task(config), "error", "line 1")
    (tmp_path / "task.py").write_text("class Other: ...\n")
    assert is_reported(check_task(config), "error", "no class Mine; it has Other")
    (tmp_path / "task.py").write_text("from other import *\n")
    assert is_reported(check_task(config), "note", "may get it when it is run")
    (tmp_path / "task.py").write_text("raise SystemExit\nclass Mine: ...\n")
    assert is_reported(check_task(config), "ok", "Mine in")
    assert is_reported(check_task(configured(tmp_path)), "ok", "none")


def test_what_torch_refuses_is_reported(tmp_path: Path) -> None:
    def found(**changes: Any) -> list[Finding]:
        return check_optim(configured(tmp_path, task="t.py:T", **changes))

    assert found() == []
    sound = found(optimizer={"name": "adamw"}, schedule={"name": "steplr", "args": {"step_size": 2}})
    assert [finding.severity for finding in sound] == ["ok", "ok"]
    [finding] = found(optimizer={"name": "sgd", "args": {"momentum": -1}})
    assert is_reported(finding, "error", "SGD refuses", "Invalid momentum")
    [finding] = found(schedule={"name": "one_cycle", "args": {"pct_start": 2}})
    assert is_reported(finding, "error", "pct_start is 2: it takes a share from 0 to 1")
    [finding] = found(schedule={"name": "steplr", "args": {"step_size": "x"}, "warmup": 0.5})
    assert is_reported(finding, "error", "steplr fails with")
    [finding] = found(schedule={"name": "plateau", "args": {"patience": 1}})
    assert is_reported(finding, "ok", "plateau")


def test_the_digest_is_of_the_run_not_of_the_rank(tmp_path: Path) -> None:
    config = configured(tmp_path)
    by_hand = [configured(tmp_path, **{"distributed.rank": rank, "distributed.world_size": 2}) for rank in (0, 1)]
    assert digest(by_hand[0]) == digest(by_hand[1])
    assert digest(config) != digest(configured(tmp_path, seed=1))


def test_an_allocation_without_a_step_is_noted() -> None:
    inside = {"SLURM_JOB_ID": "7"}
    (note,) = check_launch(detect_launch(inside), with_variables(MACHINE, **inside))
    assert is_reported(note, "note", "srun did not start this process")
    (fine,) = check_launch(detect_launch({}), MACHINE)
    assert is_reported(fine, "ok", "none")


def test_one_process_is_checked_and_leaves_nothing(tmp_path: Path) -> None:
    shown: list[CheckReport] = []
    folder = tmp_path / "runs" / "new"
    result = run_checks(configured(tmp_path), folder, machine=MACHINE, show=shown.append)
    assert shown == [result]
    assert (result.worst, result.exit_code, result.alone) == ("note", 0, False)
    checks = {finding.check for finding in result.findings}
    assert {"launcher", "gpus", "cpus", "/dev/shm", "open files", "run folder", "lanes"} <= checks
    assert "all-reduce" not in checks
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_launch_that_contradicts_itself_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        result = run_checks(None, tmp_path, machine=MACHINE)
    assert result.exit_code == 6
    (finding,) = [f for f in result.findings if f.severity == "error"]
    assert is_reported(finding, "error", "RANK is set but WORLD_SIZE is not")
    assert "/dev/shm" in {f.check for f in result.findings}


def test_every_contradiction_with_the_config_is_a_finding(tmp_path: Path) -> None:
    config = configured(tmp_path, **{"distributed.backend": "nccl", "distributed.world_size": 4})
    result = run_checks(config, tmp_path, machine=MACHINE)
    found = [f.what for f in result.findings if f.check == "launch"]
    assert len(found) == 2
    assert "started alone" in found[0]
    assert "nccl, which needs GPUs" in found[1]


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    result = run_checks(None, tmp_path / "file" / "run", machine=MACHINE)
    (finding,) = [f for f in result.findings if f.check == "run folder"]
    assert is_reported(finding, "error", "cannot be written to")


def test_this_machine_can_be_inspected() -> None:
    machine = inspect_machine({"OMP_NUM_THREADS": "1", "SECRET": "x"})
    assert machine.variables == {"OMP_NUM_THREADS": "1"}  # nothing else is sent
    assert machine.cpus
    assert set(machine.versions) == {"python", "torch", "samestep"}
    assert Interface("lo", "127.0.0.1") in machine.interfaces
    assert "127.0.0.1" in resolve("localhost")
    assert resolve("no.such.host.invalid") == ()
