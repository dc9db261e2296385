"""Mistakes between the fields of a config: each is valid alone, together they contradict."""

from __future__ import annotations

from collections.abc import Callable, Set

from samestep.config.evaluation import RETRIEVAL_METRICS
from samestep.config.optimizer_names import optimizer_mistakes
from samestep.config.schedule_names import schedule_mistakes
from samestep.config.schema import ALLOWED_KEYS, Config
from samestep.config.torch_classes import torch_optimizers, torch_schedulers
from samestep.errors import Mistake, PlanError


def contradictions(config: Config, wrong: Set[str] = frozenset()) -> list[Mistake]:
    """Return the mistakes between the fields of a config.

    Args:
        wrong: keys whose value in it is a default, since the user's value was invalid; checks that
            look at them are skipped.
    """
    checks: list[tuple[Set[str], Callable[[Config], list[Mistake]]]] = [
        ({"global_batch", "batch_per_rank", "lanes", "accumulation", "task"}, _batch_mistakes),
        ({"epochs", "steps"}, _length_mistakes),
        ({"task"}, _task_mistakes),
        ({"same"}, _same_mistakes),
        (set(_SHARD_KEYS), _shard_mistakes),
        ({"batchnorm", "same", "memory.lane_split", "speed.compile", "contrastive.recompute"}, _batchnorm_mistakes),
        ({"contrastive.recompute", "memory.lane_split"}, _contrastive_mistakes),
        ({"speed.compile", "memory.checkpoint"}, _compile_mistakes),
        ({"early_stopping", "evaluation.every_epochs"}, _evaluation_mistakes),
        ({"refit", "fold", "early_stopping"}, _refit_mistakes),
        (set(_inside("evaluation", "mode", "reference", "views", "metrics")), _retrieval_mistakes),
        ({"resume.allow"}, _resume_mistakes),
        ({"loss_scale"}, lambda config: config.loss_scale.mistakes()),
        ({"clip"}, lambda config: config.clip.mistakes()),
        ({"swa"}, lambda config: config.swa.mistakes() if config.swa is not None else []),
        ({"lr_scaling", "base_batch"}, _lr_scaling_mistakes),
        ({"optimizer", *_inside("optimizer", "name", "args", "groups")}, _optimizer_mistakes),
        ({"schedule", *_inside("schedule", "name", "args", "every", "warmup")}, _schedule_mistakes),
        (
            set(_inside("trackers", "artifacts", "classes", "wandb", "mlflow")),
            lambda config: config.trackers.mistakes(),
        ),
        (set(), lambda config: config.distributed.mistakes()),
        ({"launch.environment", "launch.ssh"}, lambda config: config.launch.mistakes()),
    ]
    return [m for keys, check in checks if not keys & wrong for m in check(config)]


def _inside(section: str, *keys: str) -> list[str]:
    return [f"{section}.{key}" for key in keys]


def _optimizer_mistakes(config: Config) -> list[Mistake]:
    known = {} if config.optimizer is None else torch_optimizers()
    return optimizer_mistakes(config.optimizer, known) if known and config.optimizer else []


def _schedule_mistakes(config: Config) -> list[Mistake]:
    known = {} if config.schedule is None else torch_schedulers()
    return schedule_mistakes(config.schedule, known) if known and config.schedule else []


def _length_mistakes(config: Config) -> list[Mistake]:
    if config.epochs is None and config.steps is None:
        message = "neither epochs nor steps is set: set one of them"
        return [Mistake("epochs", message)]
    if config.epochs is not None and config.steps is not None:
        message = f"you set epochs {config.epochs} and steps {config.steps}: keep one of them"
        return [Mistake("steps", message)]
    return []


def _task_mistakes(config: Config) -> list[Mistake]:
    if config.task is None:
        message = "is for a task, and none is set: a custom training loop creates its own. Remove it"
        keys = ("optimizer", "schedule", "refit")
        return [Mistake(k, message) for k in keys if getattr(config, k)]
    if ":" in config.task:
        return []
    return [Mistake("task", f"{config.task!r} names no class: write FILE.py:Class")]


