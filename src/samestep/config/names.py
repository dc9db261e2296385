"""Finds mistakes in the `optimizer:` and `schedule:` sections, given the classes that there are. No torch here."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from samestep.config.lr_curves import CURVES, Curve, Every
from samestep.config.optim import GroupConfig, OptimizerConfig, ScheduleConfig
from samestep.errors import Mistake, TextError
from samestep.parsing.python_text import parse_python

Takes = Mapping[str, inspect.Parameter]
"""Arguments that a config can give, by name."""


@dataclass(frozen=True)
class Named:
    """A class's name, and all that it takes."""

    name: str
    takes: Takes


NamedClasses = Mapping[str, Named]
"""By their names in small letters."""


def arguments_of(target: Any, without: Iterable[str]) -> Takes:
    """Return what a class or function takes by name, but for what is given to it otherwise."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    found = inspect.signature(target).parameters
    return leave_out({n: p for n, p in found.items() if p.kind in kinds}, without)


def leave_out(takes: Takes, names: Iterable[str]) -> Takes:
    """Return the arguments without some of them."""
    left_out = set(names)
    return {name: parameter for name, parameter in takes.items() if name not in left_out}


def argument_mistakes(path: str, owner: str, takes: Takes, given: Mapping[str, Any]) -> list[Mistake]:
    """Arguments of a config that the owner does not take, and those that it cannot do without."""
    known = f"it takes {', '.join(takes)}" if takes else "it takes none"
    wrong = [Mistake(f"{path}.{name}", f"{owner} does not take it: {known}") for name in given if name not in takes]
    missing = [
        Mistake(f"{path}.{name}", f"{owner} cannot do without it: set it ({known})")
        for name, parameter in takes.items()
        if parameter.default is inspect.Parameter.empty and name not in given
    ]
    return wrong + missing


T = TypeVar("T")


def classes_of(module: ModuleType, base: type[T]) -> dict[str, type[T]]:
    """Return the classes of a module that extend `base`, by their names in small letters."""
    return {
        name.lower(): value
        for name, value in sorted(vars(module).items(), key=lambda item: item[0].lower())
        if isinstance(value, type) and issubclass(value, base) and value is not base
        if not name.startswith("_")
    }


def with_tuples(value: Any) -> Any:
    """Return the value with tuples for lists: a config file knows only lists."""
    if isinstance(value, list):
        return tuple(with_tuples(entry) for entry in value)
    if isinstance(value, Mapping):
        return {name: with_tuples(entry) for name, entry in value.items()}
    return value


def closest(word: str, choices: Sequence[str], shown: int = 4) -> str:
    """Return the choices most like a word, as text."""
    near = difflib.get_close_matches(word, choices, n=shown, cutoff=0.3) or list(choices[:shown])
    return ", ".join(near)


UNUSABLE = {
    "lbfgs": "it computes the loss several times in one step",
    "sparseadam": "it needs sparse gradients, and lanes are added up as dense ones",
}
KEYS_OF_THEIR_OWN = ("params", "lr", "weight_decay", "foreach", "fused", "differentiable")


def optimizer_mistakes(section: OptimizerConfig, known: NamedClasses) -> list[Mistake]:
    """Names that are no optimizer, and arguments that one does not take; nothing about values."""
    mistakes: list[Mistake] = []
    own = _find("optimizer.name", section.name, known, mistakes)
    if own is not None:
        mistakes += _entry_mistakes("optimizer", own, section, {})
    for number, group in enumerate(section.groups):
        path = f"optimizer.groups[{number}]"
        found = own
        if group.name is not None:
            found = _find(f"{path}.name", group.name, known, mistakes)
        if found is not None:
            inherited = section.args if found is own else {}
            mistakes += _entry_mistakes(path, found, group, inherited)
    return mistakes


def _find(path: str, name: str, known: NamedClasses, mistakes: list[Mistake]) -> Named | None:
    found = known.get(name.lower())
    if found is None:
        choices = ", ".join(k.name for key, k in known.items() if key not in UNUSABLE)
        mistakes.append(Mistake(path, f"there is no optimizer {name!r}: there are {choices}"))
    elif name.lower() in UNUSABLE:
        reason = UNUSABLE[name.lower()]
        mistakes.append(Mistake(path, f"{found.name} cannot be used here: {reason}"))
        return None
    return found


def _entry_mistakes(
    path: str, kind: Named, entry: OptimizerConfig | GroupConfig, inherited: Mapping[str, Any]
) -> list[Mistake]:
    takes = leave_out(kind.takes, KEYS_OF_THEIR_OWN)
    found = argument_mistakes(f"{path}.args", kind.name, takes, {**inherited, **entry.args})
    if entry.weight_decay is not None and "weight_decay" not in kind.takes:
        found.append(Mistake(f"{path}.weight_decay", f"{kind.name} has none: remove it"))
    return found


_BY_STEPS = ("onecyclelr", "cycliclr")
"""Schedulers of torch that are made to move on with every step."""
_WITH_OWN_RISE = ("one_cycle", "onecyclelr")
PLATEAU = ("plateau", "reducelronplateau")
_GIVEN = ("optimizer", "last_epoch", "length", "final", "cycle_momentum")
"""Arguments that are not the config's to give; momentum stays, since CUDA graphs bake it in."""


