"""A step with `distributed.shard`, beside the unsharded one, DDP with ZeroRedundancyOptimizer, and FSDP2 (`fully_shard`).

    python benchmarks/sharding.py [--nproc N] [--rounds N] [--device cpu|cuda] [--model mlp|transformer]
        [--variants fsdp,weights] [--limit MB] [--backend gloo|nccl]

An MLP of 40 layers, or a transformer of 12, with AdamW, one lane per rank. Ranks share GPUs if there are too few; over nccl each
rank is then a machine of its own to nccl, and sends over loopback. Each turn is a short training in the same processes, interleaved with the others. The median time of a step counts; on a GPU also the most memory
that a rank has allocated.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch.nn.functional as F
from measuring import free_port, median_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import samestep

STEPS, WARM_UP, BATCH = 14, 4, 64
VARIANTS = ("zero", "fsdp", "ddp", "none", "optimizer", "weights")
OURS = ("none", "optimizer", "weights")
TOKENS, SEQUENCE = 1000, 64


SHARED_GPU = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_NET": "Socket",
}  # fmt: skip


@dataclass(frozen=True)
class Load:
    """What is trained, and where."""

    device: torch.device
    model: str
    width: int
    backend: str

    def made_model(self) -> nn.Sequential:
        torch.manual_seed(0)
        width = self.width
        if self.model == "mlp":
            layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(40)]
            return nn.Sequential(*layers, nn.Linear(width, 10))
        blocks = [nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True) for _ in range(12)]
        return nn.Sequential(nn.Embedding(TOKENS, width), *blocks, nn.Linear(width, TOKENS))

    def made_data(self) -> TensorDataset:
        made = torch.Generator().manual_seed(0)
        samples = STEPS * BATCH
        if self.model == "mlp":
            x = torch.randn(samples, self.width, generator=made)
            return TensorDataset(x, torch.randint(10, (samples,), generator=made))
        x = torch.randint(TOKENS, (samples, SEQUENCE), generator=made)
        return TensorDataset(x, x.roll(-1, 1))

    @staticmethod
    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, -2), y.flatten())


def by_torch(load: Load, name: str) -> Iterator[None]:
    """DDP, DDP with ZeroRedundancyOptimizer, or FSDP2."""
    dist.init_process_group(load.backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    device, model = load.device, load.made_model()
    optimizer: torch.optim.Optimizer
    if name == "fsdp":
        mesh = init_device_mesh(device.type, (world,))
        for block in model:
            fully_shard(block.to(device), mesh=mesh)
        model = fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model.to(device))
    if name == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, y = load.made_data().tensors
    for step in range(STEPS):
        mine = slice(step * BATCH + rank, (step + 1) * BATCH, world)
        optimizer.zero_grad()
        load.loss(model(x[mine].to(device)), y[mine].to(device)).backward()
        optimizer.step()
        yield
    dist.destroy_process_group()


def by_samestep(load: Load, shard: str, folder: str) -> Iterator[None]:
    config = {
        "steps": STEPS, "lanes": int(os.environ["WORLD_SIZE"]), "run_dir": folder, "resume": "never",
        "checkpoint": {"enabled": False}, "speed": {"graph": False},
        "distributed": {
            "device": load.device.type, "backend": load.backend, "shard": shard, "network": SHARED_GPU,
        },
    }  # fmt: skip
    with samestep.start(config) as run:
        model = load.made_model()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        loader = DataLoader(load.made_data(), batch_size=BATCH)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        for step in run.steps(loader):
            step.train(lambda batch: load.loss(model(batch.x), batch.y))
            yield


def measured(steps: Iterator[None], device: torch.device) -> tuple[float, float]:
    """Seconds of a step, and megabytes at most."""
    gc.collect()  # what the turn before has left
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = median_step(steps, device, WARM_UP)
    most = torch.cuda.max_memory_allocated() / 1e6 if device.type == "cuda" else 0.0
    return seconds, most


def rank_of(rank: int, options: argparse.Namespace, ports: list[int], folder: str) -> None:
    device = torch.device(options.device)
    if options.limit:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1e6 * options.limit / whole)
    widths = {"mlp": 2048, "transformer": 1024} if device.type == "cuda" else {}
    load = Load(device, options.model, widths.get(options.model, 256), options.backend)
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if torch.cuda.device_count() < options.nproc:
            os.environ |= {**SHARED_GPU, "NCCL_HOSTID": f"rank-{rank}"}
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(options.nproc), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(options.nproc), "MASTER_ADDR": "127.0.0.1",
    }  # fmt: skip
    turns = iter(ports)
    for _ in range(options.rounds):
        row = {}
        for name in options.variants:
            os.environ["MASTER_PORT"] = str(next(turns))
            steps = by_samestep(load, name, f"{folder}/{name}") if name in OURS else by_torch(load, name)
            row[name] = measured(steps, device)
        if rank == 0:
            first = options.variants[0]
            ratios = (f"{name} {row[name][0] / row[first][0]:.2f}" for name in row)
            memory = (f"{name} {row[name][1]:.0f}" for name in row)
            shown = f"; MB at most: {', '.join(memory)}" if device.type == "cuda" else ""
            print(f"{first} {1e3 * row[first][0]:.1f} ms; ratios: {', '.join(ratios)}{shown}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=VARIANTS)
    parser.add_argument("--model", choices=["mlp", "transformer"], default="mlp")
    parser.add_argument("--limit", type=float, help="megabytes of the GPU that a rank may allocate")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    ports = [free_port() for _ in range(options.rounds * len(options.variants))]
    with tempfile.TemporaryDirectory() as folder:
        processes.spawn(rank_of, (options, ports, folder), nprocs=options.nproc)


if __name__ == "__main__":
    main()
