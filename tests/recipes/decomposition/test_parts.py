"""The recipe's parts by themselves, against numbers computed by hand."""

from __future__ import annotations

import math
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from samestep import LaneBatch
from samestep.data.batch import Moment
from samestep.errors import TaskError

pytestmark = pytest.mark.usefixtures("recipe")


def gradient_of(function: Any, x: Tensor, incoming: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    function(x).backward(incoming)
    assert x.grad is not None
    return x.grad


def test_the_sigmoid_of_masks_leaks_below_and_only_upwards() -> None:
    from importance import lower_leaky

    x = torch.tensor([-1.0, -1.0, 0.0, 0.5, 2.0])
    assert lower_leaky(x).tolist() == [0, 0, 0, 0.5, 1]
    found = gradient_of(lower_leaky, x, torch.tensor([-2.0, 2.0, -1.0, 3.0, 3.0]))
    assert found.tolist() == pytest.approx([-0.02, 0, -0.01, 3, 0])


def test_the_sigmoid_of_sparsity_leaks_above() -> None:
    from importance import upper_leaky

    x = torch.tensor([-1.0, 0.5, 3.0])
    assert upper_leaky(x).tolist() == pytest.approx([0, 0.5, 1.02])
    assert gradient_of(upper_leaky, x, torch.ones(3)).tolist() == pytest.approx([0, 1, 0.01])


def test_gelu_is_torchs() -> None:
    from importance import gelu

    x = torch.linspace(-6, 6, 101)
    torch.testing.assert_close(gelu(x), F.gelu(x))
    torch.testing.assert_close(gradient_of(gelu, x, torch.ones(101)), gradient_of(F.gelu, x, torch.ones(101)))


def test_importance_networks_of_each_kind() -> None:
    from importance import ScalarNetworks, importance_of

    one = ScalarNetworks(count=2, hidden=1)
    with torch.no_grad():
        one.first.copy_(torch.tensor([[1.0], [2.0]]))
        one.first_bias.copy_(torch.tensor([[0.0], [1.0]]))
        one.second.copy_(torch.tensor([[3.0], [1.0]]))
        one.second_bias.copy_(torch.tensor([0.5, 0.0]))
    inner = torch.tensor([[1.0, 2.0]])
    wanted = [3 * F.gelu(torch.tensor(1.0)) + 0.5, F.gelu(torch.tensor(5.0))]
    assert one(inner, inner)[0].tolist() == pytest.approx([float(value) for value in wanted])
    x, strengths = torch.randn(2, 3, 4), torch.randn(2, 3, 5)
    for kind in ("mlp", "vector_mlp", "shared_mlp"):
        assert importance_of(kind, 4, 5, 6, is_embedding=False)(x, strengths).shape == (2, 3, 5)
    words = torch.zeros(2, 3, dtype=torch.long)
    assert importance_of("shared_mlp", 9, 5, 6, is_embedding=True)(words, strengths).shape == (2, 3, 5)
    with pytest.raises(TaskError, match=r"params\.importance is 'deep': give mlp, vector_mlp, sha"):
        importance_of("deep", 4, 5, 6, is_embedding=False)


def test_a_layer_with_masked_components_by_hand() -> None:
    from components import Components

    layer = nn.Linear(2, 1)
    components = Components(2, 1, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 4.0]]))
        layer.bias.fill_(10.0)
        components.v.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        components.u.copy_(torch.tensor([[2.0], [1.0]]))
    x = torch.tensor([[1.0, 1.0]])
    output = layer(x)  # 3 + 4 + 10; the components are 2 and 2, and leave 3 over

    def masked(mask: list[float], delta: float | None) -> float:
        over = None if delta is None else torch.tensor([delta])
        return components(x, output, layer.bias, torch.tensor([mask]), over).item()

    assert masked([1, 1], 1.0) == 17
    assert masked([1, 1], None) == masked([1, 1], 0.0) == 14
    assert masked([0.5, 0], None) == 11
    assert masked([0, 0.25], 0.5) == 12


def test_an_embedding_is_a_layer_whose_inputs_have_a_single_one() -> None:
    from components import components_of

    layer = nn.Embedding(4, 3)
    components = components_of(layer, 5)
    words, mask, delta = torch.tensor([2, 0]), torch.rand(2, 5), torch.rand(2)
    found = components(words, layer(words), None, mask, delta)
    over = layer.weight - components.product()
    wanted = (components.v[words] * mask) @ components.u + delta.unsqueeze(-1) * over[words]
    torch.testing.assert_close(found, wanted)


def test_tied_layers_have_the_same_components_transposed() -> None:
    from decomposed import DecomposedModel
    from targets import ToyModel

    model = DecomposedModel(ToyModel(5, 2), {"linear*": 7}, "mlp", 4, [["linear1", "linear2"]])
    first, second = model.components_for("linear1"), model.components_for("linear2")
    torch.testing.assert_close(second.product(), first.product().t())
    names = [name for name, _ in model.components.named_parameters()]
    assert names == ["linear1.v", "linear1.u"]
    assert "target.linear2.bias" in model.state_dict()
    assert not any("_source" in name for name in model.state_dict())