@dataclass(frozen=True)
class ScheduleKind:
    """The kind of a schedule: one of our curves, a scheduler of torch, or a constant rate."""

    name: str
    every: Every
    takes: Takes
    curve: Callable[..., Curve] | None = None

    @property
    def needs_length(self) -> bool:
        return self.curve is not None and "length" in arguments_of(self.curve, ())

    @property
    def takes_final(self) -> bool:
        in_curve = self.curve is not None and "final" in arguments_of(self.curve, ())
        return in_curve or self.name in PLATEAU


def schedule_kind(section: ScheduleConfig, known: NamedClasses) -> ScheduleKind | Mistake:
    """Return what the section's name refers to, or that it is no schedule."""
    name = section.name.lower()
    chosen: Every | None = None if section.every == "auto" else section.every
    if name == "constant":
        return ScheduleKind(name, "step", {})
    if name in CURVES:
        curve, every = CURVES[name]
        return ScheduleKind(name, chosen or every, arguments_of(curve, _GIVEN), curve)
    if name in PLATEAU:
        takes = leave_out(known[PLATEAU[1]].takes, (*_GIVEN, "mode", "min_lr"))
        return ScheduleKind(name, "evaluation", takes)
    of_torch = describable(known)
    if name not in of_torch:
        names = [named.name for named in of_torch.values()]
        choices = ", ".join(["constant", *CURVES, "plateau", *names])
        message = f"there is no schedule {section.name!r}: there are {choices}"
        return Mistake("schedule.name", message)
    every = "step" if name in _BY_STEPS else "epoch"
    return ScheduleKind(name, chosen or every, leave_out(of_torch[name].takes, _GIVEN))


def describable(known: NamedClasses) -> NamedClasses:
    """Schedulers that a config can describe: not what is made of functions or other schedulers."""
    return {
        key: named
        for key, named in known.items()
        if key not in PLATEAU and not {"lr_lambda", "schedulers"} & named.takes.keys()
    }


def schedule_mistakes(section: ScheduleConfig, known: NamedClasses) -> list[Mistake]:
    """Return a name that is no schedule, and keys that this one does not take; nothing about values."""
    kind = schedule_kind(section, known)
    if isinstance(kind, Mistake):
        return [kind]
    found = argument_mistakes("schedule.args", section.name, kind.takes, section.args)
    if section.final and not kind.takes_final:
        message = f"{section.name} does not take it: linear, cosine, warm_restarts and plateau do"
        found.append(Mistake("schedule.final", message))
    if kind.every == "evaluation" and section.every != "auto":
        message = f"{section.name} moves on with every evaluation: remove it"
        found.append(Mistake("schedule.every", message))
    if section.warmup and kind.name in _WITH_OWN_RISE:
        message = f"{section.name} rises by itself: remove it, and set schedule.args.pct_start"
        found.append(Mistake("schedule.warmup", message))
    return found


_OPTIMIZER, _SCHEDULER = "Optimizer", "LRScheduler"


@cache
def torch_optimizers() -> NamedClasses:
    """Those of torch.optim; none where its source cannot be read."""
    classes = {name: node for tree in _trees().values() for name, node in _classes(tree).items()}
    public = _trees().get("__init__", ast.Module([], []))
    imports = [node for node in public.body if isinstance(node, ast.ImportFrom)]
    names = {alias.asname or alias.name for node in imports for alias in node.names}
    return _named({name: classes[name] for name in names & classes.keys()}, classes, _OPTIMIZER)


@cache
def torch_schedulers() -> NamedClasses:
    """Those of torch.optim.lr_scheduler; none where its source cannot be read."""
    classes = _classes(_trees().get("lr_scheduler", ast.Module([], [])))
    return _named(classes, classes, _SCHEDULER)


@cache
def _trees() -> Mapping[str, ast.Module]:
    """Return the modules of torch.optim by name, parsed and not run."""
    spec = find_spec("torch")
    folders = [] if spec is None else spec.submodule_search_locations or []
    found: dict[str, ast.Module] = {}
    for path in sorted(path for folder in folders for path in Path(folder).glob("optim/*.py")):
        try:
            found[path.stem] = parse_python(path)
        except TextError:
            return {}  # then nothing is known, and nothing refused
    return found


def _classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _named(wanted: Mapping[str, ast.ClassDef], known: Mapping[str, ast.ClassDef], base: str) -> NamedClasses:
    found = {}
    for name in sorted(wanted, key=str.lower):
        family = _family(name, known)
        constructor = next((init for node in family if (init := _constructor(node))), None)
        public = not name.startswith("_") and name != base
        if public and constructor is not None and base in {node.name for node in family}:
            found[name.lower()] = Named(name, _takes(constructor))
    return found


def _family(name: str, known: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return a class and those that it extends, the nearest first."""
    family: list[ast.ClassDef] = []
    waiting = [name]
    while waiting:
        node = known.get(waiting.pop(0))
        if node is not None and node not in family:
            family.append(node)
            waiting += [base.id for base in node.bases if isinstance(base, ast.Name)]
    return family


def _constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    methods = [item for item in node.body if isinstance(item, ast.FunctionDef)]
    return next((method for method in methods if method.name == "__init__"), None)


def _takes(constructor: ast.FunctionDef) -> dict[str, inspect.Parameter]:
    found = constructor.args
    plain = [arg.arg for arg in found.args]
    optional = set(plain[len(plain) - len(found.defaults) :])
    optional |= {arg.arg for arg, default in zip(found.kwonlyargs, found.kw_defaults, strict=True) if default}
    kind, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    return {
        name: inspect.Parameter(name, kind, default=... if name in optional else empty)
        for name in [*plain[1:], *(arg.arg for arg in found.kwonlyargs)]
    }
