"""Which parameters get which optimizer, rate and decay; in which form; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo  # which the first optimizer imports, and which sets an environment variable
from torch import nn
from torch.optim import Optimizer

from samestep.config import load_config
from samestep.config.optim import OptimizerConfig
from samestep.errors import ConfigError, TaskError
from samestep.optim.optimizers import build_optimizers, describe_optimizer

CPU = torch.device("cpu")


class LlamaRMSNorm(nn.Module):
    """A normalisation that is not torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.LayerNorm(4))
        self.attention = nn.MultiheadAttention(4, 1)
        self.norm = LlamaRMSNorm()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(4))
        self.out = nn.Linear(4, 5)
        self.out.weight = self.embed.weight


class Center(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.centers = nn.Parameter(torch.zeros(5, 5))


def build(*modules: nn.Module, **section: Any) -> list[Optimizer]:
    return build_optimizers(OptimizerConfig(**section), modules or (Model(),), CPU)


def groups(optimizers: list[Optimizer], *modules: nn.Module) -> list[tuple[Any, ...]]:
    """(class, rate, decay, names) of every group."""
    names = {id(p): f"{'' if not n else 'extra.'}{name}"
             for n, m in enumerate(modules) for name, p in m.named_parameters()}  # fmt: skip
    return [
        (
            type(optimizer).__name__,
            group["lr"],
            group.get("weight_decay"),
            {names[id(param)] for param in group["params"]},
        )
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]


DECAYED = {"embed.weight", "body.0.weight", "attention.in_proj_weight", "attention.out_proj.weight", "scale"}
NORMS = {"body.1.weight", "body.1.bias", "body.2.weight", "body.2.bias", "norm.weight"}
BIASES = {"body.0.bias", "attention.in_proj_bias", "attention.out_proj.bias", "out.bias"}


def test_biases_and_norms_have_no_decay_and_frozen_parameters_no_optimizer() -> None:
    model = Model()
    assert groups(build(model, weight_decay=0.1), model) == [
        ("AdamW", 1e-3, 0.1, DECAYED),
        ("AdamW", 1e-3, 0.0, NORMS | BIASES),
    ]


@pytest.mark.parametrize(
    ("rules", "undecayed"),
    [
        (["norm"], NORMS),
        (["bias"], BIASES | {"body.1.bias", "body.2.bias"}),
        (["scale", "embed.*"], {"scale", "embed.weight"}),
        (["out.weight"], {"embed.weight"}),
        (["norm", "scale"], NORMS | {"scale"}),
    ],
)
def test_rules_of_no_decay(rules: list[str], undecayed: set[str]) -> None:
    model = Model()
    found = groups(build(model, no_decay=rules), model)
    assert found[1] == ("AdamW", 1e-3, 0.0, undecayed)
    assert found[0] == ("AdamW", 1e-3, 0.01, (DECAYED | NORMS | BIASES) - undecayed)


def test_without_weight_decay_nothing_is_split() -> None:
    model = Model()
    everything = DECAYED | NORMS | BIASES
    assert groups(build(model, name="SGD"), model) == [("SGD", 1e-3, 0.0, everything)]
    assert groups(build(model, name="rprop"), model) == [("Rprop", 1e-3, None, everything)]
    none = build(model, no_decay=[], weight_decay=0.3)
    assert groups(none, model) == [("AdamW", 1e-3, 0.3, everything)]


def test_the_first_group_that_matches_has_a_parameter() -> None:
    model = Model()
    found = build(
        model,
        name="sgd",
        lr=0.1,
        args={"momentum": 0.9},
        groups=[{"match": ["attention.*", "scale"], "lr": 0.01}, {"match": ["*.bias"], "lr": 0.5, "weight_decay": 0.2}],
    )
    attention = {n for n, p in model.named_parameters() if n.startswith("attention.")}
    biases = {"body.0.bias", "body.1.bias", "body.2.bias", "out.bias"}
    assert len(found) == 1
    assert found[0].param_groups[2]["momentum"] == 0.9
    assert groups(found, model) == [
        ("SGD", 0.1, 0.0, (DECAYED | NORMS | BIASES) - attention - biases - {"scale"}),
        ("SGD", 0.01, 0.0, attention | {"scale"}),
        ("SGD", 0.5, 0.0, biases),  # by no_decay, though the group has a decay
    ]


def test_groups_of_another_name_or_other_arguments_are_other_optimizers() -> None:
    model, center = Model(), Center()
    found = build(
        model,
        center,
        args={"betas": [0.8, 0.9]},
        groups=[
            {"match": ["body.*"], "name": "SGD", "lr": 0.2, "args": {"momentum": 0.5}},
            {"match": ["scale"], "args": {"betas": [0.7, 0.9]}},
            {"match": ["extra.0.*"], "name": "sgd", "lr": 0.3, "args": {"momentum": 0.5}},
            {"match": ["out.*"], "name": "adamw", "lr": 0.4},
        ],
    )
    kinds = [type(optimizer).__name__ for optimizer in found]
    assert kinds == ["AdamW", "SGD", "AdamW"]
    assert [o.defaults.get("betas") for o in found] == [(0.8, 0.9), None, (0.7, 0.9)]
    assert found[1].defaults["momentum"] == 0.5
    rates = {frozenset(names): lr for _, lr, _, names in groups(found, model, center)}
    assert rates[frozenset({"extra.centers"})] == 0.3
    assert rates[frozenset({"embed.weight"})] == 0.4, "a shared parameter answers to both names"
    everywhere = [id(p) for o in found for group in o.param_groups for p in group["params"]]
    assert len(everywhere) == len(set(everywhere))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_for_matrices_beside_adamw() -> None:
    model = Model()
    muon = {"match": ["body.0.weight", "*proj*weight"], "name": "muon", "lr": 0.02}
    found = build(model, groups=[muon])
    assert [type(optimizer).__name__ for optimizer in found] == ["AdamW", "Muon"]
    with pytest.raises(ConfigError, match=r"Muon refuses body.0.bias, body.1.weight.*2D") as caught:
        build(model, groups=[{**muon, "match": ["body.*"]}])
    assert caught.value.mistakes[0].path == "optimizer.groups[0]"


def test_every_mistake_of_the_section_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build(
            name="AdamV",
            no_decay=["bias", "nrm.*"],
            groups=[
                {"match": ["heads.*"], "name": "sgd", "args": {"momentun": 0.9}},
                {"match": ["body.*"], "name": "lbfgs"},
                {"match": ["body.0.*"], "name": "rprop", "weight_decay": 0.1},
                {"match": ["frozen.*"], "name": "adam", "args": {"betas": [0.9, 1.5]}},
            ],
        )
    found = {mistake.path: mistake.message for mistake in caught.value.mistakes}
    words = {
        "optimizer.name": "Adam, Adamax, AdamW",
        "optimizer.no_decay": "there are norm.weight",
        "optimizer.groups[0].match": "no parameter is called 'heads.*'",
        "optimizer.groups[0].args.momentun": "it takes momentum, dampening, nesterov, maximize",
        "optimizer.groups[1].name": "several times in one step",
        "optimizer.groups[2].match": "groups before it have all",
        "optimizer.groups[2].weight_decay": "Rprop has none",
        "optimizer.groups[3].match": "frozen",
        "optimizer.groups[3].args": "Invalid beta parameter at index 1: 1.5",
    }
    assert found.keys() == words.keys()
    for path, part in words.items():
        assert part in found[path], path


@pytest.mark.parametrize("name", ["fused", "lr", "params", "differentiable"])
def test_arguments_with_a_key_of_their_own_are_not_arguments(name: str) -> None:
    with pytest.raises(ConfigError, match="does not take it: it takes betas, eps"):
        build(args={name: True})


def test_a_model_without_trainable_parameters() -> None:
    with pytest.raises(TaskError, match="requires a gradient"):
        build(nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize(
    ("name", "implementation", "form"),
    [
        ("adamw", "auto", "fused"),
        ("adamw", "plain", "plain"),
        ("adamw", "foreach", "foreach"),
        ("sgd", "fused", "fused"),
        ("rmsprop", "auto", "plain"),
        ("adafactor", "auto", "plain"),
    ],
)
def test_forms_on_a_cpu(name: str, implementation: str, form: str) -> None:
    (optimizer,) = build(nn.Linear(3, 2), name=name, implementation=implementation)
    assert describe_optimizer(optimizer).split()[1] == f"({form})"


def test_no_fused_form_for_complex_numbers() -> None:
    (optimizer,) = build(nn.Linear(3, 2, dtype=torch.complex64))
    assert describe_optimizer(optimizer) == "AdamW (plain) of 2 tensor(s) in 2 group(s)"


def test_a_form_that_there_is_not() -> None:
    with pytest.raises(ConfigError, match=r"implementation: RMSprop has no fused form: set auto"):
        build(name="rmsprop", implementation="fused")
    with pytest.raises(ConfigError, match=r"AdamW has no fused form for torch.complex64 on cpu"):
        build(nn.Linear(3, 2, dtype=torch.complex64), implementation="fused")


@pytest.mark.parametrize("name", sorted({"adamw", "sgd", "adagrad", "nadam", "rmsprop", "asgd"}))
def test_a_named_optimizer_steps_as_one_made_by_hand(name: str) -> None:
    made, ours = nn.Linear(3, 2), nn.Linear(3, 2)
    ours.load_state_dict(made.state_dict())
    classes = {k.lower(): v for k, v in vars(torch.optim).items()}
    by_hand = classes[name](made.parameters(), lr=0.05, weight_decay=0.1)
    (by_name,) = build(ours, name=name, lr=0.05, weight_decay=0.1, no_decay=[])
    for _ in range(3):
        for model, optimizer in ((made, by_hand), (ours, by_name)):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).square().sum().backward()
            optimizer.step()
    for a, b in zip(made.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def config_of(**values: Any) -> Any:
    return load_config({"task": "task.py:T", "epochs": 1, "global_batch": 64, **values})


def test_a_section_that_is_empty_is_on_and_needs_a_task() -> None:
    assert config_of(optimizer={}).optimizer == OptimizerConfig()
    assert config_of().optimizer is None
    with pytest.raises(ConfigError, match="a custom training loop creates its own"):
        config_of(task=None, optimizer={})
    with pytest.raises(ConfigError, match=r"entry 0\.match"):
        config_of(optimizer={"groups": [{"match": []}]})
