"""What a run's objects become: who trains, who scales, who runs the lanes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from samestep.errors import TaskError
from samestep.optim.loss_scale import CheckedScaling, LossScale
from samestep.reduce.gradients import LaneSum, OneLaneSum
from samestep.reduce.scaling import Scaling
from samestep.step.build_engine import Prepared, _uses_graphs, prepare
from samestep.step.lane_passes import WholeLanes
from samestep.step.micro_batches import MicroBatches
from samestep.step.run_objects import trainable
from tests.unit.step.engines import LR, Steps, linear, output_sum, setup_of


def prepared(*objects: Any, **values: Any) -> Prepared:
    return prepare(setup_of(**values), objects or pair(), lambda *kinds: None)


def pair() -> list[Any]:
    model = linear()
    return [model, SGD(model.parameters(), lr=LR)]


# -- the objects ----------------------------------------------------------------------------------


def test_objects_are_sorted_by_kind_and_the_first_module_is_the_model() -> None:
    model, other = linear(), linear()
    optimizer = SGD([*model.parameters(), *other.parameters()], lr=LR)
    schedule = StepLR(optimizer, 1)
    given: list[Sequence[Any]] = []
    found = prepare(setup_of(), [schedule, optimizer, model, other], lambda *kinds: given.extend(kinds[:3]))
    assert [list(kind) for kind in given] == [[model, other], [optimizer], [schedule]]
    assert found.reduction.model is model
    assert [found.modules, found.optimizers, found.schedules] == given


def test_parameters_and_buffers_of_all_modules_become_rank_0s() -> None:
    setup, sent = setup_of(), list[Any]()
    setup.context.collectives.broadcast_tensors = sent.extend  # type: ignore[method-assign]
    modules = [nn.BatchNorm1d(2), linear()]
    optimizer = SGD([param for module in modules for param in module.parameters()], lr=LR)
    prepare(setup, [*modules, optimizer], lambda *kinds: None)
    expected = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    assert [id(tensor) for tensor in sent] == [id(tensor) for tensor in expected]


@pytest.mark.parametrize(
    ("objects", "message"),
    [
        (
            lambda: [*pair(), "cosine"],
            "takes modules, optimizers, schedulers, a GradScaler and DataLoaders; it got str",
        ),
        (lambda: pair()[:1], "got Linear, and not its optimizer"),
        (lambda: pair()[1:], "got SGD, and not the model"),
        (lambda: [], "got nothing to train, and not the model"),
    ],
)
def test_what_is_no_model_with_an_optimizer_is_refused(objects: Any, message: str) -> None:
    with pytest.raises(TaskError, match=message):
        prepare(setup_of(), objects(), lambda *kinds: None)


def test_optimizers_that_train_nothing_are_refused() -> None:
    model, optimizer = pair()
    model.requires_grad_(False)
    with pytest.raises(TaskError, match="no parameter of the optimizers requires a gradient"):
        prepared(model, optimizer)


def test_a_checkpoint_is_restored_before_anything_is_built_on_the_weights() -> None:
    model = nn.BatchNorm1d(2)

    def restore(modules: Sequence[nn.Module], *others: Any) -> None:
        modules[0].running_mean.fill_(7.0)  # type: ignore[union-attr]

    found = prepare(setup_of(lanes=2), [model, SGD(model.parameters(), lr=LR)], restore)
    found.reduction.buffers.enter_lane()
    found.reduction.buffers.enter_lane()  # each lane starts from the step's buffers
    assert model.running_mean is not None
    assert model.running_mean.tolist() == [7.0, 7.0]


def test_parameters_are_named_once_and_frozen_ones_apart() -> None:
    model, outside = nn.Sequential(linear(), nn.Linear(1, 1)), nn.Parameter(torch.ones(1))
    model[1].bias.requires_grad_(False)
    first = SGD(model.parameters(), lr=LR)
    second = SGD([model[0].weight, outside], lr=LR)
    trains, frozen = trainable([first, second], [model])
    assert [name for name, _ in trains] == ["0.weight", "1.weight", "optimizer 1 parameter 1"]
    assert trains[2][1] is outside
    assert [name for name, _ in frozen] == ["1.bias"]


# -- what is chosen -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, Scaling),
        ({"precision": "bf16"}, Scaling),
        ({"on_nonfinite": "skip"}, CheckedScaling),
        ({"precision": "fp16"}, LossScale),
        ({"precision": "fp16", "on_nonfinite": "skip"}, LossScale),
    ],
)
def test_the_scaling_follows_from_precision_and_on_nonfinite(values: dict[str, Any], kind: type[Scaling]) -> None:
    found = prepared(**values)
    assert type(found.scaling) is kind
    assert found.reduction.gradients.scaling is found.scaling


@pytest.mark.parametrize(("split", "kind"), [(1, WholeLanes), (2, MicroBatches), ("auto", MicroBatches)])
def test_lanes_run_at_once_unless_they_are_split(split: Any, kind: type) -> None:
    found = prepared(lanes=2, memory={"lane_split": split})
    assert type(found.runner) is kind


def test_a_graph_that_was_requested_is_refused_on_a_cpu() -> None:
    with pytest.raises(TaskError, match=r"speed\.graph: true, but .*speed\.graph: auto"):
        prepared(speed={"graph": True})


def test_by_default_a_cpu_trains_without_graphs_and_without_a_word(capsys: pytest.CaptureFixture[str]) -> None:
    assert type(prepared().runner) is WholeLanes
    assert "graph" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"lanes": 1}, OneLaneSum),
        ({"lanes": 2}, LaneSum),
        ({"lanes": 1, "memory": {"lane_split": 2}}, LaneSum),
        ({"lanes": 4, "same": "samples"}, OneLaneSum),  # one rank fuses its lanes
    ],
)
def test_one_process_sums_by_how_many_backward_passes_it_has(values: dict[str, Any], kind: type) -> None:
    assert type(prepared(**values).reduction.gradients) is kind


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, set()),
        ({"on_nonfinite": "skip"}, {"skipped steps"}),
        ({"precision": "fp16"}, {"skipped steps", "loss scale"}),
        ({"clip": {"adaptive": 2.0}}, {"clipping"}),
        ({"clip": {"norm": 2.0}}, set()),
        ({"lanes": 2, "memory": {"lane_split": "auto"}}, {"lane split"}),
        ({"lanes": 2, "memory": {"lane_split": 2}}, set()),
    ],
)
def test_only_what_remembers_something_is_saved(values: dict[str, Any], names: set[str]) -> None:
    found = prepared(**values).states()
    assert set(found) == names
    assert all(hasattr(item, "load_state_dict") for item in found.values())


# -- the engine -----------------------------------------------------------------------------------


def test_norms_are_measured_for_groups_that_train_only() -> None:
    model = nn.Sequential(linear(), nn.Linear(1, 1), nn.Linear(1, 1))
    model[1].requires_grad_(False)
    groups = [{"params": list(part.parameters())} for part in model]
    steps = Steps(objects=[model, SGD(groups, lr=LR)], clip={"norm": 100.0, "per_group": True})
    steps.first().train(output_sum(model))
    norms = steps.records[0].grad_norm
    assert isinstance(norms, tuple)
    assert len(norms) == 2


def test_groups_may_all_have_a_clip_norm_of_their_own() -> None:
    model = linear()
    groups = [{"params": model.parameters(), "clip_norm": 0.5}]
    for per_group in (False, True):
        clip = {"norm": 1.0, "per_group": per_group}
        steps = Steps(model, objects=[model, SGD(groups, lr=0.1)], clip=clip)
        steps.first().train(output_sum(model))
        assert model.weight.grad is not None
        assert model.weight.grad.norm() <= 0.5 + 1e-6


def test_a_clip_norm_that_is_no_limit_is_refused() -> None:
    model = linear()
    optimizer = SGD([{"params": model.parameters(), "clip_norm": 0.0}], lr=0.1)
    with pytest.raises(TaskError, match=r"clip_norm 0\.0: give a number above 0"):
        Steps(model, objects=[model, optimizer])


def test_layers_that_meet_inside_of_lanes_keep_a_gpu_from_graphs_and_the_log_says_so() -> None:
    lines: list[str] = []
    context = SimpleNamespace(device=torch.device("cuda"), log=SimpleNamespace(main=lines.append))

    def uses(graph: Any, batchnorm: Any) -> bool:
        config = setup_of(speed={"graph": graph}).config
        setup: Any = SimpleNamespace(config=config, context=context)
        return _uses_graphs(setup, [], batchnorm)

    assert uses("auto", None)
    assert lines == []
    assert not uses("auto", object())
    assert "no CUDA graphs, since batchnorm: global lets lanes meet inside of their passes" in lines[0]
    assert not uses(False, object())
    with pytest.raises(TaskError, match="true, but batchnorm: global"):
        uses(True, object())