def _evaluation_mistakes(config: Config) -> list[Mistake]:
    never = config.evaluation.every_epochs is None and config.evaluation.every_steps is None
    if not never or config.early_stopping is None:
        return []
    message = "there is no evaluation to stop on: set evaluation.every_epochs"
    return [Mistake("early_stopping", message)]


def _refit_mistakes(config: Config) -> list[Mistake]:
    if not config.refit:
        return []
    wrong = []
    if config.fold is not None:
        wrong.append(Mistake("fold", "refit trains on all folds: leave out one of them"))
    if config.early_stopping is not None:
        message = "refit trains on what would be evaluated: leave out early_stopping, and set epochs to the number at which early stopping ended"
        wrong.append(Mistake("early_stopping", message))
    return wrong


def _retrieval_mistakes(config: Config) -> list[Mistake]:
    found, best = config.evaluation.mistakes(), config.best
    if config.evaluation.mode != "retrieval" or config.task is None:
        return found
    metrics = config.evaluation.retrieval_metrics
    named = next((name for name in metrics if best.metric.endswith(name)), None)
    if best.metric.endswith("val_loss"):
        message = (
            "evaluation.mode: retrieval measures no loss: set best: {metric: "
            f"{next(iter(metrics), RETRIEVAL_METRICS[0])}, mode: max}}"
        )
        found.append(Mistake("best.metric", message))
    elif named is not None and best.mode == "min":
        found.append(Mistake("best.mode", f"higher is better for {named}: set best.mode: max"))
    return found


def _lr_scaling_mistakes(config: Config) -> list[Mistake]:
    if config.lr_scaling == "none" or config.base_batch is not None:
        return []
    message = f"you set {config.lr_scaling}, but not against which batch: set base_batch"
    return [Mistake("lr_scaling", message)]


def _resume_mistakes(config: Config) -> list[Mistake]:
    unknown = [key for key in config.resume.allow if key not in ALLOWED_KEYS]
    if not unknown:
        return []
    message = f"{', '.join(unknown)} cannot be allowed to differ: it takes {', '.join(ALLOWED_KEYS)}"
    return [Mistake("resume.allow", message)]


def _batch_mistakes(config: Config) -> list[Mistake]:
    if config.leaves_batch_open and config.task is not None:
        return [
            Mistake("global_batch", "set global_batch, or batch_per_rank for a run that depends on the number of ranks")
        ]
    if config.global_batch is not None and config.batch_per_rank is not None:
        return [
            Mistake(
                "batch_per_rank",
                f"you set global_batch {config.global_batch} and "
                f"batch_per_rank {config.batch_per_rank}: keep exactly one",
            )
        ]
    if config.batch_per_rank is not None:
        if config.lanes is not None:
            return [
                Mistake(
                    "lanes", "with batch_per_rank the lanes follow from the ranks: remove lanes, or use global_batch"
                )
            ]
        return []
    found = []
    if config.accumulation != 1:
        found.append(
            Mistake(
                "accumulation",
                f"you set {config.accumulation} beside global_batch: "
                "there a rank accumulates over its lanes; set lanes instead",
            )
        )
    if config.leaves_batch_open:
        return found
    try:
        config.batch_plan(world=1)
    except PlanError as error:
        found.append(Mistake("global_batch", str(error)))
    return found


def _contrastive_mistakes(config: Config) -> list[Mistake]:
    if config.contrastive.recompute is not False or config.memory.lane_split == 1:
        return []
    message = (
        "false keeps the activations of whole lanes, which memory.lane_split: "
        f"{config.memory.lane_split} cuts into pieces that are embedded twice: remove one of them"
    )
    return [Mistake("contrastive.recompute", message)]


