"""Trials a minute: of a sweep with warm runs, of one with a process for each trial, and of plain Optuna.

    python benchmarks/sweep.py [--quick] [--worlds 2] [--trials 4] [--rounds N] [--json FILE]

Every trial trains the same model on the same data for the same steps and evaluates after each epoch. In a round
each variant runs some trials, in rotating order. All keep them in Optuna's sqlite storage, which has the times:
counted is what comes after the first trial, and not what a variant does once (imports, the study).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import optuna
import torch
from measuring import common_options, machine, rounds_of, show, write_json
from rich.table import Table

from samestep.bench.statistics import spread_of

ROUNDS = 5
GOAL = 3.0
"""How many times the trials of a process for each."""
WARM, COLD, OPTUNA = ("samestep, warm", "samestep, a process for each trial", "Optuna, DDP for each trial")

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from samestep import Task

class Small(Task):
    def __init__(self, lr=0.01):
        self.lr = lr

    def data(self, samples, seed):
        x = torch.randn(samples, 64, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(x, (x.sum(1) > 0).long())

    def model(self):
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2))

    def train_data(self):
        return self.data(4096, 1)

    def valid_data(self):
        return self.data(1024, 2)

    def optimizers(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def loss(self, model, batch):
        return nn.functional.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch)
"""
EPOCHS, BATCH = 4, 64

BY_HAND = f"""
import sys
import optuna, torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
sys.path.insert(0, ".")
from task import Small

def train(rank, world, port, lr, answers):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{{port}}", rank=rank, world_size=world)
    torch.manual_seed(0)
    task = Small(lr)
    model = DistributedDataParallel(task.model())
    optimizer = task.optimizers(model)
    data, valid = task.train_data(), task.valid_data()
    sampler = DistributedSampler(data, drop_last=True)
    for epoch in range({EPOCHS}):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, {BATCH} // world, sampler=sampler, drop_last=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            x, y = valid.tensors
            mine = slice(rank, None, world)
            total = nn.functional.cross_entropy(model.module(x[mine]), y[mine], reduction="sum")
        dist.all_reduce(total)
        if rank == 0:
            torch.save(model.module.state_dict(), f"{{answers}}.pt")
    if rank == 0:
        open(answers, "w").write(str(float(total) / len(valid)))
    dist.destroy_process_group()

def objective(trial):
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    import socket
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    answers = f"{{folder}}/trial-{{trial.number}}"
    mp.spawn(train, (world, port, lr, answers), nprocs=world)
    return float(open(answers).read())

if __name__ == "__main__":
    folder, trials, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    study = optuna.create_study(storage=f"sqlite:///{{folder}}/study.db", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=trials)
"""


@dataclass(frozen=True)
class Result:
    """One variant's throughput."""

    variant: str
    ranks: int
    trials_per_minute: float
    times: float
    """How many times the trials of a process for each."""
    low: float
    high: float
    rounds: int
    goal: float | None = None


Variant = Callable[[Path, int], None]
"""Runs this many trials in a folder."""


def write_files(folder: Path) -> None:
    """The task, its config, a sweep, and the same by hand."""
    (folder / "task.py").write_text(TASK)
    (folder / "by_hand.py").write_text(BY_HAND)
    base = {
        "task": "task.py:Small", "global_batch": BATCH, "lanes": 2, "epochs": EPOCHS,
        "distributed": {"device": "cpu", "threads_per_rank": 1},
    }  # fmt: skip
    sweep = {
        "base": "config.yaml", "space": {"params.lr": {"loguniform": [1e-4, 1e-1]}},
        "objective": {"metric": "val_loss"}, "parallel": 1,
    }  # fmt: skip
    (folder / "config.yaml").write_text(json.dumps(base))
    (folder / "sweep.yaml").write_text(json.dumps(sweep))


