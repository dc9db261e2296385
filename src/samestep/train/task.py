"""The class that a user writes: model, data, loss as a sum and a count, optimizer, metrics."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from samestep.config import Config
from samestep.data.batch import LaneBatch
from samestep.data.orders import Order
from samestep.distributed.context import RunContext
from samestep.errors import TaskError
from samestep.optim.schedules import Schedule
from samestep.parsing.files import is_file
from samestep.parsing.python_file import import_file
from samestep.step.global_batch import GlobalBatch
from samestep.step.loss_terms import LossValue
from samestep.step.step import Step
from samestep.train.fold_data import joined_data, labels_in, with_all_data, with_fold
from samestep.train.task_hooks import RunHooks, TrainedUses

Loss = LossValue
"""A loss summed over a lane's samples (tokens, pixels), and how many that were; or several by name."""


class Task(RunHooks, TrainedUses):
    """One workload. Override `model`, `train_data` and `loss`, and `optimizers` unless the config
    names them; the rest is optional.

    The config's `params` arrive as keyword arguments of the constructor.

    Example:
        class Digits(samestep.Task):
            def __init__(self, hidden=64):
                self.hidden = hidden

            def model(self):
                return nn.Sequential(nn.Linear(64, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 10))

            def train_data(self):
                return TensorDataset(x, y)

            def optimizers(self, model):
                return torch.optim.AdamW(model.parameters(), lr=1e-3)

            def loss(self, model, batch):
                return F.cross_entropy(model(batch.x), batch.y, reduction="sum"), len(batch)
    """

    meta_resume = False
    """Whether a resumed run calls `model` on torch's meta device, without memory for weights that a checkpoint has. Set
    it where all tensors of the model are parameters, or buffers that are saved."""

    def model(self) -> nn.Module:
        """Return the model, with its initial weights drawn from the run's seed."""
        raise TaskError(f"{type(self).__name__} must define model(self)")

    def extra_modules(self) -> Sequence[nn.Module]:
        """Modules besides the model that train or hold state, such as a loss with weights."""
        return ()

    def prepare_data(self) -> None:
        """Download or unpack the data: on one rank of each node, before the others continue."""

    def prepare_ranks(self, context: RunContext) -> None:
        """Called on every rank before the data is opened for a training, after `prepare_data`.

        The place for what ranks compute together, such as statistics of data that each reads a part
        of. Commands that use a trained model do not call this: its buffers are in the checkpoint.

        Args:
            context: This process's place in the run.

        Example:
            def prepare_ranks(self, context):
                mine = [moments(block) for block in self.blocks[context.rank :: context.world]]
                self.statistics = merge(context.gather(mine))
        """

    def train_data(self) -> Any:
        """Return the training set: map-style, or iterable with lane streams."""
        raise TaskError(f"{type(self).__name__} must define train_data(self)")

    def valid_data(self) -> Any | None:
        """Return the validation set, or None for no evaluation."""
        return None

    def fold_labels(self, dataset: Any) -> Any | None:
        """Return what the folds of a cross-validation are stratified by: for each sample a label, or a list of
        those that it has; None if there is nothing.

        Args:
            dataset: What `train_data` returned. Unless this is overridden, its `targets` or `labels` are
                taken, or the last tensor of a `TensorDataset` if that holds whole numbers.
        """
        return labels_in(dataset)

    def fold_groups(self, dataset: Any) -> Any | None:
        """Return, per sample, the group that it belongs to, such as a patient: all of a group are in one fold.

        Args:
            dataset: What `train_data` returned. Unless this is overridden, its `groups` are taken.
        """
        return getattr(dataset, "groups", None)

    def fold_valid_data(self) -> Any:
        """Return the training set as a fold of it is validated on: the same samples in the same order.

        Override it where `train_data` augments them.
        """
        return self.train_data()

    def refit_data(self) -> Any:
        """Return what the final training of `refit` trains on: the training set, then the validation set.

        Override it where `train_data` augments: samples of the validation set should be, too.
        """
        return joined_data(self.train_data(), self.valid_data())

    def order(self, dataset: Any) -> Order | None:
        """Return the order of training samples; None shuffles them again each epoch.

        Args:
            dataset: What `train_data` returned; in a cross-validation a `torch.utils.data.Subset` of it,
                with `refit` what `refit_data` returned.
        """
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Return a batch from a list of samples; torch's default unless overridden.

        Args:
            samples: What the dataset returned for the samples of one lane.
        """
        from torch.utils.data import default_collate

        return default_collate(samples)

    def optimizers(self, model: nn.Module) -> Optimizer | Sequence[Optimizer]:
        """One optimizer or several, over the model's and the extra modules' parameters.

        Args:
            model: What `model` returned.
        """
        raise TaskError(
            f"{type(self).__name__} must define optimizers(self, model), or the config must name "
            "one: optimizer: {name: adamw, lr: 0.001}"
        )

    def schedules(self, optimizers: Sequence[Optimizer], steps: int | None) -> Schedule | Sequence[Schedule]:
        """Learning-rate schedules.

        Args:
            optimizers: What `optimizers` returned.
            steps: How many steps the run has; None if it is known only at the data's end.
        """
        return ()

    def loss(self, model: nn.Module, batch: LaneBatch) -> Loss:
        """Return the batch's loss: its mean, or its sum and what it was summed over.

        Args:
            model: The prepared model, in training mode.
            batch: One lane's samples.

        Returns:
            A mean over the samples; or the sum over samples (tokens, pixels), and how many that were.
            The step's gradient is divided once, by the count of all lanes. Or several losses by name, each with its
            count, to be added up by the config's `loss_weights`:
            `{"recon": (recon, len(batch)), "kl": (kl, len(batch))}`.
        """
        raise TaskError(f"{type(self).__name__} must define loss(self, model, batch)")

    def embed(self, model: nn.Module, batch: LaneBatch) -> Any:
        """Return the embeddings of a lane's samples, for `batch_loss`: a tensor with a row for each sample, or
        for each of its views; or several in containers.

        Args:
            model: The prepared model, in training mode.
            batch: One lane's samples.
        """
        raise TaskError(f"{type(self).__name__} defines batch_loss: it must define embed(self, model, batch) too")

    def batch_loss(self, embeddings: Any, batch: GlobalBatch) -> Loss:
        """Return, in place of `loss`, a loss over the whole global batch, such as a contrast of all samples.

        It is called on every rank, with the same numbers. Modules with weights of its own belong to
        `extra_modules`.

        Args:
            embeddings: What `embed` returned for all lanes, in the order of the lanes.
            batch: The samples of all lanes, such as `batch.y`, in the same order.

        Returns:
            A mean over the samples; or a sum, and what it was summed over.
        """
        raise TaskError(f"{type(self).__name__} must define batch_loss(self, embeddings, batch)")

    def eval_embed(self, model: nn.Module, batch: LaneBatch) -> Any:
        """Return the embeddings that `evaluation.mode: retrieval` and `samestep predict --embeddings` take; `embed`'s
        unless overridden.

        Args:
            model: The model, unwrapped, in evaluation mode.
            batch: One lane's samples.

        Returns:
            A tensor (samples, size); or several by the names of views, from one forward pass.

        Example:
            def eval_embed(self, model, batch):
                encoded = model.encoder(batch.x)
                return {"head": model.head(encoded), "encoder": encoded}
        """
        return self.embed(model, batch)

    def labels(self, batch: LaneBatch) -> Any:
        """Return the class of each sample, a whole number, for retrieval; `batch.y` unless overridden.

        Args:
            batch: One lane's samples.
        """
        if isinstance(batch.data, (tuple, list)) and len(batch.data) > 1:
            return batch.y
        raise TaskError(
            f"retrieval needs a class for each sample, and {type(self).__name__}'s samples are no pairs of "
            "input and class: define labels(self, batch)"
        )

    def reference_data(self, name: str) -> Any | None:
        """Return the set in which retrieval seeks neighbours, such as the training set without augmentation.

        Args:
            name: The config's `evaluation.reference`.

        Returns:
            A map-style dataset; or None for what `train_data` or `valid_data` returns, by the name. In
            `valid_data` itself no sample is its own neighbour.
        """
        if name in ("train", "valid"):
            return None
        raise TaskError(
            f"{type(self).__name__} does not know the reference {name!r}: define "
            "reference_data(self, name), or set evaluation.reference to train or valid"
        )

    @property
    def has_embeddings(self) -> bool:
        """Return whether it says what the embeddings of its samples are."""
        return type(self).embed is not Task.embed or type(self).eval_embed is not Task.eval_embed

    @property
    def has_batch_loss(self) -> bool:
        """Return whether it trains by `batch_loss`."""
        return type(self).batch_loss is not Task.batch_loss

    @property
    def forward_pass(self) -> Callable[[nn.Module, LaneBatch], Any]:
        """Return what a step calls with the model and a lane's batch: `loss`, or `embed`."""
        return self.embed if self.has_batch_loss else self.loss

    def metrics(self) -> Mapping[str, Any]:
        """Return what evaluation measures besides the loss, by name: new metrics for each evaluation.

        They are torchmetrics' own or derived from them, or objects with `update`, `compute`, and
        `merge(other)` or `merge_state(others)`, as torcheval's have.
        """
        return {}

    def evaluate(self, model: nn.Module, batch: LaneBatch, metrics: Mapping[str, Any]) -> Loss:
        """Update the metrics with one validation batch.

        Args:
            model: The model, unwrapped, in evaluation mode.
            batch: One lane's validation samples.
            metrics: This lane's copies of what `metrics` returned, by name.

        Returns:
            The batch's loss, as `loss` returns it.
        """
        if self.has_batch_loss:
            raise TaskError(
                f"{type(self).__name__} has a batch_loss, which a part of the validation set does not "
                "have: set evaluation.mode: retrieval, define evaluate(self, model, batch, metrics), or no "
                "valid_data"
            )
        return self.loss(model, batch)

    def eval_outputs(self, model: nn.Module, batch: LaneBatch) -> Any:
        """Return what `evaluation.mode: gather` brings together for `evaluate_gathered`.

        Args:
            model: The model, unwrapped, in evaluation mode.
            batch: One lane's validation samples.

        Returns:
            Tensors with a row for each sample, in any containers: `(predict(model, batch), batch.y)` unless
            overridden.
        """
        return self.predict(model, batch), batch.y

    def evaluate_gathered(self, outputs: Any) -> Mapping[str, Any]:
        """Measure the whole validation set at once, on rank 0 alone, with `evaluation.mode: gather`.

        Args:
            outputs: What `eval_outputs` returned, of all samples in the order of `valid_data`, in host
                memory.

        Returns:
            Numbers by name; all ranks get them.

        Example:
            def evaluate_gathered(self, outputs):
                scores, y = outputs
                return {"auc": sklearn.metrics.roc_auc_score(y, scores[:, 1])}
        """
        raise TaskError(f"{type(self).__name__} must define evaluate_gathered(self, outputs)")


