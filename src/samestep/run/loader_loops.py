"""Loops over the DataLoaders that `run.prepare` has returned.

The first one is read step by step. `for (x, y), (u, _) in zip(loader, unlabelled)` reads a batch of `unlabelled` in
each step, and so does a loop that calls `next` of an iterator in its body: each lane gets its part of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from samestep.data.batch import Position, Source, StepData
from samestep.data.device import DeviceCopies
from samestep.data.factory import open_source
from samestep.data.loader_parts import batch_size_of, parts_of
from samestep.errors import PlanError, StepError
from samestep.lanes.plan import BatchPlan
from samestep.lanes.random_streams import derive
from samestep.run.saver import Saver
from samestep.run_setup import RunSetup
from samestep.step.build_engine import Prepared
from samestep.step.deferred_body import KnownBodies
from samestep.step.graphs import GraphedSteps
from samestep.step.lane_cost import LaneCost
from samestep.step.lane_passes import LanePasses
from samestep.step.lane_tensor import join
from samestep.step.loop_body import LoopBody
from samestep.step.micro_batches import MicroBatches
from samestep.step.module_calls import ModuleCalls
from samestep.step.pending_gradients import PendingGradients
from samestep.step.step_batches import batch_of_another


class RunLoader:
    """The loader, with another way to iterate it; all else is the loader's own."""

    def __init__(self, loader: DataLoader[Any], batches: Callable[[DataLoader[Any]], Iterator[Any]]) -> None:
        self.loader, self._batches = loader, batches

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self.loader)

    def __len__(self) -> int:
        """Return the batches of the loader itself, at any number of ranks."""
        return len(self.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def is_bar_over_loader(data: Any) -> bool:
    """Return whether iterating it iterates a loader of a run, as with `tqdm(loader)`."""
    return isinstance(getattr(data, "iterable", None), RunLoader)


def unwrapped(data: Any) -> Any:
    """Return what a run reads: of its own loaders, the person's."""
    return data.loader if isinstance(data, RunLoader) else data


class LoaderLoop:
    """Opens the body of each step."""

    def __init__(self, setup: RunSetup, prepared: Prepared, saver: Saver) -> None:
        """Raises:
        StepError: The run's lanes cannot run together.
        """
        _refuse_fused(setup)
        if isinstance(prepared.runner, MicroBatches):
            raise StepError(
                f"{prepared.runner.needs_function} needs the loss as a function: for step in run.steps(loader): "
                "step.train(lambda batch: ...)"
            )
        gradients = prepared.reduction.gradients
        gradients.lends = False  # a loop may keep what is in .grad while it computes others
        if prepared.reduction.owned_update is not None:
            prepared.reduction.owned_update.share_gradients()
        graphed = isinstance(prepared.runner, GraphedSteps)
        # Each backward pass of a body may reach other weights. On a GPU to find out costs a wait in each.
        if len(prepared.optimizers) > 1 or (setup.context.device.type == "cpu" and not graphed):
            gradients.usage_varies = True
        self._epochs = setup.config.epochs
        self._calls = ModuleCalls([*prepared.modules, prepared.reduction.model])
        is_gathered = setup.gathered.weights is not None  # for passes that all ranks run
        self._cost = None if graphed or is_gathered else LaneCost(setup)
        self._known: KnownBodies | None = None
        if isinstance(prepared.runner, GraphedSteps) and not gradients.usage_varies:
            self._known = KnownBodies(prepared.runner)
        saver.keep("gradients", PendingGradients(prepared.params, self._calls))

    def body(self, passes: LanePasses, by_epochs: bool, evaluates: bool) -> LoopBody:
        """Return the body of a step.

        Args:
            by_epochs: Whether its loop is one over an epoch, or it is the first step.
            evaluates: Whether a loop over validation data is running.

        Raises:
            StepError: The loop is no loop over the training data of an epoch.
        """
        epochs = self._epochs
        if not by_epochs and epochs is not None and epochs > 1:
            raise StepError(
                f"a loop over the loader has the steps of all {epochs} epochs if nobody asks for epochs: write "
                "for epoch in run.epochs(): for batch in loader"
            )
        if evaluates:
            raise StepError(
                "a step began inside of a loop over validation data: in zip(...) the first DataLoader of run.prepare "
                "comes first"
            )
        if self._cost is not None:
            self._cost.begin_step()
        return LoopBody(passes, self._calls, self._known, self._cost)

    def close(self) -> None:
        """Leave the modules as they were."""
        self._calls.close()


def _refuse_fused(setup: RunSetup) -> None:
    most = max(len(units) for units in setup.assignment.units)
    if setup.config.same != "bits" and most > 1:
        raise StepError(
            f"same: {setup.config.same} runs a rank's {most} lanes one after the other by "
            "DistributedDataParallel, and a loop's body runs them together: use same: bits, as many lanes as "
            "ranks, or step.train(function)"
        )


_PASSES = 1 << 20
"""More than a run has epochs: the numbers of second passes within one follow those of first passes."""

InStep = tuple[LanePasses, LoopBody]


class SecondLoader:
    """Decides what a loop over such a loader gets, and where in its data a run is."""

    def __init__(
        self,
        number: int,
        loader: DataLoader[Any],
        setup: RunSetup,
        evaluate: Callable[[Any], Iterator[Any]],
        epoch: Callable[[], int | None],
        in_step: Callable[[], InStep | None],
    ) -> None:
        """Args:
        number: Its place among the run's loaders.
        loader: The DataLoader.
        setup: The run's.
        evaluate: Gives its batches as those of validation data.
        epoch: Returns the epoch that a loop over epochs is in; None before it.
        in_step: Returns the step whose body is running; None outside of one.
        """
        self._number, self._loader, self._setup = number, loader, setup
        self._evaluate, self._epoch, self._in_step = evaluate, epoch, in_step
        self._copies = DeviceCopies(setup.context.device)
        self._source: Source | None = None
        self._at: tuple[int, int, int] | None = None
        """The epoch in which the last pass was begun (-1 before the first), its number in it, and its next batch."""
        self._resumes = False
        self._last_step = -1

    def batches(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """Iterate the loader: a loop over it in a body that is running is an evaluation, if it may be one."""
        trains = self._source is not None or isinstance(loader.sampler, RandomSampler)
        if self._in_step() is not None and not (trains or loader.drop_last):
            return self._evaluate(loader)
        epoch = self._epoch()
        return self._beside(-1 if epoch is None else epoch)

    def _beside(self, epoch: int) -> Iterator[Any]:
        if self._in_step() is None:  # the first batch is read outside of a step, too
            if self._loader.drop_last:
                raise StepError(
                    "a second loader with drop_last=True was read outside of a step: as one that trains it is read in the "
                    "body, and in zip(...) behind the first DataLoader of run.prepare; an evaluation takes every sample"
                )
            yield from self._evaluate(self._loader)
            return
        source = self._opened()
        steps = source.steps_per_epoch
        assert steps is not None, "the data has a length"
        epoch, first, batch = self._begin(epoch)
        number = max(epoch, 0) + first * _PASSES
        begun = Position(number * steps + batch)
        for data in source.steps(begun, (number + 1) * steps):
            found = self._in_step()
            if found is None:
                raise StepError(
                    "a DataLoader that was read in the body of a step was read outside of one: read it in the body"
                )
            lanes = self._lanes_of(data, *found)
            batch += 1
            self._at = (epoch, first, batch)
            yield lanes

    def _begin(self, epoch: int) -> tuple[int, int, int]:
        """Return the epoch and number of the pass that begins, and its first batch."""
        resumes, self._resumes = self._resumes, False
        found = (epoch, 0, 0)
        if self._at is not None and resumes and epoch in (-1, self._at[0]):
            found = self._at  # where it was left
        elif self._at is not None and self._at[0] == epoch:
            found = (epoch, self._at[1] + 1, 0)
        self._at = found
        return found

    def _opened(self) -> Source:
        if self._source is None:
            setup, loader = self._setup, self._loader
            if isinstance(loader.dataset, IterableDataset):
                raise StepError(
                    "a second loader of iterable data was read in the body of a step, and its place cannot be found "
                    "again after a resume: give it a dataset with a length, or make one dataset of both"
                )
            size = batch_size_of(loader)
            # Other orders and augmentations than the first loader's.
            seed = derive(setup.config.seed, "loader", self._number)
            changes = {"seed": seed, "global_batch": size, "drop_last": bool(loader.drop_last)}
            try:
                plan = BatchPlan(size, setup.batch.lane_count)
            except PlanError as error:
                raise StepError(f"the batch of a second loader, {size}, is cut into lanes, too: {error}") from None
            own = replace(setup, config=setup.config.model_copy(update=changes), planned=plan)
            parts = parts_of(loader, own)
            self._source = open_source(parts.setup, parts.dataset, parts.order, parts.collate)
        return self._source

    def _lanes_of(self, data: StepData, passes: LanePasses, body: LoopBody) -> Any:
        here = passes.data
        if here.index == self._last_step:
            raise StepError(
                "a second loader was read twice in one step: it gives one batch per step. Give it a larger batch_size; "
                "give one of validation data no shuffle=True"
            )
        self._last_step = here.index
        if _filled(here) != _filled(data):
            raise StepError(
                f"in step {here.index} the lanes with samples of two loaders differ, as in the last batch of an epoch: give "
                "both drop_last=True"
            )
        body.run_now("a second loader")
        with body.paused(), self._setup.rng.kept():
            rows = [data.read().data for _ in data.units]
            spare = batch_of_another(self._setup.context, data, lambda: rows[0])
            return join(body.lanes, [self._copies.to_device(row) for row in rows or [spare]])

    # -- a part of a checkpoint ----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {} if self._at is None else {"at": list(self._at)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if "at" in state:
            epoch, first, batch = map(int, state["at"])
            self._at, self._resumes = (epoch, first, batch), True


def _filled(data: StepData) -> list[bool] | tuple[int, ...]:
    """Return which lanes have samples: of all ranks, if that is known."""
    return data.units if data.samples is None else [count > 0 for count in data.samples]