def test_faithfulness_is_the_mean_square_of_what_is_left_over() -> None:
    from components import Components, unfaithfulness

    layer, components = nn.Linear(2, 1, bias=False), Components(2, 1, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 4.0]]))
        components.v.copy_(torch.tensor([[1.0], [1.0]]))
        components.u.fill_(2.0)
    assert unfaithfulness(iter([(layer, components)])).item() == (1 + 4) / 2


def test_a_warm_up_makes_components_add_up_to_the_weights() -> None:
    from components import unfaithfulness
    from decomposed import DecomposedModel, warm_up
    from targets import ToyModel

    torch.manual_seed(0)
    model = DecomposedModel(ToyModel(5, 2), {"linear1": 8}, "mlp", 4)
    before = unfaithfulness(model.pairs()).item()
    warm_up(model, 200, 0.01, 0.0)
    assert unfaithfulness(model.pairs()).item() < before / 1000
    assert all(parameter.grad is None for parameter in model.parameters())


def test_minimality_by_hand() -> None:
    from losses import annealed, minimality

    importances = {"a": torch.tensor([[0.5, 1.0], [0.5, 0.0]])}
    assert float(minimality(importances, 2.0, 0.0, 1)) == pytest.approx(1.5)
    more = 0.5 * math.log2(1 + 0.5 * 2) + 1.0 * math.log2(1 + 1.0 * 2)
    assert float(minimality(importances, 2.0, 0.1, 2)) == pytest.approx(1.5 + 0.1 * more)
    assert [annealed(2.0, 0.4, at) for at in (0.0, 0.25, 1.0)] == pytest.approx([2.0, 1.6, 0.4])


def test_powers_and_weights_follow_the_run(tmp_path: Path) -> None:
    from targets import ToyModel
    from task import Decomposition

    torch.manual_seed(0)
    torch.save(ToyModel(5, 2).state_dict(), tmp_path / "target.pt")
    x = torch.rand(3, 5)

    def minimality(step: int, **choices: Any) -> float:
        torch.manual_seed(0)
        task = Decomposition(
            "tms", str(tmp_path / "target.pt"), {"linear1": 4}, {"minimality": 1.0}, warm_up_steps=2, **choices
        )
        batch = LaneBatch(0, (x,), (0, 1, 2), Moment(step, total_steps=8))
        (loss, count), *_ = task.loss(task.model(), batch).values()
        assert count == 3
        return loss.item()

    plain = minimality(4)
    assert plain > 0
    assert minimality(4, final_shares={"minimality": 0.5}) == pytest.approx(0.75 * plain)
    assert minimality(0, final_shares={"minimality": 0.5}) == plain
    assert minimality(4, power=1.5, final_power=0.5) == pytest.approx(plain)
    assert minimality(0, power=1.5, final_power=0.5) == minimality(4, power=1.5)


def test_stochastic_masks_are_between_the_importance_and_one() -> None:
    from losses import importance_masks, stochastic_masks

    needed = {"a": torch.tensor([0.0, 0.6, 1.0]).expand(1000, 3)}
    torch.manual_seed(0)
    (found,) = stochastic_masks(needed, delta=True).values()
    assert found.delta is not None
    assert found.delta.shape == (1000,)
    assert (found.mask >= needed["a"]).all()
    assert found.mask.mean(0).tolist() == pytest.approx([0.5, 0.8, 1.0], abs=0.03)
    assert stochastic_masks(needed, delta=False)["a"].delta is None
    assert importance_masks(needed)["a"].mask is needed["a"]


def test_a_subset_replaces_one_to_all_layers_at_each_position() -> None:
    from losses import Masks, layerwise, routed_to_some

    torch.manual_seed(0)
    masks = {name: Masks(torch.ones(6000, 2)) for name in "abc"}
    routed = torch.stack([one.routed for one in routed_to_some(masks).values()])  # type: ignore[arg-type]
    counts = routed.sum(0).bincount(minlength=4)
    assert (counts / 6000).tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3], abs=0.03)
    assert routed.double().mean(1).tolist() == pytest.approx([2 / 3] * 3, abs=0.03)
    errors = {"a": 3.0, "b": 5.0, "c": 1.0}
    assert float(layerwise(masks, lambda one: torch.tensor(errors[next(iter(one))]))) == 3.0


def test_layers_that_are_not_routed_stay_as_they_are() -> None:
    from decomposed import DecomposedModel
    from losses import Masks
    from targets import ToyModel

    model = DecomposedModel(ToyModel(3, 2), {"linear1": 4}, "mlp", 4, delta=False)
    x = torch.rand(2, 3)
    routed = {"linear1": Masks(torch.zeros(2, 4), None, torch.tensor([True, False]))}
    found, whole = model.masked(x, routed), model.target(x)
    assert torch.equal(found[1], whole[1])
    bias = model.target.get_parameter("linear2.bias")
    assert torch.equal(found[0], F.relu(bias)), "nothing comes out of the first layer"


