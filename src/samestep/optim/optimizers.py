"""Optimizers by name: which parameters get which, with which rate and decay, in which form."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter
from torch.optim import Optimizer

from samestep.config.names import Named, Takes, arguments_of, classes_of, closest, optimizer_mistakes, with_tuples
from samestep.config.optim import GroupConfig, OptimizerConfig
from samestep.errors import ConfigError, Mistake, TaskError

_WRONG_ARGUMENT = (ValueError, TypeError, RuntimeError, IndexError, KeyError)
"""What constructors of torch.optim raise at values they do not like."""
_NORM = re.compile(r"Norm(?![a-z])")
"""In the name of a class that normalises: BatchNorm2d, LayerNorm, LlamaRMSNorm."""


def build_optimizers(section: OptimizerConfig, modules: Sequence[nn.Module], device: torch.device) -> list[Optimizer]:
    """Return the optimizers that a config names, over the parameters of a model and of extra modules.

    Names of parameters are the model's own; those of the first extra module begin with
    `extra.0.`, of the second with `extra.1.`. The modules are moved to the device.
    """
    for module in modules:
        module.to(device)
    named = _named_parameters(modules)
    rules, mistakes = _rules(section)
    mistakes += _pattern_mistakes(section, named)
    _refuse(mistakes)
    parts = _parts(section, rules, [entry for entry in named if entry.param.requires_grad])
    if not parts:
        raise TaskError("optimizer: no parameter of the model requires a gradient")
    forms = [_form(rule, section.implementation, part, device) for rule, part in parts]
    _refuse([form for form in forms if isinstance(form, Mistake)])
    found = [
        _construct(rule, part, form)
        for (rule, part), form in zip(parts, forms, strict=True)
        if not isinstance(form, Mistake)
    ]
    _refuse([item for item in found if isinstance(item, Mistake)])
    return [item for item in found if isinstance(item, Optimizer)]


def describe_optimizer(optimizer: Optimizer) -> str:
    """Describes its class, form and size."""
    form = next((f for f in ("fused", "foreach") if optimizer.defaults.get(f)), "plain")
    groups = optimizer.param_groups
    tensors = sum(len(group["params"]) for group in groups)
    return f"{type(optimizer).__name__} ({form}) of {tensors} tensor(s) in {len(groups)} group(s)"


def _refuse(mistakes: Sequence[Mistake]) -> None:
    if mistakes:
        raise ConfigError("the optimizer section", list(dict.fromkeys(mistakes)))


# -- what is configured ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Rule:
    """The treatment of the parameters of one entry of the section."""

    path: str
    kind: type[Optimizer]
    lr: float
    weight_decay: float | None
    """None where the class knows no weight decay."""
    args: Mapping[str, Any]

    @property
    def takes(self) -> Takes:
        return arguments_of(self.kind, ())


def _rules(section: OptimizerConfig) -> tuple[list[_Rule], list[Mistake]]:
    """Return the section's own rule, then its groups'; or what is wrong with them."""
    classes = classes_of(torch.optim, Optimizer)
    known = {key: Named(k.__name__, arguments_of(k, ())) for key, k in classes.items()}
    mistakes = optimizer_mistakes(section, known)
    wrong = {mistake.path for mistake in mistakes}
    rules: list[_Rule] = []
    for path, entry in _entries(section):
        name = section.name if entry.name is None else entry.name
        inherited = section.args if name.lower() == section.name.lower() else {}
        if not any(found.startswith(_parts_of(path)) for found in wrong) and name.lower() in classes:
            rules.append(_rule(path, classes[name.lower()], entry, section, inherited))
    return rules, mistakes + [mistake for rule in rules for mistake in _value_mistakes(rule)]


def _entries(section: OptimizerConfig) -> Iterator[tuple[str, OptimizerConfig | GroupConfig]]:
    yield "optimizer", section
    for number, group in enumerate(section.groups):
        yield f"optimizer.groups[{number}]", group


def _parts_of(path: str) -> tuple[str, ...]:
    """Return what is an entry's own, and not its groups'."""
    return tuple(f"{path}.{key}" for key in ("name", "args", "weight_decay"))


def section_mistakes(section: OptimizerConfig) -> list[Mistake]:
    """Return what is wrong in the section, whatever the model: names, arguments and their values."""
    return _rules(section)[1]


def _rule(
    path: str,
    kind: type[Optimizer],
    entry: OptimizerConfig | GroupConfig,
    section: OptimizerConfig,
    inherited: Mapping[str, Any],
) -> _Rule:
    """Return a rule; a group has the section's rate and decay."""
    takes = arguments_of(kind, ())
    decay: float | None = None
    if "weight_decay" in takes:
        wanted = section.weight_decay if entry.weight_decay is None else entry.weight_decay
        decay = float(takes["weight_decay"].default) if wanted is None else wanted
    args = with_tuples({**inherited, **entry.args})
    return _Rule(path, kind, section.lr if entry.lr is None else entry.lr, decay, args)


