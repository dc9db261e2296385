"""torchrun's and torch.distributed.launch's command lines for what `samestep launch` runs itself."""

from __future__ import annotations

from samestep.environment.variables import thread_variables
from samestep.launch.commands.local import LocalLaunch
from samestep.launch.commands.rank_command import exec_line, shell_script


def torchrun_script(launch: LocalLaunch) -> str:
    """A script that starts the same ranks by torch's own command.

    samestep runs that command's agent in its own process, so that it can name the rank that
    failed, leave out ranks that were lost, and let ranks save when they are stopped.
    """
    legacy = launch.rank_command.config.distributed.launch_method == "torch.distributed.launch"
    module = "torch.distributed.launch" if legacy else "torch.distributed.run"
    argv = [launch.rank_command.python, "-m", module, *_where(launch)]
    argv += [f"--nproc-per-node={launch.nproc}"]
    argv += [f"--max-restarts={launch.max_restarts}"] if launch.max_restarts else []
    argv += launch.rank_command.train()
    comment = f"The ranks of samestep launch, by {module} itself."
    return shell_script(
        comment, launch.rank_command, thread_variables(launch.threads), exec_line(argv)
    )


def _where(launch: LocalLaunch) -> list[str]:
    if launch.nodes is None:
        return ["--standalone"]
    if launch.node_rank is not None:
        address, _, port = launch.rendezvous.rpartition(":")
        return [
            f"--nnodes={launch.nodes.most}",
            f"--node-rank={launch.node_rank}",
            f"--master-addr={address}",
            f"--master-port={port}",
        ]
    return [
        f"--nnodes={launch.nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={launch.rendezvous}",
        f"--rdzv-id={launch.run_id}",
    ]
