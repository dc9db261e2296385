"""Rules about what a run writes: files, folders, lines and trackers of every rank."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from samestep.check.code.guards import names_a_rank, on_one_rank
from samestep.check.code.rule import Rule
from samestep.check.code.source import Code, constant, identifiers_in, keyword

_WRITERS = frozenset(
    {"torch.save", "safetensors.torch.save_file", "safetensors.torch.save_model", "torchvision.utils.save_image",
     "matplotlib.pyplot.savefig", "torch.jit.save"}
)  # fmt: skip
_MODEL = re.compile(r"state_dict|checkpoint|ckpt|model|optim|(^|_)net(_|$)|weights", re.IGNORECASE)
_TRACKERS = frozenset(
    {"wandb.init", "wandb.log", "mlflow.start_run", "mlflow.log_metric", "mlflow.log_metrics", "mlflow.log_params",
     "torch.utils.tensorboard.SummaryWriter", "torch.utils.tensorboard.writer.SummaryWriter", "tensorboardX.SummaryWriter"}
)  # fmt: skip
_BARS = frozenset({"tqdm.tqdm", "tqdm.auto.tqdm", "tqdm.notebook.tqdm", "tqdm.trange", "tqdm.auto.trange"})


def _saves(code: Code) -> Iterator[ast.AST]:
    for call in code.calls:
        name = code.name(call.func)
        pretrained = name.endswith(".save_pretrained") and not name.startswith("?")
        if name not in _WRITERS and not pretrained:
            continue
        of_a_run = code.trains or (name == "torch.save" and _saves_a_model(call))
        if of_a_run and not on_one_rank(code, call) and not _asks_by_keyword(call):
            yield call


def _saves_a_model(call: ast.Call) -> bool:
    return bool(call.args) and any(_MODEL.search(word) for word in identifiers_in(call.args[0]))


def _asks_by_keyword(call: ast.Call) -> bool:
    return any((word.arg or "").startswith("is_main") for word in call.keywords)


def _lines(code: Code) -> Iterator[ast.AST]:
    for call in code.called("print", *_BARS):
        # A line that says which rank it is of was meant to come from each.
        if keyword(call, "disable") is not None or any(map(names_a_rank, call.args)):
            continue
        if code.repeats(call) and not on_one_rank(code, call):
            yield call


def _trackers(code: Code) -> Iterator[ast.AST]:
    for call in code.calls:
        if code.name(call.func) in _TRACKERS and code.uses_torch and not on_one_rank(code, call):
            yield call


def _folders(code: Code) -> Iterator[ast.AST]:
    for call in [*code.called("os.mkdir", "os.makedirs"), *code.methods("mkdir")]:
        if constant(keyword(call, "exist_ok")) is True or on_one_rank(code, call):
            continue
        if any(isinstance(outer, ast.Try) and outer.handlers for outer in code.around(call)):
            continue  # who catches the error expects that another was first
        if code.name(call.func) == "os.mkdir" or keyword(call, "exist_ok") is None:
            yield call


def _addresses(code: Code) -> Iterator[ast.AST]:
    for node in code.variables_set("MASTER_ADDR", "MASTER_PORT"):
        if isinstance(node.value, (ast.Constant, ast.JoinedStr)):
            yield node
    for call in code.called("torch.distributed.init_process_group"):
        method = constant(keyword(call, "init_method"))
        if isinstance(method, str) and re.match(r"tcp://.*:\d+", method):
            yield call


RULES = (
    Rule(
        "save-by-all", "breaks", "a file that every rank writes",
        "all ranks write the same file at once, and a reader may find parts of several",
        "nothing: the run saves and resumes by itself (`run.save()` to save now); for files of your own `if run.is_main:`",
        _saves,
    ),
    Rule(
        "print-by-all", "differs", "a line or a progress bar of every rank",
        "it is printed once for each rank, with the values of that rank's own samples",
        "`run.print(...)`, with `run.reduce(...)` of what it prints; the run has a progress bar",
        _lines, files="uses_torch",
    ),
    Rule(
        "tracker-by-all", "differs", "a tracker on every rank",
        "every rank opens its own run, or writes the same curves several times",
        "`trackers: {wandb: {}, tensorboard: true, mlflow: {}}` in the config, `run.log(step, values)` in the loop",
        _trackers, plain=True,
    ),
    Rule(
        "folder-race", "breaks", "a folder that every rank creates",
        "another rank may create it first, also between a question whether it exists and this line: FileExistsError",
        "`os.makedirs(path, exist_ok=True)`; the run's own folder is made by the run",
        _folders, files="trains",
    ),
    Rule(
        "fixed-address", "breaks", "a fixed address or port for the ranks to meet",
        "it works on one machine, as long as nobody else uses the port",
        "nothing: `samestep launch` chooses a free port, and every launcher's own variables are read",
        _addresses, plain=True,
    ),
)  # fmt: skip