def _value_mistakes(rule: _Rule) -> list[Mistake]:
    """Values that the class refuses, found by making one."""
    try:
        rule.kind([_sample(torch.float32, torch.device("cpu"))], lr=rule.lr, **rule.args)  # type: ignore[call-arg]
    except _WRONG_ARGUMENT as error:
        name, given = rule.kind.__name__, dict(rule.args)
        return [Mistake(f"{rule.path}.args", f"{name} refuses {given}: {error}")]
    return []


# -- which parameters ----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Named:
    """A parameter and all its names; a shared one has several."""

    param: Parameter
    names: tuple[str, ...]
    in_norm: bool

    def matches(self, patterns: Sequence[str]) -> bool:
        return any(fnmatchcase(name, pattern) for name in self.names for pattern in patterns)

    @property
    def is_bias(self) -> bool:
        lasts = [name.rpartition(".")[2] for name in self.names]
        return self.param.dim() == 1 and any("bias" in last.split("_") for last in lasts)

    def escapes_decay(self, rules: Sequence[str]) -> bool:
        patterns = [rule for rule in rules if rule not in _WORDS]
        by_word = ("bias" in rules and self.is_bias) or ("norm" in rules and self.in_norm)
        return by_word or self.matches(patterns)


_WORDS = ("bias", "norm")
"""Rules of no_decay that are not patterns."""


def _named_parameters(modules: Sequence[nn.Module]) -> list[_Named]:
    names: dict[Parameter, list[str]] = {}
    norms: set[Parameter] = set()
    for number, module in enumerate(modules):
        prefix = f"extra.{number - 1}." if number else ""
        for name, param in module.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(prefix + name)
        for inner in module.modules():
            if any(_NORM.search(kind.__name__) for kind in type(inner).__mro__):
                norms.update(inner.parameters(recurse=False))
    return [_Named(param, tuple(found), param in norms) for param, found in names.items()]


def _pattern_mistakes(section: OptimizerConfig, named: Sequence[_Named]) -> Iterator[Mistake]:
    free = list(named)
    for number, group in enumerate(section.groups):
        path = f"optimizer.groups[{number}].match"
        wrong = [m for pattern in group.match for m in _unmatched(path, pattern, named)]
        mine = [entry for entry in free if entry.matches(group.match)]
        free = [entry for entry in free if not entry.matches(group.match)]
        yield from wrong
        if not wrong and not any(entry.param.requires_grad for entry in mine):
            yield Mistake(path, "groups before it have all that it matches: put it before them")
    for pattern in section.no_decay:
        if pattern not in _WORDS:
            yield from _unmatched("optimizer.no_decay", pattern, named)


def _unmatched(path: str, pattern: str, named: Sequence[_Named]) -> Iterator[Mistake]:
    matched = [entry for entry in named if entry.matches([pattern])]
    if not matched:
        near = closest(pattern, [name for entry in named for name in entry.names])
        yield Mistake(path, f"no parameter is called {pattern!r}: there are {near}, ...")
    elif not any(entry.param.requires_grad for entry in matched):
        yield Mistake(path, f"every parameter that {pattern!r} matches is frozen")


_Part = list[tuple[_Rule, float | None, list[_Named]]]
"""Parameter groups of one optimizer: their rule, their weight decay, their parameters."""


