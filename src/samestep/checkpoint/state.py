"""The parts of a run's state, how they are put into a checkpoint and loaded back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from samestep.errors import CheckpointError

_SHOWN = 8
_CHOSEN = ("initial_lr", "lr", "weight_decay", "momentum", "betas", "eps")
"""What people choose of an optimizer's group."""
_MOVED = {"lr": "initial_lr", "momentum": "max_momentum", "betas": "max_momentum"}
"""Keys that a schedule may move, with the key that a group has then."""


@runtime_checkable
class Stateful(Protocol):
    """Anything whose state a run can save: it has `state_dict` and `load_state_dict`."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any: ...


class RunState:
    """The objects whose state a run saves.

    Args:
        kept: further objects by name, which the user or the config added.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        schedules: Sequence[LRScheduler],
        kept: Mapping[str, Stateful],
    ) -> None:
        self.modules, self.optimizers, self.schedules = modules, optimizers, schedules
        self.kept = kept
        self._model, *self._others = modules

    def model_tensors(self) -> dict[str, Tensor]:
        """Return the model's tensors by name; a shared one only once."""
        return stored_once(self._model.state_dict())

    def training(self) -> dict[str, Any]:
        """Everything but the model's tensors."""
        state = self._model.state_dict()
        return {
            "model": {k: v for k, v in state.items() if not isinstance(v, Tensor)},
            "shared": _without_shared(state)[1],
            "modules": [module.state_dict() for module in self._others],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "schedules": [schedule.state_dict() for schedule in self.schedules],
            "kept": {name: item.state_dict() for name, item in self.kept.items()},
        }

    def load(
        self,
        tensors: Mapping[str, Tensor],
        training: Mapping[str, Any],
        owns: Callable[[Tensor], bool] = lambda param: True,
    ) -> None:
        """Load a checkpoint's state into these objects.

        Args:
            owns: Returns whether this rank holds the optimizer state of a parameter.

        Raises:
            CheckpointError: with everything that does not fit.
        """
        require(training, "model", "shared", "modules", "optimizers", "schedules")
        mistakes = [*_shape_mistakes(self._model, tensors, training["model"])]
        shared = _without_shared(self._model.state_dict())[1]
        if shared != training["shared"]:
            mistakes.append(
                f"tensors that share their memory: {shared or 'none'} here, "
                f"{training['shared'] or 'none'} in the checkpoint"
            )
        for what, here, saved in (
            ("modules besides the model", self._others, training["modules"]),
            ("optimizers", self.optimizers, training["optimizers"]),
            ("schedules", self.schedules, training["schedules"]),
        ):
            if len(here) != len(saved):
                mistakes.append(f"{what}: {len(here)} here, {len(saved)} in the checkpoint")
        if mistakes:
            shown = [*mistakes[:_SHOWN], *(["..."] if len(mistakes) > _SHOWN else [])]
            raise CheckpointError("the checkpoint does not fit this task's objects:\n  - " + "\n  - ".join(shown))
        state = self._model.state_dict()
        held = {name: value for name, value in tensors.items() if _has_memory(state[name])}
        self._model.load_state_dict({**held, **training["model"]}, strict=False)
        for module, state in zip(self._others, training["modules"], strict=True):
            _load("a module besides the model", module, state)
        for optimizer, saved in zip(self.optimizers, training["optimizers"], strict=True):
            state = _owned(optimizer, saved, owns)
            _load("an optimizer", optimizer, state)
            _keep_types(optimizer, state)
        for schedule, state in zip(self.schedules, training["schedules"], strict=True):
            _load("a schedule", schedule, state)


Settings = list[list[dict[str, Any]]]
"""By optimizer and group, what was chosen."""


