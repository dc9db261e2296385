"""The evaluations of a run's loop: on validation data, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from samestep.config.evaluation import RETRIEVAL_METRICS, Distance
from samestep.data.batch import Collate, LaneBatch, Moment
from samestep.data.orders import Order
from samestep.distributed.health.activity import EVALUATE
from samestep.errors import StepError
from samestep.evaluation.eval_batches import EvalShard
from samestep.evaluation.eval_rows import Embed, Labels, RetrievalEvaluator, RetrievalRequest
from samestep.evaluation.evaluate import Measure, Outputs, Values, evaluate, evaluate_gathered
from samestep.evaluation.gather_reduce import Op, Value, gather_lane_rows, gather_rows, reduce_values
from samestep.evaluation.update_bn import Forward, measure_batchnorm
from samestep.lanes.random_streams import BETWEEN
from samestep.reduce.lane_sum import sum_lanes
from samestep.run.loader_loops import unwrapped
from samestep.run.run_files import RunFiles
from samestep.step.lane_passes import LanePasses
from samestep.step.lane_scope import NO_LANE
from samestep.step.lane_tensor import LaneTensor, each_lane, lanes_of, pick


def _targets(batch: LaneBatch) -> Any:
    return batch.y


_LEFT_EVALUATION = (
    "a loop over validation data was left before its end: each rank has its own batches of it, so what it has read depends "
    "on the number of ranks. Read it to its end. A batch that stays the same is made of the dataset; a second loader that "
    "trains is read by zip(loader, second), or has shuffle=True"
)


class RunMeasures(RunFiles):
    """The methods that a loop calls to evaluate."""

    _share: tuple[LanePasses | None, EvalShard | None] = (None, None)
    """The last loop over `run.eval_batches`, and the step that it was in."""
    _evaluates = False
    """Whether a loop over validation data is running."""

    def evaluate(
        self,
        dataset: Any,
        measure: Measure,
        metrics: Mapping[str, Any] | None = None,
        collate: Collate | None = None,
        step: int = 0,
        prefix: str = "",
    ) -> Values:
        """Measure the model on a dataset: each sample once, the same result on every rank.

        Args:
            dataset: A map-style dataset.
            measure: `measure(model, batch, metrics)` updates the metrics and returns the loss as
                (sum, count). It gets the unwrapped model.
            metrics: By name, of torchmetrics, or with `update`, `compute` and a way to merge.
            collate: Makes a batch of a list of samples; torch's default unless given.
            step: The step after which this is measured; random numbers follow from it.
            prefix: Put before every name in the result.

        Returns:
            `val_loss` and every metric, by name; a value inside a metric's result is `NAME/KEY`.
        """
        return self.evaluate_by(
            lambda modules, moment: evaluate(self.setup, modules, moment, dataset, measure, metrics or {}, collate),
            step,
            prefix,
        )

    def evaluate_by(
        self, measure: Callable[[Sequence[nn.Module], Moment], Mapping[str, Any]], step: int = 0, prefix: str = ""
    ) -> Values:
        """Return what all evaluations have in common: listeners get the values, and random numbers continue as before.

        Args:
            measure: Called with the unwrapped model and extra modules, and the moment; every rank's
                returns the same values by name.
            step: The step after which this is measured; random numbers follow from it.
            prefix: Put before every name in the result.
        """
        if self._prepared is None:
            raise StepError("an evaluation came before run.prepare: prepare the model first")
        self.flush()
        with self._outside_lanes(), self.context.activity.during(EVALUATE):
            found = measure(self._modules, self._moment(step))
        values: Values = {f"{prefix}{name}": value for name, value in found.items()}
        self.setup.rng.enter(BETWEEN, at=(step,))
        self._parts.log.steps.restart_clock()
        self._listeners.on_evaluation(step, values)
        return values

    def retrieval(
        self,
        queries: Any,
        references: Any | None,
        embed: Embed,
        labels: Labels = _targets,
        metrics: Sequence[str] = RETRIEVAL_METRICS,
        views: Sequence[str] | None = None,
        distance: Distance = "cosine",
        collate: Collate | None = None,
        step: int = 0,
        prefix: str = "",
    ) -> Values:
        """Measure how well embeddings of validation data find their like: exactly, the same on every rank.

        Args:
            queries: A map-style dataset.
            references: Another one, in which neighbours are sought; None, or the same, seeks them among the
                queries, each without itself.
            embed: `embed(batch)` returns embeddings (samples, size), or several by the names of views.
            labels: `labels(batch)` returns the class of each sample; `batch.y` unless given.
            metrics: Their names, as in the config's `evaluation.metrics`.
            views: Which are measured, the first one by plain names, others as `VIEW/NAME`; all unless given.
            distance: cosine or euclidean.
            collate: Makes a batch of a list of samples; torch's default unless given.
            step: The step after which this is measured; random numbers follow from it.
            prefix: Put before every name in the result.
        """
        request = RetrievalRequest(metrics, views, distance)
        return self.evaluate_by(
            lambda modules, moment: RetrievalEvaluator(self.setup, modules, moment).run(
                queries, references, embed, labels, collate, request
            ),
            step,
            prefix,
        )

    def evaluate_gathered(
        self,
        dataset: Any,
        outputs: Outputs,
        compute: Callable[[Any], Mapping[str, Any]],
        collate: Collate | None = None,
        step: int = 0,
        prefix: str = "",
    ) -> Values:
        """Measure a whole dataset at once: `compute` is called on rank 0, and all ranks get what it returns.

        Args:
            dataset: A map-style dataset.
            outputs: `outputs(model, batch)` returns tensors with a row for each sample, in any containers.
            compute: `compute(outputs)` gets those of all samples, in order, in rank 0's host memory, and
                returns numbers by name.
            collate: Makes a batch of a list of samples; torch's default unless given.
            step: The step after which this is measured; random numbers follow from it.
            prefix: Put before every name in the result.
        """
        return self.evaluate_by(
            lambda modules, moment: evaluate_gathered(self.setup, modules, moment, dataset, outputs, compute, collate),
            step,
            prefix,
        )

    def eval_batches(self, data: Any, collate: Collate | None = None) -> Iterator[Any]:
        """This rank's share of validation data, for an evaluation loop of one's own.

        Every sample comes once, on one of the ranks. Inside the loop all prepared modules are in
        evaluation mode, nothing records gradients, and forward runs in the config's precision.
        Ranks may get different numbers of batches, some none: what all of them must call, such as
        `run.gather` and `run.reduce`, comes after the loop.

        Args:
            data: A map-style dataset, or a DataLoader of one, whose batches these are; a sampler that
                leaves samples out is refused.
            collate: Makes a batch of a list of samples; the loader's, or torch's default.

        Example:
            outputs, targets = [], []
            for x, y in run.eval_batches(valid_loader):
                outputs.append(model(x))
                targets.append(y)
            accuracy = (run.gather(outputs).argmax(1) == run.gather(targets)).float().mean()
        """
        if self._prepared is None:
            raise StepError("run.eval_batches came before run.prepare: prepare the model first")
        self.flush()
        passes = self._passes
        step = self.start_step if passes is None else passes.data.index
        share = EvalShard(self._moment(step))
        self._share = (passes, share)
        before, self._evaluates = self._evaluates, True
        try:
            with self._outside_lanes(), self.context.activity.during(EVALUATE):
                yield from share.loop(self.setup, self._modules, unwrapped(data), collate)
        except GeneratorExit:
            self.context.log.once("left evaluation", _LEFT_EVALUATION)
            raise
        finally:
            self._evaluates = before
        self._parts.log.steps.restart_clock()

    def gather(self, rows: Tensor | Sequence[Tensor]) -> Tensor:
        """Return the rows of all ranks, on every rank: each sample's once, in the dataset's order.

        After a loop over `run.eval_batches` these are one row for each of this rank's samples; in a step,
        one for each sample of its lanes, in their order. Every rank calls this.

        Args:
            rows: A tensor, or a list with one for each batch; an empty list where there was none.
        """
        parts = [rows] if isinstance(rows, Tensor) else rows
        with self._outside_lanes():
            if lanes_of(list(parts)):
                return gather_lane_rows(self.context, parts)
            share = self._finished_share("run.gather")
            if share is None and self.setup.gathered.weights is not None:
                raise StepError(
                    "run.gather of a step's rows needs ranks with consecutive lanes, which distributed.shard: weights deals "
                    "out in turn: gather after a loop over run.eval_batches, or set shard: optimizer"
                )
            return gather_rows(self.context, parts, None if share is None else share.ids)

    @overload
    def reduce(self, value: float, op: Op = "sum") -> float: ...
    @overload
    def reduce(self, value: Tensor, op: Op = "sum") -> Tensor: ...
    @overload
    def reduce(self, value: Sequence[Value], op: Op = "sum") -> Any: ...

    def reduce(self, value: Value | Sequence[Value], op: Op = "sum") -> Any:
        """One number or tensor of all ranks, the same on each of them. Every rank calls this.

        A list with one value for each batch of the last loop over `run.eval_batches` is joined in the
        dataset's order, in float64: the same bits at any number of ranks. A single value is joined over
        the ranks: integers, `max` and `min` are the same at any number of ranks; a sum or mean of floats
        is so only up to rounding, since each rank has rounded its own.

        Args:
            value: A number or a tensor; or a list with one for each batch.
            op: "sum", "mean" (over ranks, or over the list's batches), "max" or "min", by element.

        Example:
            losses = [F.cross_entropy(model(x), y, reduction="sum") for x, y in run.eval_batches(valid_loader)]
            loss = run.reduce(losses) / len(valid_set)
        """
        if lanes_of(value):
            raise StepError(
                f"run.reduce got {value!r}: run.sum and run.mean take values of lanes, run.gather their rows"
            )
        with self._outside_lanes():
            return reduce_values(self.context, value, op, self._finished_share("run.reduce"))

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over the lanes of all ranks of what a loop over the loader computed. Every rank calls this.

        In float64, and integers exactly: the same bits at any number of ranks. Sums over the steps of an epoch are
        kept as they are, and summed over lanes at its end, which waits for other ranks once.

        Args:
            value: What follows from the loader's batches.

        Example:
            right += (model(x).argmax(1) == y).sum()  # in the loop
            accuracy = run.sum(right) / len(dataset)  # after it
        """
        return self._sum_over_lanes("run.sum", value, lambda lane, own: own)

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean over the samples of the global batch of what each lane has a mean of. Every rank calls this.

        Args:
            value: What follows from the batches of this step.

        Example:
            accuracy = run.mean((logits.argmax(1) == y).float().mean())
        """
        if self._passes is None:
            raise StepError(
                "run.mean belongs inside the loop over the loader: it weighs lanes by the samples of a step"
            )
        sizes = self._passes.batches.sizes()

        def weighted(lane: int, own: Tensor) -> Tensor:
            wide = own.double() * sizes[lane]
            return torch.cat([wide.flatten(), wide.new_tensor([sizes[lane]])])

        total = self._sum_over_lanes("run.mean", value, weighted)
        return (total[:-1] / total[-1]).view(pick(value, 0).shape)

    def _sum_over_lanes(self, caller: str, value: Tensor, own: Callable[[int, Tensor], Tensor]) -> Tensor:
        if not isinstance(value, LaneTensor):
            raise StepError(
                f"{caller} got a {type(value).__name__} that is no value of lanes: it takes what follows from the "
                "batches of the training loader. Other numbers of ranks are joined by run.reduce"
            )
        pairs = zip(value.lanes, value.per_lane, strict=True)
        with self._outside_lanes():
            mine = {lane: own(lane, part.detach()) for lane, part in pairs if lane != NO_LANE}
            units, context = self.setup.assignment.units, self.context
            return sum_lanes(mine, units, context.collectives, context.device, caller)

    def each_lane(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function once per lane of this rank, with ordinary tensors.

        For functions that cannot take what a loop over the loader yields: C extensions, NumPy.

        Args:
            function: What to call.
            *args: Its arguments, at least one of which comes from the loader.
            **kwargs: By name.

        Returns:
            What it returned, for all lanes: tensors as the loader yields them.

        Example:
            edges = run.each_lane(lambda x: torch.from_numpy(canny(x.numpy())), x)
        """
        return each_lane(function, args, kwargs)

    @contextmanager
    def no_lanes(self) -> Iterator[None]:
        """Let lines in the body of a loop be those of an ordinary program, on every rank.

        Random numbers are drawn once, the same on all ranks. Also a decorator, as `torch.no_grad` is. After
        `run.prepare`, before the first step of a resumed run, they are those that the interrupted run drew after its
        last update: draw what stays the same for the whole run, such as a GAN's fixed noise, before `run.prepare`, and
        in a body before its last update.

        Example:
            with run.no_lanes():
                pictures = generator(torch.randn(16, 100))
        """
        self._draw_as_interrupted()
        with self._outside_lanes():
            yield

    def _outside_lanes(self) -> AbstractContextManager[None]:
        """Around what is the run's own, if the body of a loop calls it."""
        return nullcontext() if self._body is None else self._body.paused()

    def _finished_share(self, caller: str) -> EvalShard | None:
        """Return the last loop over `run.eval_batches`, unless a step has begun since."""
        if self._passes is not None and self._passes.in_lane:
            raise StepError(
                f"{caller} was called inside the loop over a step's lanes, of which ranks have different "
                "numbers: call it after the loop"
            )
        passes, share = self._share
        if share is None or (self._passes is not None and passes is not self._passes):
            return None
        if not share.is_over:
            raise StepError(
                f"{caller} was called inside a loop over run.eval_batches, or after a break out of one. Ranks "
                "have different numbers of batches: put what you measure into a list, and call it after "
                "the loop"
            )
        return share

    def _moment(self, step: int) -> Moment:
        if self._passes is None:
            return Moment(step, lane_count=self.batch.lane_count)
        return replace(self._passes.moment, step=step)

    def measure_batchnorm(
        self, dataset: Any, forward: Forward, order: Order | None = None, collate: Collate | None = None
    ) -> bool:
        """Measure the statistics of the model's BatchNorm again, over the training set.

        Args:
            dataset: The training set.
            forward: `forward(model, batch)` puts a batch through the model.
            order: In which order samples are visited; shuffled unless given.
            collate: Makes a batch of a list of samples; torch's default unless given.

        Returns:
            False if the model has no BatchNorm.
        """
        with self._outside_lanes(), self.context.activity.during(EVALUATE):
            found = measure_batchnorm(self.setup, self._modules, forward, dataset, order, collate)
        self.setup.rng.enter(BETWEEN)
        self._parts.log.steps.restart_clock()
        return found
