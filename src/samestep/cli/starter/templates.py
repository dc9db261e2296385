"""Configs to start from on machines of several kinds: the starter's, with a part for the machine."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from samestep.cli.starter import Answers, config_text, task_text, write_files
from samestep.errors import PlanError


@dataclass(frozen=True)
class Template:
    """A kind of machine."""

    name: str
    machine: str
    """What it is for, in a few words."""
    commands: tuple[str, ...]
    """How a run is started there, with {config} for the file."""
    part: str
    """What the config says of the machine."""
    answers: Answers = field(default_factory=Answers)
    files: dict[str, str] = field(default_factory=dict)
    """Files beside the config, by name."""

    def texts(self, folder: Path) -> dict[Path, str]:
        """Return all files with their contents; the config is the first."""
        config = re.sub(r"(?m)^# distributed: .*\n", lambda _: self.part, config_text(self.answers))
        config = re.sub(r"(?m)^# speed: .*\n", "", config) if "\nspeed:" in self.part else config
        found = {folder / "config.yaml": config, folder / "task.py": task_text(self.answers)}
        return {**found, **{folder / name: text for name, text in self.files.items()}}

    def shown_commands(self, config: Path | str) -> list[str]:
        """Return the commands for a config's file."""
        return [command.format(config=config) for command in self.commands]


_ONE_GPU = """
# One machine with one GPU, or none: one process. `samestep train config.yaml`
speed: {graph: auto}        # a step as one CUDA graph, where it can be one
distributed:
  device: auto              # cuda where there is a GPU
"""

_ONE_NODE = """
# One machine with several GPUs: a rank on each. `samestep launch config.yaml`; --nproc 2 takes two of them.
speed: {graph: auto}        # a step as one CUDA graph, where it can be one
distributed:
  launch_method: torchrun
  world_size: auto          # ranks; auto: as many as there are GPUs, or lanes on CPUs
  backend: auto             # nccl on GPUs, gloo on CPUs
"""

_TWO_NODES = """
# Two machines with four GPUs each, by Slurm: `samestep launch config.yaml --print` shows the job script.
# Without Slurm, on machine 0 and 1:
#   samestep launch config.yaml --via torchrun --nodes 2 --node-rank 0 --master-addr HOST --nproc 4
speed: {graph: auto}        # a step as one CUDA graph, where it can be one
distributed:
  launch_method: slurm
  num_nodes: 2
  backend: auto             # nccl on GPUs
  timeout: 1800             # seconds that a rank may wait for another
launch:
  # modules: [cuda]         # module load, before the ranks start
  slurm:
    # partition: gpu
    gpus_per_node: 4        # and so four ranks on each
    cpus_per_task: 8
    time: "12:00:00"        # the run saves before it, is requeued, and resumes
"""

_CPU_CLUSTER = """
# Four CPU nodes by Slurm, one process with 40 threads on each: `samestep launch config.yaml --print` shows the job script.
# The last bits depend on the number of threads: keep it. docs/when_to_use_what.md compares threads with ranks.
distributed:
  launch_method: slurm
  num_nodes: 4
  num_gpus_per_node: 1      # ranks on each node
  device: cpu
  backend: gloo
  threads_per_rank: 40
launch:
  slurm:
    # partition: cpu
    cpus_per_task: 40
    time: "12:00:00"        # the run saves before it, is requeued, and resumes
"""

_KAGGLE = """
# On Kaggle kaggle.yaml counts as well; elsewhere it is one process, or as many ranks as `samestep launch` starts.
platforms: {kaggle: kaggle.yaml}
"""

_KAGGLE_FILE = """\
# GPU T4 x2: samestep launch starts a rank on each. T4s have no bf16. A session ends after twelve hours at most: the run saves before.
precision: fp16
distributed: {launch_method: torchrun}
preemption: {after_minutes: 660}
"""

TEMPLATES: dict[str, Template] = {
    template.name: template
    for template in (
        Template(
            "one-gpu", "one machine with one GPU, or none", ("samestep train {config}",), _ONE_GPU,
            Answers(precision="auto"),
        ),
        Template(
            "one-node", "one machine with several GPUs", ("samestep launch {config}",), _ONE_NODE,
            Answers(precision="auto"),
        ),
        Template(
            "two-nodes", "two machines with four GPUs each, by Slurm",
            ("samestep launch {config} --print", "samestep launch {config} --follow"), _TWO_NODES,
            Answers(precision="auto"),
        ),
        Template(
            "cpu-cluster", "four CPU nodes, by Slurm",
            ("samestep launch {config} --print", "samestep launch {config} --follow"), _CPU_CLUSTER,
        ),
        Template(
            "kaggle", "a Kaggle notebook with GPU T4 x2", ("samestep launch {config}",), _KAGGLE,
            files={"kaggle.yaml": _KAGGLE_FILE},
        ),
    )
}  # fmt: skip


def write_template(name: str, folder: Path) -> tuple[Template, list[Path]]:
    """Write the files of a template; refuses to overwrite any, and then writes none.

    Raises:
        PlanError: There is no such template.
        LaunchError: A file exists already, or cannot be written.
    """
    template = TEMPLATES.get(name)
    if template is None:
        raise PlanError(f"there is no template {name}: there are {', '.join(TEMPLATES)}")
    return template, write_files(template.texts(folder))
