"""The architecture of docs/structure.md, kept by reading the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import samestep

SOURCE = Path(samestep.__file__).parent

# A package imports only from the layers listed before its own.
LAYERS: list[set[str]] = [
    {"errors", "version", "words"},
    {"parsing", "losses", "tracebacks"},
    {"pytree", "lanes", "environment"},
    {"config"},
    {"checkpoint", "distributed"},
    {"report"},
    {"reduce", "launch"},
    {"optim"},
    {"run_setup"},
    {"data"},
    {"step"},
    {"evaluation"},
    {"tracking"},
    {"run"},
    {"train"},
    {"amp", "models"},
    {"bench", "verify", "sweep"},
    {"check"},
    {"cli"},
]

MAY_USE_TORCH_DISTRIBUTED = ("distributed", "reduce", "launch.run")
MAY_READ_THE_ENVIRONMENT = ("environment",)
MAY_READ_JSON_OF_OTHER_PROCESSES = ("distributed.rendezvous", "distributed.health")
MAY_UNPICKLE = ("distributed.objects",)  # what is signed
WITHOUT_EAGER_TORCH = (
    "errors",
    "version",
    "parsing",
    "environment",
    "config",
    "launch.commands",
    "report",
    "check.code",
    "sweep",
    "cli",
)


def modules() -> dict[str, ast.Module]:
    return {name_of(path): tree_of(path) for path in sorted(SOURCE.rglob("*.py"))}


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def package_of(module: str) -> str:
    return module.partition(".")[0]


def layer_of(module: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if package_of(module) in layer)


def is_inside(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def imports_of(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """Modules of ours that some code imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "samestep":
            home = str(node.module).removeprefix("samestep").lstrip(".")
            for alias in node.names:
                full = f"{home}.{alias.name}".lstrip(".")
                yield full if full in known else home
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("samestep."):
                    yield alias.name.removeprefix("samestep.")


def import_graph() -> dict[str, set[str]]:
    found = modules()
    return {name: set(imports_of(tree, set(found))) - {name} for name, tree in found.items()}


def test_every_package_has_a_layer() -> None:
    packages = {package_of(name) for name in modules()} - {"", "__main__"}
    assert packages == set().union(*LAYERS)


@pytest.mark.requirement("001-G-5", "001-D-8")
def test_imports_point_to_lower_layers() -> None:
    upward = [
        f"{name} imports {other}"
        for name, others in import_graph().items()
        if name not in ("", "__main__")  # the public names come from every layer
        for other in others
        if package_of(other) != package_of(name) and layer_of(other) >= layer_of(name)
    ]
    assert not upward


def test_modules_of_a_package_import_each_other_without_cycles() -> None:
    graph = {name: others for name, others in import_graph().items() if name != ""}
    inside = {
        name: {other for other in others if package_of(other) == package_of(name)} for name, others in graph.items()
    }
    sorted_out: set[str] = set()
    while free := {name for name in inside.keys() - sorted_out if inside[name] <= sorted_out}:
        sorted_out |= free
    assert not inside.keys() - sorted_out, "these import each other in a cycle"


def _uses(tree: ast.Module, prefixes: tuple[str, ...]) -> Iterator[str]:
    """Where a module names something of these prefixes, as `name:line`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            named = [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom):
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        else:
            continue
        yield from (f"{name}:{node.lineno}" for name in named if name.startswith(prefixes))


def _offenders(prefixes: tuple[str, ...], allowed: tuple[str, ...]) -> list[str]:
    return [
        f"{name}: {use}"
        for name, tree in modules().items()
        if not is_inside(name, allowed)
        for use in _uses(tree, prefixes)
    ]


@pytest.mark.requirement("001-D-14")
def test_torch_distributed_stays_in_its_packages() -> None:
    prefixes = ("torch.distributed", "torch.nn.parallel")
    assert not _offenders(prefixes, MAY_USE_TORCH_DISTRIBUTED)


def test_the_process_environment_is_read_in_one_package() -> None:
    prefixes = ("os.environ", "os.getenv", "os.putenv")
    assert not _offenders(prefixes, MAY_READ_THE_ENVIRONMENT)


def test_text_from_elsewhere_becomes_values_in_one_package() -> None:
    """By functions that raise one kind of error; `isdigit` takes `²`, and `int` 5,000 digits not."""
    prefixes = (
        "json.load", "yaml.load", "yaml.safe_load", "yaml.compose", "yaml.scan", "ast.parse", "ast.literal_eval",
        "str.isdigit", "pickle.load", "tomllib.",
    )  # fmt: skip
    assert not _offenders(prefixes, ("parsing", *MAY_READ_JSON_OF_OTHER_PROCESSES, *MAY_UNPICKLE))
    methods = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("isdigit", "isdecimal", "isnumeric")
    ]
    assert not methods


@pytest.mark.requirement("001-S2-10")
def test_packages_that_answer_at_once_import_no_torch_at_their_top() -> None:
    heavy = ("torch", "torchmetrics", "transformers", "optuna", "matplotlib")
    eager = [
        f"{name}: {ast.unparse(node)}"
        for name, tree in modules().items()
        if is_inside(name, WITHOUT_EAGER_TORCH)
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for target in ([a.name for a in node.names] if isinstance(node, ast.Import) else [node.module])
        if (target or "").partition(".")[0] in heavy
    ]
    assert not eager


def test_nothing_swallows_an_exception() -> None:
    swallowed = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        if node.type is None or all(isinstance(line, ast.Pass) for line in node.body)
    ]
    assert not swallowed


def test_no_module_holds_mutable_state() -> None:
    """Tables in capitals are constants by convention; anything else at the top is state."""
    state = []
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                mutable = isinstance(node.value, (ast.List, ast.Dict, ast.Set, ast.ListComp))
                for target in map(ast.unparse, targets):
                    if mutable and not target.lstrip("_").isupper() and target != "__all__":
                        state.append(f"{name}: {target}")
        state += [f"{name}: global" for n in ast.walk(tree) if isinstance(n, ast.Global)]
    assert not state


@pytest.mark.requirement("001-G-5")
def test_modules_and_functions_stay_small() -> None:
    long = [
        f"{path.relative_to(SOURCE)} has {lines} lines"
        for path in SOURCE.rglob("*.py")
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > 400
    ]
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > 60:
                    long.append(f"{name}.{node.name} has {length} lines")
    assert not long


def test_no_module_is_called_utils() -> None:
    vague = ("utils", "helpers", "common", "misc")
    assert not [name for name in modules() if name.rpartition(".")[2] in vague]


def test_the_public_names_are_these() -> None:
    assert samestep.__all__ == [
        "Concatenate", "Config", "DistributedConfig", "Generated", "LaneBatch", "Order", "Run", "RunContext", "RunListener",
        "SamestepError", "Schedule", "Step", "StepRecord", "Strided", "Task", "TrackedRun", "Tracker", "UserError",
        "benchmark_strong_scaling", "benchmark_weak_scaling", "callbacks", "create_run_context",
        "detect_hardware", "errors", "load_config", "losses", "notebook_launcher", "orders", "retrieval", "start", "train_once",
    ]  # fmt: skip
    for name in samestep.__all__:
        assert getattr(samestep, name) is not None
    assert dir(samestep) == sorted([*samestep.__all__, "__version__"])