def settings_of(optimizers: Sequence[Optimizer]) -> Settings:
    """Return what optimizers were made with, or have been given by a checkpoint."""
    return [
        [{name: group[name] for name in _CHOSEN if name in group} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def changed_settings(optimizers: Sequence[Optimizer], made: Settings) -> list[str]:
    """Return where optimizers that have loaded a checkpoint are other than they were made."""
    found = []
    for optimizer, before in zip(optimizers, made, strict=True):
        for number, (group, chosen) in enumerate(zip(optimizer.param_groups, before, strict=True)):
            for name, value in chosen.items():
                if _MOVED.get(name) in group or group.get(name) == value:
                    continue
                of = f"{type(optimizer).__name__}{f' (group {number})' if number else ''}"
                what = "lr" if name == "initial_lr" else name
                found.append(f"{of}: {what} is {group.get(name)}, and not {value}")
    return found


def require(training: Mapping[str, Any], *names: str) -> None:
    """Raise a `CheckpointError` unless a checkpoint's state has all of these parts."""
    missing = [name for name in names if name not in training]
    if missing:
        raise CheckpointError(f"its training state lacks {', '.join(missing)}")


def stored_once(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state by name; of those that share all their memory, only the first."""
    return _without_shared(state)[0]


def _without_shared(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors by name, one of those that share all their memory; and for each other one its name."""
    seen: dict[tuple[Any, ...], str] = {}
    found: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    for name, value in state.items():
        if isinstance(value, Tensor):
            memory = value.data_ptr() if _has_memory(value) else value.untyped_storage()._cdata
            place = (value.device, memory, tuple(value.shape), value.stride())
            if value.numel() and place in seen:
                shared[name] = seen[place]
            else:
                found[name] = value
                seen[place] = name
    return found, shared


def _shape_mistakes(model: nn.Module, tensors: Mapping[str, Tensor], extra: Mapping[str, Any]) -> list[str]:
    everything = model.state_dict()
    here = stored_once(everything)
    without_tensor = {k for k, v in everything.items() if not isinstance(v, Tensor)}
    missing = (here.keys() - tensors.keys()) | (without_tensor - extra.keys())
    mistakes = [f"{name} is not in the checkpoint" for name in sorted(missing)]
    unknown = (tensors.keys() | extra.keys()) - everything.keys()
    mistakes += [f"{name} is only in the checkpoint" for name in sorted(unknown)]
    for name in sorted(here.keys() & tensors.keys()):
        now, saved = here[name], tensors[name]
        if now.shape != saved.shape or now.dtype != saved.dtype:
            mistakes.append(
                f"{name} is {tuple(now.shape)} {_type(now)}, in the checkpoint {tuple(saved.shape)} {_type(saved)}"
            )
    return mistakes


def _has_memory(tensor: Tensor) -> bool:
    """Return whether this rank holds a tensor of a model that was built on the meta device."""
    return tensor.untyped_storage().nbytes() > 0


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _load(what: str, target: Stateful, state: dict[str, Any]) -> None:
    try:
        target.load_state_dict(state)
    except (ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        kind = type(target).__name__
        raise CheckpointError(f"the state of {what} does not fit this {kind}: {error}") from error


def _owned(optimizer: Optimizer, saved: dict[str, Any], owns: Callable[[Tensor], bool]) -> dict[str, Any]:
    """Return a copy of the saved state without that of parameters that other ranks own: a device need not hold it.

    A copy, since tensors may still be in a file, and one by one: memory for both is not needed.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    others = {index for index, param in enumerate(params) if not owns(param)}
    kept = {
        index: {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in saved["state"].pop(index).items()
        }
        for index in [*saved["state"]]
        if index not in others
    }
    return {**saved, "state": kept}


def _keep_types(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Undo the cast of state to the parameter's type: moments of bf16 weights stay float32."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, entries in saved["state"].items():
        for key, value in entries.items():
            loaded = optimizer.state[params[index]].get(key)
            if isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                optimizer.state[params[index]][key] = value.to(loaded.device)


def complete_model_state(tensors: Mapping[str, Tensor], training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the model's state_dict out of a checkpoint: shared tensors under each of their names."""
    require(training, "shared", "model")
    unknown = [name for name, first in training["shared"].items() if first not in tensors]
    if unknown:
        raise CheckpointError(f"{', '.join(map(str, unknown))} shares memory with nothing in it")
    shared = {name: tensors[first] for name, first in training["shared"].items()}
    return {**tensors, **shared, **training["model"]}
