"""Rules about seeds."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from samestep.check.code.guards import names_a_rank
from samestep.check.code.rule import Rule
from samestep.check.code.source import Code

_SEEDS = (
    "torch.manual_seed", "torch.random.manual_seed", "torch.cuda.manual_seed", "torch.cuda.manual_seed_all", "torch.seed",
    "numpy.random.seed", "random.seed", "accelerate.utils.set_seed", "transformers.set_seed",
    "transformers.trainer_utils.set_seed", "pytorch_lightning.seed_everything", "lightning.seed_everything",
)  # fmt: skip
_IN_A_LANE = frozenset({"forward", "loss", "training_step", "__getitem__", "collate_fn", "batch_loss"})


def _global(code: Code) -> Iterator[ast.AST]:
    by_rank = set(_by_rank(code))  # a rule of its own
    for call in _seeds(code):
        if call in by_rank:
            continue
        function = code.function_of(call)
        name = function.name if function else ""
        if name in _IN_A_LANE or (not code.is_driven and (code.trains or "seed" in name)):
            yield call


def _by_rank(code: Code) -> Iterator[ast.AST]:
    offsets = _names_from_ranks(code)
    for call in _seeds(code):
        words = {node.id for arg in call.args for node in ast.walk(arg) if isinstance(node, ast.Name)}
        if any(names_a_rank(argument) for argument in call.args) or words & offsets:
            yield call


def _seeds(code: Code) -> Iterator[ast.Call]:
    return code.called(*_SEEDS)


def _names_from_ranks(code: Code) -> set[str]:
    """Variables that are set to something with a rank in it, and called like seeds."""
    return {
        target.id
        for node in code.nodes
        if isinstance(node, ast.Assign) and names_a_rank(node.value)
        for target in node.targets
        if isinstance(target, ast.Name) and "seed" in target.id.lower()
    }


RULES = (
    Rule(
        "global-seed", "differs", "a seed for the whole process",
        "with the same seed all ranks draw the same dropout and augmentation for different samples, and what a rank draws "
        "depends on how many samples it has: another number of ranks is another run",
        "`samestep.start(seed=...)` or `seed:` in the config: weights, order, dropout and augmentation follow from it, and "
        "never from the rank",
        _global, files="uses_torch",
    ),
    Rule(
        "seed-by-rank", "differs", "a seed that depends on the rank",
        "another number of ranks draws other numbers for the same samples: the run cannot be repeated at another size, or "
        "compared with one GPU",
        "`samestep.start(seed=...)`: every lane has a stream of its own, whichever rank runs it",
        _by_rank,
    ),
)  # fmt: skip
