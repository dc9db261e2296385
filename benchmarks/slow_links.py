"""What messages and steps take over slow links, between hosts made of namespaces on this machine.

    python benchmarks/slow_links.py [--links 1gbit,100mbit,10ms] [--worlds 2,4] [--size small|medium]
                                    [--rounds N] [--output FOLDER]

As root, on Linux. Every rank is a host with a link of its own, of this rate in both directions, or with
half of this delay in each; the ranks run `samestep bench comm` and `samestep bench scaling`, as ranks of any launcher. All
hosts share the CPUs of this machine: what is compared is samestep with DDP, in the same processes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from tests.cluster.hosts import Hosts  # noqa: E402

from samestep.bench.comm_report import links_of  # noqa: E402
from samestep.report.format import format_bytes, format_seconds  # noqa: E402

_BURST = "128kb"
_QUEUE = "50ms"
_SECONDS = 900.0
_PORT = 29700


@contextmanager
def shaped(hosts: Hosts, names: Sequence[str], link: str) -> Iterator[None]:
    """Give hosts links such as `100mbit`, or `10ms`; `bare` leaves them as they are."""
    with ExitStack() as stack:
        for name in names:
            if link.endswith("ms"):
                stack.enter_context(hosts.delayed(name, float(link.removesuffix("ms")) / 2))
            elif link != "bare":
                stack.enter_context(hosts.limited(name, link, _BURST, _QUEUE))
        yield


def on_hosts(hosts: Hosts, world: int, port: int, words: Sequence[str], folder: Path) -> Any:
    """Return the document of a `samestep bench` that has a rank on each of the first hosts."""
    output = folder / "result.json"
    output.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "samestep", "bench", *words, "--output", str(output)]
    processes = []
    for rank in range(world):
        env = {
            "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": hosts.address("n1"), "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1",
            "SAMESTEP_SECRET": "of a benchmark, and no secret at all",
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        }  # fmt: skip
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(hosts.start(f"n{rank + 1}", argv, env=env, cwd=folder, **pipes))
    outputs = [process.communicate(timeout=_SECONDS) for process in processes]
    for process, (_, err) in zip(processes, outputs, strict=True):
        if process.returncode:
            sys.exit(err)
    return json.loads(output.read_text(encoding="utf-8"))


def rows_of(link: str, world: int, comm: Any, scaling: Any) -> Iterator[tuple[str, ...]]:
    line = links_of(comm["rows"])["tree-sum", world]
    plain = links_of(comm["rows"])["all-reduce", world]
    shown = [
        "-" if one is None else f"{format_seconds(one.latency)} + n / {format_bytes(one.bandwidth)}/s"
        for one in (plain, line)
    ]
    rows = {row["variant"]: row for row in scaling["rows"]}
    ours, ratio = rows["samestep"], rows["samestep"]["ratio_to_ddp"]
    share = ours["phases"]["exchange"]["median"] / ours["median"]
    yield (
        link, str(world), *shown, format_seconds(rows["ddp"]["median"]), format_seconds(ours["median"]),
        f"{ratio['median']:.2f} ({ratio['low']:.2f} - {ratio['high']:.2f})", f"{share:.0%}",
        f"{ours['control']['median']:.2f}",
    )  # fmt: skip


COLUMNS = ("link", "ranks", "all-reduce", "tree sum", "step of DDP", "step of `bits`", "to DDP", "exchange", "noise")


def main() -> None:
    parser = argparse.ArgumentParser(description="Messages and steps over slow links.")
    parser.add_argument("--links", default="bare,1gbit,100mbit,10ms")
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--size", default="small", choices=("small", "medium"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a folder that keeps all results as JSON")
    options = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    for link in options.links.split(","):
        for world in map(int, options.worlds.split(",")):
            comm, scaling = measured(link, world, options)
            for cells in rows_of(link, world, comm, scaling):
                print(f"| {' | '.join(cells)} |", flush=True)
            if options.output is not None:
                for name, found in (("comm", comm), ("scaling", scaling)):
                    path = options.output / f"{name}-{link}-{world}.json"
                    path.write_text(json.dumps(found, indent=2), encoding="utf-8")


def measured(link: str, world: int, options: argparse.Namespace) -> tuple[Any, Any]:
    """Return the documents of `bench comm` and `bench scaling` over one kind of link."""
    messages = ("comm", "--largest", "4MB", "--rounds", "3", "--operations", "all-reduce,tree-sum")
    steps = ("scaling", "--mode", "weak", "--quick", "--size", options.size, "--rounds", str(options.rounds))
    # Hosts of their own: what a shaped link leaves in its queues must not reach the next.
    with Hosts(world) as hosts, tempfile.TemporaryDirectory() as folder, shaped(hosts, hosts.names, link):
        return (
            on_hosts(hosts, world, _PORT, messages, Path(folder)),
            on_hosts(hosts, world, _PORT + 1, steps, Path(folder)),
        )


if __name__ == "__main__":
    main()
