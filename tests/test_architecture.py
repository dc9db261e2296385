"""The house rules, kept by walking the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import samestep

SOURCE = Path(samestep.__file__).parent

# A room imports only from lower floors, and from its own only where the floor says so.
FLOORS: list[set[str]] = [
    {"errors"},
    {
        "plan",
        "lr_curve",
        "runtime.nodelists",
        "runtime.peers",
        "runtime.logs",
        "runtime.randomness",
        "runtime.early",
    },
    {"runtime.ports"},
    {
        "runtime.environment",
        "runtime.limits",
        "runtime.interfaces",
        "runtime.meeting",
        "runtime.patient_store",
    },
    {"config.distributed", "runtime.pulse", "runtime.failures", "runtime.hardware"},
    {"config.launching", "config.optimization", "config.aliases", "config.plain_yaml"},
    {"config.schema", "config.editing"},
    {"config.loading"},
    {"config"},
    {
        "runtime.placement",
        "runtime.exchange",
        "runtime.lanestats",
        "runtime.diagnosis",
        "runtime.neighbours",
        "launchers.size",
        "launchers.work",
        "orders",
        "by_name",
        "lr_scaling",
        "warmup",
    },
    {
        "runtime.gradients",
        "runtime.collectives",
        "runtime.verdict",
        "runtime.signals",
        "runtime.heartbeat",
        "runtime.joining",
        "launchers.local",
        "launchers.mpirun",
        "launchers.slurm",
        "launchers.ssh",
        "launchers.planned",
        "jobs.handing_on",
    },
    {
        "runtime.tree",
        "runtime.buffers",
        "runtime.ddp",
        "runtime.agent",
        "runtime.probe",
        "launchers.torchrun",
        "jobs.mpirun",
        "jobs.slurm",
        "jobs.ssh",
    },
    {"runtime.context", "jobs.start"},
    {"jobs.worlds"},
    {"doctor.findings"},
    {"doctor.facts", "doctor.planned", "doctor.show", "doctor.ranks"},
    {"doctor.machine", "doctor.network"},
    {"doctor.agreement"},
    {"doctor.examine"},
    {"checkpoint.files", "checkpoint.snapshot", "checkpoint.state"},
    {"checkpoint.format", "folder"},
    {"checkpoint.store"},
    {"checkpoint.resume", "checkpoint.export"},
    {"checkpoint", "opening"},
    {
        "data",
        "metrics",
        "precision",
        "trackers",
        "scaling",
        "clipping",
        "rates",
        "describe",
        "starter",
        "timing",
        "consistency",
        "times",
        "requeue",
    },
    {"streams", "once", "task", "nonfinite", "saving", "tables"},
    {
        "averages",
        "evaluation",
        "sources",
        "trained",
        "update",
        "optimizers",
        "schedules",
        "export.examples",
        "export.formats",
    },
    {"batchnorm", "export.subject", "ledger"},
    {
        "announcing",
        "averaging",
        "export.check",
        "export.torchscript",
        "export.graph",
        "export.weights",
    },
    {"export"},
    {"exporting"},
    {"step", "progress"},
    {"memory", "recordings", "prediction"},
    {"graphs"},
    {"engine"},
    {"amp.config", "amp.saved"},
    {"amp.feeding"},
    {"amp.trainer"},
    {"amp.distributed"},
    {"amp"},
    {"boundary"},
    {"run"},
    {"averaged", "choices", "record"},
    {"loop", "lr_finder"},
    {"assemble", "compare"},
    {"verify"},
    {"report"},
    {"lr_report"},
    {"cli.app", "cli.ranks"},
    {
        "cli.averaging",
        "cli.exporting",
        "cli.launching",
        "cli.looking",
        "cli.predicting",
        "cli.runs",
        "cli.training",
        "cli.tuning",
    },
    {"cli"},
    {"__main__", "", "runtime", "launchers", "jobs", "doctor"},
]


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def floor_of(module: str) -> int:
    return next(number for number, floor in enumerate(FLOORS) if module in floor)


def imports_of(path: Path) -> Iterator[str]:
    """Modules of ours that a module imports, anywhere in it."""
    known = {name_of(p) for p in modules()}
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}".removeprefix("samestep").lstrip(".")
                home = node.module.removeprefix("samestep").lstrip(".")
                if node.module.split(".")[0] == "samestep":
                    yield full if full in known else home
        elif isinstance(node, ast.Import):
            yield from (
                alias.name.removeprefix("samestep.")
                for alias in node.names
                if alias.name.startswith("samestep.")
            )


def test_every_room_has_a_floor() -> None:
    rooms = {name_of(path) for path in modules()}
    assert rooms == set().union(*FLOORS)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_floors_point_down(path: Path) -> None:
    if path.name == "__init__.py" and path.parent == SOURCE:
        return  # the front door shows every room
    here = floor_of(name_of(path))
    upward = [room for room in imports_of(path) if floor_of(room) >= here]
    assert not upward, f"{name_of(path)} imports from its own floor or above: {upward}"


def _dotted_names(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node), node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_torch_distributed_stays_in_the_runtime(path: Path) -> None:
    if name_of(path).startswith("runtime"):
        return
    used = [
        (name, line)
        for name, line in _dotted_names(path)
        if name.startswith(("torch.distributed", "torch.nn.parallel"))
    ]
    assert not used


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_the_process_environment_is_read_in_one_room(path: Path) -> None:
    if name_of(path) == "runtime.environment":
        return
    used = [
        (name, line)
        for name, line in _dotted_names(path)
        if name.startswith(("os.environ", "os.getenv", "os.putenv"))
    ]
    assert not used


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_nothing_swallows_an_exception(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ExceptHandler):
            only_pass = all(isinstance(line, ast.Pass) for line in node.body)
            assert node.type is not None, f"bare except at line {node.lineno}"
            assert not only_pass, f"swallowed exception at line {node.lineno}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_no_module_holds_mutable_state(path: Path) -> None:
    """Tables in capitals are constants by convention; anything else at the top is state."""
    for node in tree_of(path).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            mutable = isinstance(node.value, (ast.List, ast.Dict, ast.Set, ast.ListComp))
            for target in targets:
                name = ast.unparse(target)
                assert not mutable or name.lstrip("_").isupper() or name == "__all__", name
        assert not isinstance(node, ast.Global)
    assert not [n for n in ast.walk(tree_of(path)) if isinstance(n, ast.Global)]


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_rooms_and_functions_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= 60, f"{node.name} has {length} lines"


def test_no_room_is_called_utils() -> None:
    assert not [p for p in modules() if p.stem in ("utils", "helpers", "common", "misc")]


def test_the_public_names_are_these() -> None:
    assert samestep.__all__ == [
        "Config", "DistributedConfig", "LaneBatch", "Run", "RunContext", "SamestepError",
        "Schedule", "Step", "Task", "create_run_context", "detect_hardware", "load_config",
        "orders", "start", "strided", "train_once",
    ]  # fmt: skip
    for name in samestep.__all__:
        assert getattr(samestep, name) is not None
