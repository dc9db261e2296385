"""A frozen model whose layers are decomposed: passes with masked components, and the losses of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from components import Components, components_of, is_decomposable, unfaithfulness
from importance import importance_of, lower_leaky, upper_leaky
from losses import (
    RECONSTRUCTIONS,
    Importances,
    LayerMasks,
    Masks,
    importance_masks,
    minimality,
    output_error,
    stochastic_masks,
)
from torch import Tensor, nn
from torch.optim import AdamW

from samestep.errors import TaskError

Hook = Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor | None]


@dataclass(frozen=True)
class Seen:
    """What the frozen model does with a batch, and what of it is needed."""

    output: Tensor
    lower: Importances
    """Importances for masks."""
    upper: Importances
    """Importances for sparsity."""

    @property
    def positions(self) -> int:
        """Samples; of a language model tokens."""
        return next(iter(self.lower.values()))[..., 0].numel()


@dataclass(frozen=True)
class LossSettings:
    """What the losses of a batch depend on besides it."""

    losses: Sequence[str]
    power: float
    beta: float
    lanes: int


class DecomposedModel(nn.Module):
    """Components and importance functions for layers of a frozen model.

    Args:
        target: the model; it is frozen here.
        counts: how many components, by patterns of layers' names; the first that matches counts.
        importance: the kind of the importance functions.
        hidden: the width of their networks.
        tied: pairs of layers; the second has the components of the first, transposed.
        error: of outputs, mse or kl.
        delta: whether what the components leave over is masked, too; else it is left out.
    """

    def __init__(
        self,
        target: nn.Module,
        counts: Mapping[str, int],
        importance: str,
        hidden: int,
        tied: Sequence[Sequence[str]] = (),
        error: Literal["mse", "kl"] = "mse",
        delta: bool = True,
    ) -> None:
        super().__init__()
        self.target = target.requires_grad_(False).eval()
        self.error, self.delta = error, delta
        self.names = _chosen(target, counts)
        sources = _sources(tied, self.names)
        made: dict[str, Components] = {}
        for name in sorted(self.names, key=lambda one: one in sources):
            source = made[sources[name]] if name in sources else None
            made[name] = components_of(target.get_submodule(name), self.names[name], source)
        self.components = nn.ModuleDict({_key(name): made[name] for name in self.names})
        self.importance = nn.ModuleDict(
            {
                _key(name): importance_of(importance, one.rows, one.count, hidden, one.is_embedding)
                for name, one in ((name, made[name]) for name in self.names)
            }
        )

    def train(self, mode: bool = True) -> DecomposedModel:
        super().train(mode)
        self.target.eval()  # frozen: no dropout, no statistics
        return self

    def pairs(self) -> Iterator[tuple[nn.Module, Components]]:
        """Yield the layers, each with its components."""
        for name in self.names:
            yield self.target.get_submodule(name), self.components_for(name)

    def components_for(self, name: str) -> Components:
        found: Any = self.components[_key(name)]
        return found

    def see(self, x: Tensor) -> Seen:
        """Return the frozen model's output, and the importance of each component at each position."""
        inputs: dict[str, Tensor] = {}

        def watch(name: str) -> Hook:
            def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
                inputs[name] = args[0]

            return hook

        with torch.no_grad(), self._hooked(self.names, watch):
            output = self.target(x)
        raw = {
            name: self.importance[_key(name)](inputs[name], self.components_for(name).inner(inputs[name]))
            for name in self.names
        }
        return Seen(
            output,
            {name: lower_leaky(value) for name, value in raw.items()},
            {name: upper_leaky(value) for name, value in raw.items()},
        )

    def masked(self, x: Tensor, masks: LayerMasks) -> Tensor:
        """Return the output with these layers computed by their masked components."""

        def replace(name: str) -> Hook:
            components, one = self.components_for(name), masks[name]

            def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
                bias: Tensor | None = getattr(module, "bias", None)
                found: Tensor = components(args[0], output, bias, one.mask, one.delta)
                if one.routed is None:
                    return found
                return torch.where(one.routed.unsqueeze(-1), found, output)

            return hook

        with self._hooked(masks, replace):
            output: Tensor = self.target(x)
        return output

    @contextmanager
    def _hooked(self, names: Mapping[str, Any], make: Callable[[str], Hook]) -> Iterator[None]:
        handles = [self.target.get_submodule(name).register_forward_hook(make(name)) for name in names]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def masks(self, kind: str, importances: Importances) -> dict[str, Masks]:
        """Masks of a kind, for all layers."""
        if kind == "stochastic":
            return stochastic_masks(importances, self.delta)
        if kind == "importance":
            return importance_masks(importances)
        made: Mapping[str, Callable[[Tensor], Tensor]] = {
            "rounded": lambda needed: (needed > 0.5).to(needed.dtype),
            "ones": torch.ones_like,
            "zeros": torch.zeros_like,
            "random": torch.rand_like,
        }
        return {name: Masks(made[kind](needed)) for name, needed in importances.items()}

    def forward(self, x: Tensor, settings: LossSettings) -> dict[str, tuple[Tensor, float]]:
        """Return the losses of a batch by name, each a sum with its count.

        All of them in one call, by which DistributedDataParallel knows of every parameter that is used.
        """
        seen = self.see(x)
        positions = seen.positions
        count = seen.output.numel() if self.error == "mse" else positions

        def reconstruct(masks: LayerMasks) -> Tensor:
            return output_error(self.error, self.masked(x, masks), seen.output)

        found: dict[str, tuple[Tensor, float]] = {}
        for name in settings.losses:
            if name == "minimality":
                found[name] = (minimality(seen.upper, settings.power, settings.beta, settings.lanes), positions)
            elif name == "faithfulness":
                found[name] = unfaithfulness(self.pairs()) * positions, positions
            else:
                kind, layers = RECONSTRUCTIONS[name]
                found[name] = layers(self.masks(kind, seen.lower), reconstruct), count
        return found


