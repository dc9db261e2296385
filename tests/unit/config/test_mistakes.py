"""Every mistake people make, and the message that shows how to fix it.

Each row makes one mistake in a fresh folder; the message must hold every fragment.
"""

from pathlib import Path

import pytest

from samestep.config import load_config
from samestep.errors import ConfigError, LaunchError, PlanError, UserError
from samestep.launch.commands.rank_command import RankCommand
from samestep.launch.commands.torchrun import torchrun_command
from samestep.launch.run.worlds import Machines, World, parse_worlds, with_shards
from samestep.verify.verify import verify

GOOD = {"task": "task.py:Good", "epochs": 1, "global_batch": 8}


def without(key):
    return {name: value for name, value in GOOD.items() if name != key}


def config(*overrides, base=GOOD):
    return lambda folder: load_config(base, overrides)


def file(content, name="run.yaml"):
    def load(folder):
        (folder / name).write_bytes(content)
        load_config(folder / name)

    return load


def launch(nproc, *overrides):
    return lambda folder: torchrun_command(RankCommand(load_config(GOOD, overrides), Path("run.yaml")), nproc)


def verified(worlds, *overrides, against=None):
    def run(folder):
        (folder / "run.yaml").write_text("task: task.py:Good\nepochs: 1\nglobal_batch: 8\n")
        inside, file = (*overrides, f"run_dir={folder / 'run'}"), folder / "run.yaml"
        command = RankCommand(load_config(file, inside), file, inside)
        verify(command, [*map(World, worlds)], against=against and folder / against)

    return run


