"""Everything of a run's state as tensors by name: what verify compares bit for bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from samestep.checkpoint.state import RunState
from samestep.reduce.owners import is_held

MODULES = ("model.", "extra")
"""How the names of weights and buffers begin; those of other states begin differently."""


def state_tensors(state: RunState) -> dict[str, Tensor]:
    """Return every tensor, number and text of a run's state, by name; nothing is copied.

    Weights and buffers are `model.NAME` and, of the other modules, `extra0.NAME`; then
    `optimizer0.NAME.KEY`, `schedule0.KEY` and `kept.NAME.KEY`. Buffers that no state dict holds
    are left out, as in a checkpoint: they are constants, or caches that may grow on each rank.
    """
    found: dict[str, Tensor] = {}
    for name, module in named_modules(state.modules):
        found.update((f"{name}.{key}", value) for key, value in module_tensors(module).items())
    found |= optimizer_tensors(state.modules, state.optimizers)
    for number, schedule in enumerate(state.schedules):
        found.update(leaf_tensors(f"schedule{number}", schedule.state_dict()))
    for name, item in state.kept.items():
        found.update(leaf_tensors(f"kept.{name}", item.state_dict()))
    return {name: tensor for name, tensor in found.items() if is_held(tensor)}


def named_modules(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return the model and the other prepared modules, as a record names them."""
    names = ["model", *(f"extra{number}" for number in range(len(modules) - 1))]
    return list(zip(names, modules, strict=True))


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's parameters and the buffers of its state, by name."""
    # Both: a module's own state_dict may leave frozen parameters out.
    return {**dict(leaf_tensors("", module.state_dict())), **dict(module.named_parameters())}


def parameter_names(modules: Sequence[nn.Module]) -> dict[int, str]:
    """Return the name of every parameter, by its id; without `model.` for those of the model."""
    return {
        id(param): name if prefix == "model" else f"{prefix}.{name}"
        for prefix, module in reversed(named_modules(modules))
        for name, param in module.named_parameters()
    }


def optimizer_tensors(modules: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> dict[str, Tensor]:
    """Return what optimizers hold: their states and rates, and parameters that no module has."""
    names = parameter_names(modules)
    found: dict[str, Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        position = 0
        for index, group in enumerate(optimizer.param_groups):
            settings = {key: value for key, value in group.items() if key != "params"}
            found.update(leaf_tensors(f"optimizer{number}.group{index}", settings))
            for param in group["params"]:
                name = names.get(id(param), f"parameter-{position}")
                position += 1
                if id(param) not in names:
                    found[f"optimizer{number}.{name}"] = param
                found.update(leaf_tensors(f"optimizer{number}.{name}", optimizer.state.get(param, {})))
    return found


def leaf_tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors, numbers and texts inside a state, each as a tensor; anything else is skipped."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        yield name, torch.from_numpy(np.ascontiguousarray(value))
    elif isinstance(value, (int, float, np.number)):
        yield name, _number(value)
    elif isinstance(value, str):
        yield name, text_tensor(value)
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from leaf_tensors(f"{name}.{key}" if name else str(key), inner)
    elif isinstance(value, (list, tuple)):
        if value and all(isinstance(item, float) for item in value):
            yield name, torch.tensor(value, dtype=torch.float64)
            return
        for index, inner in enumerate(value):
            yield from leaf_tensors(f"{name}.{index}", inner)


def _number(value: Any) -> Tensor:
    if isinstance(value, (float, np.floating)):
        return torch.tensor(float(value), dtype=torch.float64)
    number = int(value)
    return torch.tensor(number) if abs(number) < 2**63 else text_tensor(str(number))


def text_tensor(text: str) -> Tensor:
    """Return a text as its bytes."""
    return torch.tensor(list(text.encode("utf-8", "surrogatepass")), dtype=torch.uint8)


def digest_of(tensor: Tensor) -> str:
    """Return a digest of a tensor's type, shape and bits."""
    tensor = dense(tensor)
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def dense(tensor: Tensor) -> Tensor:
    """Return a tensor in the host's memory, in one piece."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    return tensor.cpu().resolve_conj().resolve_neg().contiguous()