def _parts(section: OptimizerConfig, rules: Sequence[_Rule], named: Sequence[_Named]) -> list[tuple[_Rule, _Part]]:
    """Parameter groups, put together where class and arguments are the same."""
    main, *of_groups = rules
    owners: dict[str, list[_Named]] = {rule.path: [] for rule in rules}
    for entry in named:
        chosen = (rule for rule, group in zip(of_groups, section.groups, strict=True) if entry.matches(group.match))
        owners[next(chosen, main).path].append(entry)
    found: list[tuple[_Rule, _Part]] = []
    for rule in rules:
        groups = _by_decay(rule, owners[rule.path], section.no_decay)
        alike = (p for r, p in found if (r.kind, r.args) == (rule.kind, rule.args))
        part = next(alike, None)
        if part is not None:
            part += groups
        elif groups:
            found.append((rule, groups))
    return found


def _by_decay(rule: _Rule, named: Sequence[_Named], no_decay: Sequence[str]) -> _Part:
    decay = rule.weight_decay
    without = [entry for entry in named if decay and entry.escapes_decay(no_decay)]
    rest = [entry for entry in named if entry not in without]
    both: _Part = [(rule, decay, rest), (rule, 0.0, without)]
    return [group for group in both if group[2]]


# -- in which form -------------------------------------------------------------------------


def _form(rule: _Rule, implementation: str, part: _Part, device: torch.device) -> dict[str, bool] | Mistake:
    """Return the arguments that choose the form, or why there is no such form."""
    takes, name = rule.takes, rule.kind.__name__
    off = {flag: False for flag in ("fused", "foreach") if flag in takes}
    if implementation == "plain":
        return off
    if implementation == "foreach":
        if "foreach" in takes:
            return {"foreach": True}
        return Mistake("optimizer.implementation", f"{name} has no foreach form: set auto")
    problem = _fused_problem(rule, part, device)
    if problem is None:
        return {"fused": True}
    if implementation == "fused":
        return Mistake("optimizer.implementation", f"{problem}: set auto")
    if device.type != "cuda":
        return off
    # Capturable, so that a step replayed as a CUDA graph has the bits of one that is not.
    wanted = {"foreach": True, "capturable": True, **rule.args}
    return {flag: wanted[flag] for flag in ("foreach", "capturable") if flag in takes}


def _fused_problem(rule: _Rule, part: _Part, device: torch.device) -> str | None:
    """Return why a fused form cannot be used, found by trying it: which devices have it differs."""
    if "fused" not in rule.takes:
        return f"{rule.kind.__name__} has no fused form"
    for dtype in sorted({entry.param.dtype for _, _, named in part for entry in named}, key=str):
        try:
            rule.kind([_sample(dtype, device)], fused=True, **rule.args).step()  # type: ignore[call-arg]
        except (RuntimeError, NotImplementedError) as error:
            return f"{rule.kind.__name__} has no fused form for {dtype} on {device.type} ({error})"
    return None


def _sample(dtype: torch.dtype, device: torch.device) -> Parameter:
    # Of two dimensions, since there are optimizers that take nothing else.
    sample = Parameter(torch.zeros((1, 1), dtype=dtype, device=device))
    sample.grad = torch.zeros_like(sample)
    return sample


def _construct(rule: _Rule, part: _Part, form: Mapping[str, bool]) -> Optimizer | Mistake:
    groups: list[dict[str, Any]] = []
    for its_rule, decay, named in part:
        own = {} if decay is None else {"weight_decay": decay}
        groups.append({"params": [entry.param for entry in named], "lr": its_rule.lr, **own})
    try:
        return rule.kind(groups, **{**rule.args, **form})
    except _WRONG_ARGUMENT as error:
        names = [entry.names[0] for _, _, named in part for entry in named if _refuses(rule, entry)]
        return Mistake(rule.path, f"{rule.kind.__name__} refuses {', '.join(names[:8])}: {error}")


def _refuses(rule: _Rule, entry: _Named) -> bool:
    try:
        rule.kind([entry.param], **rule.args)
    except _WRONG_ARGUMENT:
        return True
    return False