def _batchnorm_mistakes(config: Config) -> list[Mistake]:
    if config.batchnorm == "lane":
        return []
    found = []
    if config.same != "bits":
        message = (
            f"global is for same: bits, and you set same: {config.same}: set same: bits, or on GPUs same: "
            "samples with distributed.sync_batchnorm: true, which is torch's way between ranks"
        )
        found.append(Mistake("batchnorm", message))
    if config.memory.lane_split != 1:
        message = (
            f"global normalises over whole lanes, which memory.lane_split: {config.memory.lane_split} cuts "
            "into pieces: remove one of them, or keep fewer activations with memory.checkpoint"
        )
        found.append(Mistake("batchnorm", message))
    if config.speed.compile:
        message = (
            "global lets lanes meet inside of the model's forward pass, which speed.compile compiles: remove one of "
            "them"
        )
        found.append(Mistake("batchnorm", message))
    if config.contrastive.recompute is True:
        message = (
            "global lets lanes pass each layer together, with their activations, and contrastive.recompute: true "
            "embeds them one after the other: remove one of them, or keep fewer activations with memory.checkpoint"
        )
        found.append(Mistake("batchnorm", message))
    return found


def _compile_mistakes(config: Config) -> list[Mistake]:
    if config.speed.compile is not True or not config.memory.checkpoint:
        return []
    message = (
        "true compiles the model with the modules that memory.checkpoint runs again, which torch cannot: set blocks"
    )
    return [Mistake("speed.compile", message)]


_SHARD_KEYS = (
    "same", "batchnorm", "ema", "memory.lane_split", "speed.compile", "speed.graph", "contrastive.recompute",
    *_inside("distributed", "shard", "shard_blocks", "lane_weights"),
)  # fmt: skip


def _shard_mistakes(config: Config) -> list[Mistake]:
    section = config.distributed
    if section.shard != "none" and config.same != "bits":
        message = (
            f"same: {config.same} has DistributedDataParallel sum gradients, on every rank: set same: bits, or none"
        )
        return [Mistake("distributed.shard", message)]
    if section.shard != "weights":
        if not section.shard_blocks or config.speed.compile == "blocks":
            return []
        message = "is for distributed.shard: weights and speed.compile: blocks: set one of them, or remove it"
        return [Mistake("distributed.shard_blocks", message)]
    ema_on_rank_0 = config.ema is not None and config.ema.policy == "rank0"
    together = "all ranks run the lanes of a round at once, and gather the weights of each block for it"
    refused = {
        "distributed.lane_weights": (
            section.lane_weights is not None, f"{together}: an uneven share would let them wait"
        ),
        "distributed.find_unused_parameters": (
            section.find_unused_parameters and not section.shard_blocks,
            "lanes may run other blocks than other lanes (distributed.shard_blocks can name blocks that all of them "
            "run)",
        ),
        "memory.lane_split": (
            config.memory.lane_split != 1, "cuts each rank's lanes as its memory allows, and " + together
        ),
        "batchnorm": (
            config.batchnorm == "global", "global lets a rank's lanes pass each layer together"
        ),
        "speed.compile": (
            config.speed.compile is True, "compiles the model as a whole, whose blocks are gathered (take blocks)"
        ),
        "speed.graph": (config.speed.graph is True, "captures no messages between ranks"),
        "ema.policy": (ema_on_rank_0, "rank0 averages all weights on one rank, which does not hold them"),
    }  # fmt: skip
    return [
        Mistake(key, f"{why}: set distributed.shard to optimizer, or remove it")
        for key, (is_set, why) in refused.items()
        if is_set
    ]


def _same_mistakes(config: Config) -> list[Mistake]:
    found = []
    section, level = config.distributed, config.same
    if level == "samples" and config.memory.lane_split != 1:
        found.append(
            Mistake(
                "memory.lane_split",
                "same: samples runs a rank's lanes as one batch: set same: rounding, which runs "
                "them one after the other, or 1",
            )
        )
    if section.sync_batchnorm and level != "samples":
        found.append(
            Mistake(
                "distributed.sync_batchnorm",
                f"same: {level} normalises each lane over its own samples: set same: samples, or false",
            )
        )
    if not section.broadcast_buffers and level != "samples":
        found.append(
            Mistake(
                "distributed.broadcast_buffers",
                f"same: {level} averages buffers over the lanes: false is possible only with same: samples",
            )
        )
    if level == "bits":
        for option, default in (("static_graph", False), ("gradient_as_bucket_view", True)):
            if getattr(section, option) is not default:
                found.append(
                    Mistake(
                        f"distributed.{option}",
                        "is an option of "
                        "DistributedDataParallel, which same: bits does not use: "
                        "remove it, or set same: rounding",
                    )
                )
    return found