def test_errors_of_outputs_by_hand() -> None:
    from losses import output_error

    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    assert float(output_error("mse", a, b)) == 5.0
    target, found = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.75]]).log()
    wanted = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert float(output_error("kl", found, target)) == pytest.approx(wanted)


def test_all_masks_leave_the_frozen_model_alone_and_losses_have_their_counts() -> None:
    from decomposed import DecomposedModel, LossSettings
    from experiments import experiment_of
    from losses import LOSSES

    experiment = experiment_of("language", {"length": 6, "width": 8, "layers": 1})
    torch.manual_seed(0)
    counts = {"embedding": 4, "blocks.*.attention.*": 3, "blocks.*.mlp_*": 5}
    model = DecomposedModel(experiment.network(), counts, "shared_mlp", 6, error="kl").train()
    assert not model.target.training
    x = experiment.draw(torch.Generator(), 2)
    before = model.target(x)
    found = model(x, LossSettings(LOSSES, 1.0, 0.1, 2))
    assert list(found) == list(LOSSES)
    assert {count for _, count in found.values()} == {12}
    torch.stack([loss for loss, _ in found.values()]).sum().backward()
    assert torch.equal(model.target(x), before)
    assert not any(layer._forward_hooks for layer in model.target.modules())
    assert all(one.grad is None for one in model.target.parameters())
    assert all(one.grad is not None for one in model.components.parameters())
    assert all(one.grad is not None for one in model.importance.parameters())


def test_the_best_assignment_is_found() -> None:
    from measures import assignment

    gains = torch.rand(4, 6, generator=torch.Generator().manual_seed(1)).tolist()
    best = max(permutations(range(6), 4), key=lambda p: sum(gains[r][c] for r, c in enumerate(p)))
    assert assignment(gains) == list(best)


def test_identity_errors_by_hand() -> None:
    from measures import identity_error, sorted_columns

    # Feature 0 has component 2, feature 1 has component 0; one component more is used by feature 1.
    found = torch.tensor([[0.0, 0.0, 0.95], [1.0, 0.4, 0.05]])
    assert torch.equal(sorted_columns(found), found[:, [2, 0, 1]])
    assert identity_error(found) == 1
    assert identity_error(torch.eye(3)) == 0


def test_means_of_lanes_are_those_of_all() -> None:
    from measures import Means

    one, other = Means(), Means()
    one.update("a", torch.tensor(3.0), 1)
    other.update("a", torch.tensor(1.0), 3)
    other.update("b", torch.tensor(2.0), 4)
    one.merge(other)
    assert one.compute() == {"a": 1.0, "b": 0.5}


@pytest.mark.requirement("004-6.2-2", "004-6.3-2")
def test_the_data_of_each_experiment_is_what_it_should_be() -> None:
    from experiments import experiment_of
    from stories import THINGS, WORDS, stories

    x = experiment_of("tms", {}).draw(torch.Generator().manual_seed(0), 20000)
    assert float((x > 0).double().mean()) == pytest.approx(0.05, abs=0.005)
    assert float(x[x > 0].mean()) == pytest.approx(0.5, abs=0.02)
    signed = experiment_of("residual_mlp", {}).draw(torch.Generator().manual_seed(0), 5000)
    assert float(signed[signed != 0].mean()) == pytest.approx(0.0, abs=0.03)
    texts = stories(np.random.default_rng(3), 20, 24)
    assert np.array_equal(texts, stories(np.random.default_rng(3), 20, 24))
    for row in texts:
        words = [WORDS[number] for number in row]
        assert words[1:3] == ["found", "a"]
        assert THINGS[words[4]] == words[3]


def test_what_does_not_fit_is_refused() -> None:
    from decomposed import DecomposedModel
    from experiments import experiment_of
    from targets import ToyModel
    from task import Decomposition

    for words, message in (
        (({"linear3": 2}, "mlp", 4), r"linear3 matches no layer .* there are linear1, linear2"),
        (({"linear1": 2}, "mlp", 4, [["linear1", "linear2"]]), "must be two layers that are decom"),
        (({"linear*": 2}, "mlp", 4, [["linear1", "linear1"]]), "linear1 is tied to a third layer"),
    ):
        with pytest.raises(TaskError, match=message):
            DecomposedModel(ToyModel(3, 2), *words)
    with pytest.raises(TaskError, match=r"params\.experiment is 'gpt': give tms, residual_mlp, la"):
        experiment_of("gpt", {})
    with pytest.raises(TaskError, match=r"params\.sizes does not fit tms: .*depth"):
        experiment_of("tms", {"depth": 3})
    with pytest.raises(TaskError, match=r"loss_weights has sparsity: give some of minimality, f"):
        Decomposition("tms", "x.pt", {"linear1": 2}, {"sparsity": 1.0})
    with pytest.raises(TaskError, match=r"params\.target is x\.pt, and there is no such file"):
        Decomposition("tms", "x.pt", {"linear1": 2}, {"minimality": 1.0}).model()