MISTAKES = [
    # The file
    ("file missing", lambda folder: load_config(folder / "no.yaml"), ConfigError,
     ["no.yaml", "cannot be read: No such file"]),
    ("file is a folder", lambda folder: load_config(folder), ConfigError,
     ["cannot be read: Is a directory"]),
    ("file empty", file(b""), ConfigError,
     ["holds no keys: a config is a mapping such as 'global_batch: 256'"]),
    ("file only comments", file(b"# epochs: 1\n"), ConfigError, ["holds no keys"]),
    ("file is a list", file(b"- epochs: 1\n"), ConfigError, ["holds no keys"]),
    ("file not yaml", file(b"epochs: [1\n"), ConfigError, ["is not valid YAML", "line 2"]),
    ("json cut off", file(b'{"epochs": 1', "run.json"), ConfigError, ["is not valid YAML"]),
    ("file not utf-8", file("name: caf\xe9\n".encode("latin-1")), ConfigError,
     ["run.yaml", "is not UTF-8 text"]),
    ("key doubled", file(b"task: t.py:T\nepochs: 1\nglobal_batch: 8\nepochs: 2\n"), ConfigError,
     ["epochs (line 4): is already set on line 2: keep one of them"]),
    ("key by two names", config("batch_size=4", base={**without("global_batch"),
                                                      "grad_accumulation": 2,
                                                      "accumulation": 2}), ConfigError,
     ["accumulation is already set (mapping as grad_accumulation): keep one of them"]),
    # One key
    ("key misspelt", config("precison=bf16"), ConfigError, ["did you mean precision?"]),
    ("key of a section at the top", config("prefetch=4"), ConfigError,
     ["did you mean loader.prefetch?"]),
    ("a batch by its other name", config("batchsize=4"), ConfigError, ["did you mean global_batch?"]),
    ("a number for a section", config("clip=1.0"), ConfigError, ["a mapping, such as {norm: 1.0}"]),
    ("a param at the top", config("width=4", base={**GOOD, "params": {"width": 3}}), ConfigError,
     ["did you mean params.width?"]),
    ("no resume", config("resume=false"), ConfigError, ["never starts from the beginning"]),
    ("task without class", config("task=task.py"), ConfigError,
     ["'task.py' names no class: write FILE.py:Class"]),
    ("allowing an unknown key to differ", config("resume.allow=[epochz]"), ConfigError,
     ["resume.allow", "epochz cannot be allowed to differ", "it takes task, params"]),
    ("a network variable of another kind", config("distributed.network.PATH=/bin"), ConfigError,
     ["distributed.network", "PATH is none of NCCL_*, GLOO_*, TORCH_*"]),
    ("an environment variable's name", config("launch.environment={a-b: x}"), ConfigError,
     ["launch.environment", "'a-b' is not a variable's name"]),
    ("two lines where one goes into a script", config('launch.before=["a\\nb"]'), ConfigError,
     ["launch.before"]),
    ("precision fp8", config("precision=fp8"), ConfigError,
     ["you set 'fp8', but it takes one of fp32, tf32, bf16, fp16, auto"]),
    ("same unknown", config("same=exact"), ConfigError,
     ["it takes one of bits, rounding, samples"]),
    ("no epochs", config("epochs=0"), ConfigError,
     ["you set 0, but it takes a whole number (at least 1, at most 1e9: "]),
    ("words for a number", config("epochs=ten"), ConfigError,
     ["you set 'ten', but it takes a whole number (at least 1, at most 1e9: "]),
    ("half an epoch", config("epochs=0.5"), ConfigError, ["it takes a whole number"]),
    ("seed negative", config("seed=-1"), ConfigError, ["it takes a whole number (at least 0"]),
    ("seed too large", config(f"seed={2**63}"), ConfigError, [f"below {2**63}"]),
    ("name with a slash", config("name=a/b"), ConfigError, ["you set 'a/b'", "a plain folder name"]),
    ("clip.norm zero", config("clip.norm=0"), ConfigError, ["it takes a number (above 0)"]),
    ("section is a number", config("loader=3"), ConfigError,
     ["loader (override): you set 3, but it takes a mapping"]),
    ("params is a list", config("params=[1]"), ConfigError,
     ["you set [1], but it takes a mapping"]),
    ("backend mpi", config("distributed.backend=mpi"), ConfigError,
     ["it takes one of auto, nccl, gloo"]),
    ("port too large", config("distributed.master_port=65536"), ConfigError,
     ["at least 1, at most 65535: there are no other ports"]),
    ("a word for a switch", config("drop_last=often"), ConfigError, ["you set 'often', but it takes true or false"]),
    ("words for a switch", config("loader.pin_memory=no way"), ConfigError, ["it takes true or false or auto"]),
    ("a GPU below zero", config("distributed.device_ids=[0, -1]"), ConfigError,
     ["at least 0, below 1024: no machine has more)"]),
    ("lane_weights zero", config("distributed.lane_weights=[1, 0]"), ConfigError,
     ["you set [1, 0], but it takes a list of numbers (at most 1e6 entries, at least 1e-06"]),
    ("override without value", config("epochs"), ConfigError, ["write section.key=value"]),
    ("override without key", config("=3"), ConfigError, ["write section.key=value"]),
    ("override not yaml", config("seed={1"), ConfigError, ["'{1' is not a YAML value"]),
    # Keys against each other
    ("neither epochs nor steps", config(base=without("epochs")), ConfigError,
     ["neither epochs nor steps is set: set one of them"]),
    ("epochs and steps", config("steps=5"), ConfigError,
     ["you set epochs 1 and steps 5: keep one of them"]),
    ("no batch", config(base=without("global_batch")), ConfigError,
     ["set global_batch, or batch_per_rank"]),
    ("batch_per_rank and global_batch", config("batch_per_rank=4"), ConfigError,
     ["you set global_batch 8 and batch_per_rank 4: keep exactly one"]),
    ("batch_per_rank and lanes",
     config("batch_per_rank=4", "lanes=4", base=without("global_batch")), ConfigError,
     ["remove lanes, or use global_batch"]),
    ("accumulation and global_batch", config("accumulation=2"), ConfigError,
     ["you set 2 beside global_batch", "set lanes instead"]),
    ("batch not divisible by the lanes", config("global_batch=100"), ConfigError,
     ["Nearest batches: 96 or 104; nearest lanes: 5 or 10"]),
    ("more lanes than samples", config("lanes=16"), ConfigError,
     ["Set lanes to 8 or fewer, or global_batch to 16 or more"]),
    ("owners with DistributedDataParallel", config("same=rounding", "distributed.shard=optimizer"), ConfigError,
     ["distributed.shard", "same: rounding has DistributedDataParallel sum gradients, on every rank: set same: bits"]),
    ("sync_batchnorm with bits", config("sync_bn=true"), ConfigError,
     ["same: bits normalises each lane over its own samples: set same: samples, or false"]),
    ("batchnorm over the batch with samples", config("batchnorm=global", "same=samples"), ConfigError,
     ["global is for same: bits, and you set same: samples", "distributed.sync_batchnorm: true"]),
    ("batchnorm over the batch in pieces",
     config("batchnorm=global", "memory.lane_split=2", "speed.compile=true"), ConfigError,
     ["which memory.lane_split: 2 cuts into pieces", "which speed.compile compiles: remove one of them"]),
    ("compiled with what runs again", config("speed.compile=true", "memory.checkpoint=[a]"), ConfigError,
     ["speed.compile", "which torch cannot: set blocks"]),
    ("kept lanes in pieces", config("contrastive.recompute=false", "memory.lane_split=2"),
     ConfigError, ["false keeps the activations of whole lanes, which memory.lane_split: 2 cuts"]),
    ("own buffers with rounding", config("same=rounding", "distributed.broadcast_buffers=false"),
     ConfigError, ["false is possible only with same: samples"]),
    ("static_graph with bits", config("distributed.static_graph=true"), ConfigError,
     ["which same: bits does not use: remove it, or set same: rounding"]),
    ("bucket views with bits", config("distributed.gradient_as_bucket_view=false"), ConfigError,
     ["distributed.gradient_as_bucket_view", "set same: rounding"]),
    ("early stopping without evaluation",
     config("early_stopping.patience=2", "evaluation.every_epochs=null"), ConfigError,
     ["there is no evaluation to stop on: set evaluation.every_epochs"]),
    ("refit with early stopping", config("refit=true", "early_stopping.patience=2"), ConfigError,
     ["refit trains on what would be evaluated: leave out early_stopping"]),
    ("refit of a fold", config("refit=true", "fold={file: folds.json, number: 0}"), ConfigError,
     ["refit trains on all folds: leave out one of them"]),
    ("refit without a task", lambda folder: load_config({"global_batch": 8, "epochs": 1, "refit": True}), ConfigError,
     ["refit (mapping): is for a task, and none is set"]),
    # The launch
    ("no ranks", launch(0), LaunchError, ["--nproc is 0: start at least one rank"]),
    ("more ranks than lanes", launch(9), PlanError,
     ["Start 8 ranks or fewer, or set lanes to 9 or more"]),
    ("nproc against world_size", launch(2, "distributed.world_size=4"), LaunchError,
     ["world_size is 4 but --nproc is 2: make them the same, or set world_size: auto"]),
    ("several nodes from one machine", launch(2, "distributed.num_nodes=2"), LaunchError,
     ["add --nodes, and --rendezvous or --node-rank"]),
    ("launched though not enabled", launch(2, "distributed.enabled=false"), LaunchError,
     ["set enabled: auto, or start one rank"]),
    ("lane_weights for other ranks", launch(4, "distributed.lane_weights=[3, 1]"), PlanError,
     ["has 2 entries but the run has 4 ranks: give one weight per rank"]),
    # verify
    ("worlds not numbers", lambda folder: parse_worlds("1,two"), LaunchError,
     ["--worlds is '1,two': give numbers of ranks, such as 1,2,4"]),
    ("worlds empty", lambda folder: parse_worlds(""), LaunchError, ["such as 1,2,4"]),
    ("world of zero", lambda folder: parse_worlds("0,1"), LaunchError, ["each at least 1"]),
    ("world by an unknown launcher", lambda folder: parse_worlds("1,2@pbs"), LaunchError,
     ["(torchrun, mpirun, slurm, ssh)"]),
    ("all by an unknown launcher", lambda folder: parse_worlds("1,2", "pbs"), LaunchError,
     ["--via is pbs", "torchrun, mpirun, slurm, ssh"]),
    ("world twice", lambda folder: parse_worlds("2,2"), LaunchError, ["different numbers"]),
    ("blocks of nothing", config("distributed.shard_blocks=[layers.*]"), ConfigError,
     ["distributed.shard_blocks", "is for distributed.shard: weights and speed.compile: blocks"]),
    ("sharded weights with uneven lanes",
     config("distributed.shard=weights", "distributed.lane_weights=[1,2]", "memory.lane_split=2", "batchnorm=global",
            "speed.compile=true", "speed.graph=true", "ema.policy=rank0", "distributed.find_unused_parameters=true"),
     ConfigError,
     ["distributed.lane_weights", "memory.lane_split", "batchnorm", "speed.compile", "speed.graph", "ema.policy",
      "distributed.find_unused_parameters", "set distributed.shard to optimizer, or remove it"]),
    ("an unknown shard", lambda folder: with_shards([World(2)], "none,all"), LaunchError,
     ["--shards is 'none,all': give some of none, optimizer, weights, each once"]),
    ("a shard twice", lambda folder: with_shards([World(2)], "none,none"), LaunchError, ["each once"]),
    ("verify without worlds", verified([]), PlanError, ["give some, such as 1,2,4"]),
    ("verify a batch per rank", verified([1, 2], "batch_per_rank=4", "global_batch=null"),
     PlanError, ["there is nothing to verify. Set global_batch instead"]),
    ("verify one world_size", verified([1, 2], "distributed.world_size=2"), PlanError,
     ["verify runs at several: pass distributed.world_size=auto"]),
    ("verify against nothing", verified([1, 2], against="mine.csv"), ConfigError,
     ["mine.csv", "cannot be read: No such file"]),
]  # fmt: skip


@pytest.mark.parametrize(("make", "error", "fragments"), [pytest.param(*row, id=name) for name, *row in MISTAKES])
def test_a_mistake_says_what_to_do(tmp_path, make, error, fragments):
    with pytest.raises(UserError) as caught:
        make(tmp_path)
    assert caught.type is error
    assert caught.value.exit_code == 2
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_what_the_mistakes_vary_is_itself_right():
    assert torchrun_command(RankCommand(load_config(GOOD), Path("run.yaml")), 8).nproc == 8
    assert parse_worlds("1, 2@mpirun,4", "slurm") == [World(1, "slurm"), World(2, "mpirun"), World(4, "slurm")]
    assert with_shards([World(1), World(2)], "") == [World(1), World(2)]
    sharded = with_shards([World(1), World(2)], "none,optimizer")
    assert [world.label for world in sharded] == ["1", "2", "2 optimizer"]


def test_ranks_are_spread_over_the_hosts_that_they_are_enough_for():
    machines = Machines.parse(2, "a,b,c")
    spread = {ranks: machines.spread(ranks) for ranks in (1, 2, 4, 6)}
    assert spread == {1: "a:1", 2: "a:1,b:1", 4: "a:2,b:1,c:1", 6: "a:2,b:2,c:2"}
