"""Mistakes between the fields of a config: each is valid alone, together they contradict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set

from samestep.config.evaluation import RETRIEVAL_METRICS
from samestep.config.names import optimizer_mistakes, schedule_mistakes, torch_optimizers, torch_schedulers
from samestep.config.schema import ALLOWED_KEYS, Config
from samestep.errors import Mistake, PlanError


def contradictions(config: Config, wrong: Set[str] = frozenset()) -> list[Mistake]:
    """Return the mistakes between the fields of a config.

    Args:
        wrong: keys whose value in it is a default, since the user's value was invalid; checks that
            look at them are skipped.
    """
    checks: list[tuple[Set[str], Callable[[Config], Iterable[Mistake]]]] = [
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


def _length_mistakes(config: Config) -> Iterator[Mistake]:
    if config.epochs is None and config.steps is None:
        yield Mistake("epochs", "neither epochs nor steps is set: set one of them")
    if config.epochs is not None and config.steps is not None:
        yield Mistake("steps", f"you set epochs {config.epochs} and steps {config.steps}: keep one of them")


def _task_mistakes(config: Config) -> Iterator[Mistake]:
    if config.task is None:
        message = "is for a task, and none is set: a custom training loop creates its own. Remove it"
        yield from (Mistake(key, message) for key in ("optimizer", "schedule", "refit") if getattr(config, key))
    elif ":" not in config.task:
        yield Mistake("task", f"{config.task!r} names no class: write FILE.py:Class")


def _evaluation_mistakes(config: Config) -> Iterator[Mistake]:
    never = config.evaluation.every_epochs is None and config.evaluation.every_steps is None
    if never and config.early_stopping is not None:
        yield Mistake("early_stopping", "there is no evaluation to stop on: set evaluation.every_epochs")


def _refit_mistakes(config: Config) -> Iterator[Mistake]:
    if config.refit and config.fold is not None:
        yield Mistake("fold", "refit trains on all folds: leave out one of them")
    if config.refit and config.early_stopping is not None:
        message = "refit trains on what would be evaluated: leave out early_stopping, and set epochs to the number at which early stopping ended"
        yield Mistake("early_stopping", message)


def _retrieval_mistakes(config: Config) -> Iterator[Mistake]:
    yield from config.evaluation.mistakes()
    if config.evaluation.mode != "retrieval" or config.task is None:
        return
    metrics, best = config.evaluation.retrieval_metrics, config.best
    named = next((name for name in metrics if best.metric.endswith(name)), None)
    if best.metric.endswith("val_loss"):
        message = (
            "evaluation.mode: retrieval measures no loss: set best: {metric: "
            f"{next(iter(metrics), RETRIEVAL_METRICS[0])}, mode: max}}"
        )
        yield Mistake("best.metric", message)
    elif named is not None and best.mode == "min":
        yield Mistake("best.mode", f"higher is better for {named}: set best.mode: max")


def _lr_scaling_mistakes(config: Config) -> Iterator[Mistake]:
    if config.lr_scaling != "none" and config.base_batch is None:
        yield Mistake("lr_scaling", f"you set {config.lr_scaling}, but not against which batch: set base_batch")


def _resume_mistakes(config: Config) -> Iterator[Mistake]:
    unknown = [key for key in config.resume.allow if key not in ALLOWED_KEYS]
    if unknown:
        message = f"{', '.join(unknown)} cannot be allowed to differ: it takes {', '.join(ALLOWED_KEYS)}"
        yield Mistake("resume.allow", message)


def _batch_mistakes(config: Config) -> Iterator[Mistake]:
    if config.leaves_batch_open and config.task is not None:
        message = "set global_batch, or batch_per_rank for a run that depends on the number of ranks"
        yield Mistake("global_batch", message)
    elif config.global_batch is not None and config.batch_per_rank is not None:
        message = (
            f"you set global_batch {config.global_batch} and batch_per_rank {config.batch_per_rank}: keep exactly one"
        )
        yield Mistake("batch_per_rank", message)
    elif config.batch_per_rank is not None:
        if config.lanes is not None:
            message = "with batch_per_rank the lanes follow from the ranks: remove lanes, or use global_batch"
            yield Mistake("lanes", message)
    else:
        if config.accumulation != 1:
            message = f"you set {config.accumulation} beside global_batch: there a rank accumulates over its lanes; set lanes instead"
            yield Mistake("accumulation", message)
        if not config.leaves_batch_open:
            try:
                config.batch_plan(world=1)
            except PlanError as error:
                yield Mistake("global_batch", str(error))


def _contrastive_mistakes(config: Config) -> Iterator[Mistake]:
    if config.contrastive.recompute is False and config.memory.lane_split != 1:
        message = (
            "false keeps the activations of whole lanes, which memory.lane_split: "
            f"{config.memory.lane_split} cuts into pieces that are embedded twice: remove one of them"
        )
        yield Mistake("contrastive.recompute", message)


def _batchnorm_mistakes(config: Config) -> Iterator[Mistake]:
    if config.batchnorm == "lane":
        return
    checkpoint = "remove one of them, or keep fewer activations with memory.checkpoint"
    refused = (
        (config.same != "bits",
         f"is for same: bits, and you set same: {config.same}: set same: bits, or on GPUs same: samples with "
         "distributed.sync_batchnorm: true, which is torch's way between ranks"),
        (config.memory.lane_split != 1,
         f"normalises over whole lanes, which memory.lane_split: {config.memory.lane_split} cuts into pieces: {checkpoint}"),
        (config.speed.compile,
         "lets lanes meet inside of the model's forward pass, which speed.compile compiles: remove one of them"),
        (config.contrastive.recompute is True,
         "lets lanes pass each layer together, with their activations, and contrastive.recompute: true embeds them one "
         f"after the other: {checkpoint}"),
    )  # fmt: skip
    yield from (Mistake("batchnorm", f"global {why}") for is_set, why in refused if is_set)


def _compile_mistakes(config: Config) -> Iterator[Mistake]:
    if config.speed.compile is True and config.memory.checkpoint:
        message = (
            "true compiles the model with the modules that memory.checkpoint runs again, which torch cannot: set blocks"
        )
        yield Mistake("speed.compile", message)


_SHARD_KEYS = (
    "same", "batchnorm", "ema", "memory.lane_split", "speed.compile", "speed.graph", "contrastive.recompute",
    *_inside("distributed", "shard", "shard_blocks", "lane_weights"),
)  # fmt: skip


def _shard_mistakes(config: Config) -> Iterator[Mistake]:
    section = config.distributed
    if section.shard != "none" and config.same != "bits":
        message = (
            f"same: {config.same} has DistributedDataParallel sum gradients, on every rank: set same: bits, or none"
        )
        yield Mistake("distributed.shard", message)
        return
    if section.shard != "weights":
        if section.shard_blocks and config.speed.compile != "blocks":
            message = "is for distributed.shard: weights and speed.compile: blocks: set one of them, or remove it"
            yield Mistake("distributed.shard_blocks", message)
        return
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
    for key, (is_set, why) in refused.items():
        if is_set:
            yield Mistake(key, f"{why}: set distributed.shard to optimizer, or remove it")


def _same_mistakes(config: Config) -> Iterator[Mistake]:
    section, level = config.distributed, config.same
    ddp = "is an option of DistributedDataParallel, which same: bits does not use: remove it, or set same: rounding"
    refused = {
        "memory.lane_split": (
            level == "samples" and config.memory.lane_split != 1,
            "same: samples runs a rank's lanes as one batch: set same: rounding, which runs them one after the other, or 1",
        ),
        "distributed.sync_batchnorm": (
            level != "samples" and section.sync_batchnorm,
            f"same: {level} normalises each lane over its own samples: set same: samples, or false",
        ),
        "distributed.broadcast_buffers": (
            level != "samples" and not section.broadcast_buffers,
            f"same: {level} averages buffers over the lanes: false is possible only with same: samples",
        ),
        "distributed.static_graph": (level == "bits" and section.static_graph, ddp),
        "distributed.gradient_as_bucket_view": (level == "bits" and not section.gradient_as_bucket_view, ddp),
    }  # fmt: skip
    yield from (Mistake(key, why) for key, (is_set, why) in refused.items() if is_set)
