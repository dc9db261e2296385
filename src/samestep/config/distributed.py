"""The `distributed:` section: how the ranks of a run find and treat each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from samestep.config import bounds
from samestep.environment.launch import LaunchMethod
from samestep.environment.variables import process_environment
from samestep.errors import ConfigError, Mistake, TextError
from samestep.parsing.json_text import parse_json
from samestep.parsing.limits import check_text

Auto = Literal["auto"]


_NETWORK = ("NCCL_", "GLOO_", "TORCH_")
_PREFIX = "SAMESTEP_DISTRIBUTED_"
_STANDARD_NAMES = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "num_nodes": "GROUP_WORLD_SIZE",
    "num_gpus_per_node": "LOCAL_WORLD_SIZE",
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
}


def _for_the_environment(text: str) -> str:
    try:
        check_text(text)
    except TextError as error:
        raise ValueError(str(error)) from None
    return text


Variable = Annotated[str, AfterValidator(_for_the_environment)]
"""Text that becomes an environment variable's."""


@dataclass(frozen=True)
class Validation:
    """True if nothing is wrong; `reasons` lists everything that is."""

    reasons: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.reasons


SHARDS = ("none", "optimizer", "weights")
"""Values of `distributed.shard`, each of which needs less memory than the one before."""


class DistributedConfig(BaseModel):
    """Settings of the ranks of a run. `auto`: from the launcher or the machine."""

    model_config = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True)

    enabled: bool | Auto = Field("auto", description="false refuses to run as a rank")
    backend: Literal["auto", "nccl", "gloo"] = Field("auto", description="nccl on GPUs, else gloo")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="cuda where there is one")
    world_size: bounds.Ranks | Auto = Field("auto", description="ranks in the run")
    rank: bounds.Rank | Auto = Field("auto", description="set only when starting ranks yourself")
    num_nodes: bounds.Nodes | Auto = Field("auto", description="machines in the run")
    node_rank: bounds.NodeRank | Auto = Field("auto", description="this machine's number")
    num_gpus_per_node: bounds.RanksPerNode | Auto = Field("auto", description="ranks on each machine")
    device_ids: tuple[bounds.Gpu, ...] | None = Field(
        None, max_length=bounds.MOST_ENTRIES, description="GPUs of this machine, one per local rank"
    )
    master_addr: Variable = Field("auto", description="host of rank 0")
    master_port: bounds.Port | Auto = Field("auto", description="a free port on that host")
    timeout: bounds.Seconds = Field(600.0, description="seconds a collective may wait")
    lost_after: bounds.SecondsOfSilence = Field(
        120.0, description="seconds of silence after which a rank that others wait for is lost"
    )
    on_init_failure: Literal["fail", "fallback"] = Field(
        "fail", description="fallback: rank 0 continues alone, the others exit 0"
    )
    launch_method: LaunchMethod = Field(
        "torchrun", description="how samestep launch starts the ranks, unless --via is given"
    )
    threads_per_rank: bounds.Cpus | Auto = Field(
        "auto",
        description="auto: OMP_NUM_THREADS if it is set, 1 for same: bits on CPUs, else each rank's "
        "share of its machine's CPUs",
    )
    network: dict[str, Variable] = Field(
        {},
        max_length=bounds.MOST_ENTRIES,
        description="NCCL_*, GLOO_* and TORCH_* variables; the environment takes precedence",
    )
    lane_weights: tuple[bounds.LaneWeight, ...] | None = Field(
        None, max_length=bounds.MOST_RANKS, description="share of the lanes per rank, for uneven machines"
    )
    shard: Literal["none", "optimizer", "weights"] = Field(
        "none",
        description="optimizer: each rank holds the optimizer states and summed gradients of its own parameters; "
        "weights: and their weights, which the other ranks hold only while a block of the model runs",
    )
    shard_blocks: tuple[str, ...] = Field(
        (),
        max_length=bounds.MOST_ENTRIES,
        description="modules whose weights are gathered together (shard: weights), as patterns of names such as "
        "layers.*; the children of the largest ModuleList or Sequential unless given",
    )
    find_unused_parameters: bool = Field(False, description="some parameters are not used in every step or lane")
    sync_batchnorm: bool = Field(False, description="SyncBatchNorm over the ranks (same: samples, on GPUs)")
    broadcast_buffers: bool = Field(True, description="buffers become rank 0's after every step (same: samples)")
    gradient_as_bucket_view: bool = Field(
        True, description="DistributedDataParallel's option (same: rounding, samples)"
    )
    static_graph: bool = Field(False, description="DistributedDataParallel's option (same: rounding, samples)")

    @property
    def shares_gpus(self) -> bool:
        """Return whether `network` lets several ranks share a GPU over nccl, as tests of nccl on one GPU do."""
        return self.network.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"

    def validate(self) -> Validation:  # type: ignore[override]
        """Check this section for contradictions; reports all of them, not only the first.

        Example:
            >>> validation = DistributedConfig(rank=4, world_size=4).validate()
            >>> bool(validation), validation.reasons
            (False, ('distributed.rank: rank 4 does not fit world_size 4: ranks run from 0 to 3',))
        """
        return Validation(tuple(str(mistake) for mistake in self.mistakes()))

    def mistakes(self) -> list[Mistake]:
        """Return the contradictions within this section."""
        found: list[Mistake] = []

        def add(path: str, message: str) -> None:
            found.append(Mistake(f"distributed.{path}", message))

        if self.rank != "auto":
            if self.world_size == "auto":
                add("rank", f"you set rank {self.rank} without world_size: set both")
            elif self.rank >= self.world_size:
                add(
                    "rank",
                    f"rank {self.rank} does not fit world_size {self.world_size}: "
                    f"ranks run from 0 to {self.world_size - 1}",
                )
        node, nodes = self.node_rank, self.num_nodes
        if node != "auto" and nodes != "auto" and node >= nodes:
            add("node_rank", f"node_rank {node} does not fit num_nodes {nodes}: nodes run from 0 to {nodes - 1}")
        if nodes != "auto" and self.world_size != "auto" and nodes > self.world_size:
            add("num_nodes", f"{nodes} nodes for world_size {self.world_size}: one rank a node")
        elif "auto" not in (self.world_size, self.num_nodes, self.num_gpus_per_node):
            ranks = int(self.num_nodes) * int(self.num_gpus_per_node)
            if ranks != self.world_size:
                add(
                    "world_size",
                    f"you set world_size {self.world_size}, but {self.num_nodes} "
                    f"nodes x {self.num_gpus_per_node} ranks are {ranks}",
                )
        if self.enabled is False and self.world_size not in ("auto", 1):
            add("enabled", f"false contradicts world_size {self.world_size}: set enabled: true, or world_size: 1")
        if self.device == "cpu" and self.backend == "nccl":
            add("backend", "nccl needs GPUs but device is cpu: set backend: gloo or device: auto")
        if self.device_ids is not None:
            if len(set(self.device_ids)) != len(self.device_ids):
                add("device_ids", f"{list(self.device_ids)} names a GPU twice: one GPU per rank")
            if self.device == "cpu":
                add("device_ids", "names GPUs but device is cpu: remove one of the two")
        for name in self.network:
            if not name.startswith(_NETWORK):
                add("network", f"{name} is none of {', '.join(p + '*' for p in _NETWORK)}")
        if self.lane_weights is not None and self.world_size not in ("auto", len(self.lane_weights)):
            add(
                "lane_weights",
                f"{len(self.lane_weights)} weights for world_size {self.world_size}: give one weight per rank",
            )
        return found

    def to_env_dict(self) -> dict[str, str]:
        """Environment variables from which `from_env` builds this object again.

        Launch facts use the names every launcher knows (RANK, WORLD_SIZE, MASTER_ADDR ...), so
        that any PyTorch program can be started with them; the rest use ours.
        """
        variables: dict[str, str] = {}
        for name, value in self.model_dump(exclude_defaults=True, mode="json").items():
            text = value if isinstance(value, str) else json.dumps(value)
            variables[_variable(name)] = text
        return variables

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> DistributedConfig:
        """Return the section that environment variables describe.

        Args:
            environ: the variables; by default those of this process.

        Raises:
            ConfigError: if a variable has an invalid value.
        """
        environ = process_environment() if environ is None else environ
        values: dict[str, Any] = {}
        for name, field in cls.model_fields.items():
            text = environ.get(_variable(name))
            if text is not None:
                values[name] = text if field.annotation is str else _decode(text)
        try:
            return cls(**values)
        except ValidationError as error:
            wrong: dict[str, str] = {}
            for found in error.errors():
                wrong.setdefault(str(found["loc"][0]), found["msg"])
            raise ConfigError(
                "the environment", [Mistake(_variable(name), message) for name, message in wrong.items()]
            ) from None


def _variable(name: str) -> str:
    return _STANDARD_NAMES.get(name, _PREFIX + name.upper())


def _decode(text: str) -> Any:
    try:
        return parse_json(text)
    except TextError:
        return text