def warm_up(model: DecomposedModel, steps: int, lr: float, weight_decay: float) -> None:
    """Make the components add up to the weights before anything else is trained: no data is needed for that."""
    parameters = model.components.parameters()
    optimizer = AdamW(parameters, lr=lr, weight_decay=weight_decay, fused=True)
    with torch.enable_grad():
        for _ in range(steps):
            optimizer.zero_grad()
            unfaithfulness(model.pairs()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    optimizer.zero_grad()


def _key(name: str) -> str:
    """Return a layer's name as that of a module, which has no dots."""
    return name.replace(".", "-")


def _chosen(target: nn.Module, counts: Mapping[str, int]) -> dict[str, int]:
    """Return how many components each layer has, by its name."""
    found, used = {}, set()
    for name, module in target.named_modules():
        pattern = next((one for one in counts if fnmatchcase(name, one)), None)
        if pattern is not None and is_decomposable(module):
            found[name] = counts[pattern]
            used.add(pattern)
    if missing := [pattern for pattern in counts if pattern not in used]:
        known = ", ".join(name for name, one in target.named_modules() if is_decomposable(one))
        raise TaskError(
            f"params.components: {', '.join(missing)} matches no layer that can be decomposed; there are {known}"
        )
    return found


def _sources(tied: Sequence[Sequence[str]], names: Mapping[str, int]) -> dict[str, str]:
    """By layer, the one whose components it has."""
    sources = {}
    for pair in tied:
        if len(pair) != 2 or not all(name in names for name in pair):
            raise TaskError(f"params.tied: {list(pair)} must be two layers that are decomposed: {', '.join(names)}")
        sources[pair[1]] = pair[0]
    if circular := [name for name in sources.values() if name in sources]:
        raise TaskError(f"params.tied: {circular[0]} is tied to a third layer")
    return sources