def variants_in(home: Path, ranks: int) -> dict[str, Variant]:
    def ours(*overrides: str) -> Variant:
        def run(folder: Path, trials: int) -> None:
            values = [f"trials={trials}", f"ranks_per_trial={ranks}", f"directory={folder}/sweep"]
            command([sys.executable, "-m", "samestep", "sweep", "run", "sweep.yaml", *values, *overrides], home)

        return run

    def by_hand(folder: Path, trials: int) -> None:
        command([sys.executable, "by_hand.py", str(folder), str(trials), str(ranks)], home)

    return {COLD: ours("warm=false"), WARM: ours(), OPTUNA: by_hand}


def command(argv: Sequence[str], folder: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(argv, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(argv)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def seconds_of(run: Variant, trials: int) -> float:
    """From the end of the first trial to that of the last: what a variant does once is not counted."""
    with tempfile.TemporaryDirectory() as folder:
        run(Path(folder), 1 + trials)
        (database,) = Path(folder).rglob("study.db")
        (name,) = optuna.get_all_study_names(f"sqlite:///{database}")
        study = optuna.load_study(study_name=name, storage=f"sqlite:///{database}")
        ends = sorted(trial.datetime_complete for trial in study.trials)
    return (ends[-1] - ends[0]).total_seconds()


def measure(ranks: int, trials: int, rounds: int) -> list[Result]:
    """Return all variants, interleaved."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_files(home)
        variants = variants_in(home, ranks)
        names = list(variants)
        spent: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds):
            first = number % len(names)
            for name in names[first:] + names[:first]:
                spent[name].append(seconds_of(variants[name], trials))
                print(f"round {number + 1}, {name}: {spent[name][-1]:.1f} s", file=sys.stderr)
    return results_of(spent, ranks, trials)


def results_of(spent: Mapping[str, Sequence[float]], ranks: int, trials: int) -> list[Result]:
    """Return each variant's throughput, against a process for each trial."""
    results = []
    for name, seconds in spent.items():
        times = [cold / own for cold, own in zip(spent[COLD], seconds, strict=True)]
        found = spread_of(times)
        per_minute = 60 * trials / statistics.median(seconds)
        goal = GOAL if name == WARM else None
        figures = (found.median, found.low, found.high, len(times), goal)
        results.append(Result(name, ranks, per_minute, *figures))
    return results


def table_of(results: Sequence[Result]) -> Table:
    table = Table(title="Trials of a sweep, one after the other", title_justify="left")
    for column in ("variant", "ranks"):
        table.add_column(column, no_wrap=True)
    for column in ("trials a minute", "times a process each", "95% range", "goal"):
        table.add_column(column, justify="right")
    for row in results:
        table.add_row(*cells_of(row))
    return table


def cells_of(row: Result) -> list[str]:
    met = "" if row.goal is None else f">= {row.goal:.0f} {'met' if row.times >= row.goal else 'missed'}"
    spread = f"{row.low:.1f}-{row.high:.1f}"
    return [row.variant, str(row.ranks), f"{row.trials_per_minute:.1f}", f"{row.times:.1f}", spread, met]


def markdown(results: Sequence[Result]) -> str:
    """Return the same for a page."""
    head = ["", "ranks", "trials a minute", "times as many", "95 % range", "goal"]
    lines = [head, ["---", *["---:"] * 4, "---"], *(cells_of(row) for row in results)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = common_options(__doc__ or "", ROUNDS)
    parser.add_argument("--worlds", default="1,2", help="ranks of a trial")
    parser.add_argument("--trials", type=int, default=4, help="trials that are counted in a round")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page")
    options = parser.parse_args()
    rounds = rounds_of(options, ROUNDS)
    results = []
    for ranks in options.worlds.split(","):
        results += measure(int(ranks), options.trials, rounds)
    facts = machine(torch.device("cpu"))
    if options.markdown:
        print(markdown(results))
    else:
        show([table_of(results)], facts, rounds)
    write_json(options.json, facts, results)


if __name__ == "__main__":
    main()
