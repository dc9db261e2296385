"""Which weights are gathered together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from samestep.errors import TaskError
from samestep.reduce.owners import absent, is_held
from samestep.reduce.weight_units import Unit, cut_units, refuse_checkpoints_around


class Decoder(nn.Module):
    """An embedding that is tied to the head, blocks, and a list of small heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4)) for _ in range(3))
        self.heads = nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.embed.weight


def _units(model: nn.Module, *patterns: str) -> dict[str, list[str]]:
    units = cut_units(model, list(model.named_parameters()), patterns)
    return {unit.name: [name for name, _ in unit.params] for unit in units}


def test_blocks_are_those_with_which_the_least_is_held_at_once() -> None:
    units = _units(Decoder())
    assert list(units) == ["layers.0", "layers.1", "layers.2", "what is in no block"]
    assert units["layers.1"] == [f"layers.1.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias")]
    rest = units["what is in no block"]
    assert rest == ["embed.weight", *(f"heads.{i}.{kind}" for i in (0, 1) for kind in ("weight", "bias"))]


def test_a_weight_of_two_blocks_is_in_none() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    model[2].weight = model[0].weight
    units = _units(model)
    assert units == {"0": ["0.bias"], "1": ["1.weight", "1.bias"], "2": ["2.bias"], "what is in no block": ["0.weight"]}


def test_blocks_can_be_named_and_only_the_outermost_count() -> None:
    assert list(_units(Decoder(), "layers.*", "heads")) == [
        "layers.0", "layers.1", "layers.2", "heads", "what is in no block",
    ]  # fmt: skip
    with pytest.raises(TaskError, match=r"shard_blocks: 'blocks\.\*' matches no module; the model has"):
        _units(Decoder(), "blocks.*")


def test_a_frozen_block_is_no_unit() -> None:
    model = Decoder()
    model.layers[1].requires_grad_(False)
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    assert [unit.name for unit in cut_units(model, trained, ())][:-1] == ["layers.0", "layers.2"]


def test_two_parameters_in_one_memory_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.data)
    with pytest.raises(TaskError, match=r"1\.weight and 0\.weight are two parameters in the same memory"):
        _units(model)


def test_activation_checkpointing_around_blocks_is_refused() -> None:
    units = [Unit("encoder.layers.0", nn.Linear(1, 1), []), Unit("rest", None, [])]
    refuse_checkpoints_around(units, ["encoder.layers.*", "rest"])
    with pytest.raises(TaskError, match=r"memory\.checkpoint runs encoder\.layers again"):
        refuse_checkpoints_around(units, ["encoder.*"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
def test_an_absent_weight_reads_as_nan_and_is_known(dtype: torch.dtype) -> None:
    weight = torch.zeros(3, 4, dtype=dtype)
    nothing = absent(weight)
    assert nothing.shape == weight.shape
    assert nothing.isnan().all()
    assert not is_held(nothing)
    assert not is_held(nothing.detach())
    assert is_held(weight)
    assert is_held(torch.zeros(1, dtype=dtype).expand(3, 4)), "somebody else's"
    assert is_held(torch.zeros((), dtype=dtype))