def stepper(task: Task, model: nn.Module) -> Callable[[Step], None]:
    """Return what runs a step of a task: by its loss, or by its loss over the whole batch."""
    # The task's own methods: what a loss reads from the task is compared before a replay.
    forward = partial(task.forward_pass, model)
    if task.has_batch_loss:
        return lambda step: step.run_global(forward, task.batch_loss)
    return lambda step: step.run(forward)


def load_task(config: Config) -> Task:
    """Return the task that a config names, made with the config's params."""
    if config.task is None:
        and_batch = " and global_batch" if config.leaves_batch_open else ""
        raise TaskError(f"the config names no task to train: set task: FILE.py:Class{and_batch}")
    path_text, _, class_name = config.task.rpartition(":")
    path = (config.folder / path_text).resolve()
    if not is_file(path):
        raise TaskError(f"task: {config.task} names {path}, and there is no such file")
    module = import_file(path, "task")
    task_class = getattr(module, class_name, None)
    if task_class is None:
        found = [n for n, v in vars(module).items() if _is_task_class(v)]
        raise TaskError(
            f"task: {path} has no class {class_name}"
            + (f"; it has {', '.join(found)}" if found else " and no subclass of samestep.Task")
        )
    if not _is_task_class(task_class):
        raise TaskError(f"task: {class_name} in {path} is not a subclass of samestep.Task")
    _check_params(task_class, config.params)
    task: Task = task_class(**config.params)
    if config.refit:
        return with_all_data(task)
    return task if config.fold is None else with_fold(task, config.fold, config.folder)


def _is_task_class(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Task) and value is not Task


def _check_params(task_class: type[Task], params: Mapping[str, Any]) -> None:
    try:
        inspect.signature(task_class).bind(**params)
    except TypeError as error:
        raise TaskError(f"params: {task_class.__name__} does not take them: {error}") from None
