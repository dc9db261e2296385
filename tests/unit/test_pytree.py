"""Nested data: one set of rules for every operation."""

from __future__ import annotations

from collections import Counter, OrderedDict, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from samestep.errors import TaskError
from samestep.pytree import digest, leaves, map_leaves, move, pin, signature, take_samples, tensors

META = torch.device("meta")
Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    label: str = "a"


@dataclass
class Batch:
    x: Tensor
    extra: dict[str, Any] = field(default_factory=dict)
    size: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.size = len(self.x)


class ReadOnly(Mapping[str, Any]):
    def __init__(self, **values: Any) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Graph:
    """An object of another library that moves itself."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    def to(self, device: torch.device) -> Graph:
        return Graph(str(device))


def encoding() -> Any:
    from transformers import BatchEncoding

    return BatchEncoding({"input_ids": torch.ones(2, 3), "labels": torch.zeros(2)}, n_sequences=1)


def ones() -> Tensor:
    return torch.ones(2, 3)


CONTAINERS: dict[str, Any] = {
    "tensor": ones(),
    "tuple": (ones(), ones()),
    "list in dict": {"a": [ones(), {"b": ones()}]},
    "named tuple": Pair(ones(), ones()),
    "frozen dataclass": Frozen(ones()),
    "dataclass": Batch(ones(), {"mask": ones()}),
    "ordered dict": OrderedDict(a=ones()),
    "mapping proxy": MappingProxyType({"a": ones()}),
    "read-only mapping": ReadOnly(a=ones()),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_tensor_of_every_container_is_moved(name: str) -> None:
    data = CONTAINERS[name]
    moved = move(data, META)
    assert [tensor.device for tensor in tensors(moved)] == [META for _ in tensors(data)]
    assert all(tensor.device.type == "cpu" for tensor in tensors(data)), "the original stays"


@pytest.mark.parametrize("name", ["named tuple", "frozen dataclass", "dataclass", "list in dict"])
def test_containers_keep_their_types(name: str) -> None:
    assert type(move(CONTAINERS[name], META)) is type(CONTAINERS[name])


def test_a_hugging_face_encoding_is_moved_and_stays_one() -> None:
    batch = encoding()
    moved = move(batch, META)
    assert type(moved) is type(batch)
    assert moved.input_ids.device == moved["labels"].device == META
    assert moved.n_sequences == 1, "what it holds besides its tensors"
    assert batch.input_ids.device.type == "cpu"


def test_a_hugging_face_output_keeps_its_attributes() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    output = BaseModelOutput(last_hidden_state=torch.ones(2))
    moved = move(output, META)
    assert type(moved) is BaseModelOutput
    assert moved.last_hidden_state.device == moved["last_hidden_state"].device == META


def test_a_packed_sequence_moves_itself_since_its_batch_sizes_stay_on_the_host() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = move({"text": packed}, META)["text"]
    assert isinstance(moved, PackedSequence)
    assert moved.data.device == META
    assert moved.batch_sizes.device.type == "cpu"


def test_an_object_of_another_library_moves_itself() -> None:
    assert move([Graph()], META)[0].device == "meta"


def test_numbers_and_texts_stay() -> None:
    assert move({"n": 1, "t": "text", "none": None}, META) == {"n": 1, "t": "text", "none": None}


def test_what_can_be_pinned_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[Tensor] = []

    def pin_memory(self: Tensor) -> Tensor:
        pinned.append(self)
        return self

    monkeypatch.setattr(Tensor, "pin_memory", pin_memory)
    pin({"a": [ones()], "b": Frozen(ones()), "c": encoding(), "d": 1, "e": Graph()})
    assert len(pinned) == 4


def test_small_tensors_need_not_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: "pinned")
    four, eight = torch.zeros(1), torch.zeros(2)
    assert pin((four, eight, four), above=4) == (four, "pinned", four)


def test_leaves_come_in_the_order_of_the_containers() -> None:
    assert list(leaves({"a": [1, (2, 3)], "b": Pair(4, {"c": 5})})) == [1, 2, 3, 4, 5]


def test_a_counter_stays_a_counter() -> None:
    assert type(map_leaves(lambda leaf: leaf, Counter(a=2))) is Counter


# -- parts ---------------------------------------------------------------------------------


def test_samples_are_taken_from_tensors_and_columns() -> None:
    data = {"x": torch.arange(5), "texts": list("abcde"), "pair": (torch.arange(10).view(5, 2), 7)}
    part = take_samples(data, 1, 3, 5)
    assert part["x"].tolist() == [1, 2]
    assert part["texts"] == ["b", "c"]
    assert part["pair"][0].tolist() == [[2, 3], [4, 5]]
    assert part["pair"][1] == 7


def test_samples_of_an_encoding_and_a_dataclass_are_taken() -> None:
    assert take_samples(encoding(), 1, 2, 2)["input_ids"].shape == (1, 3)
    assert take_samples(Frozen(ones()), 0, 1, 2).x.shape == (1, 3)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (torch.zeros(2, 5), r"tensor of shape \(2, 5\)"),
        ({"scale": torch.tensor(1.0)}, r"tensor of shape \(\)"),
        (object(), "holds a object"),
        ([torch.zeros(1)] * 5, r"tensor of shape \(1,\)"),
    ],
)
def test_what_cannot_be_cut_is_named(data: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        take_samples(data, 0, 1, 5)


# -- descriptions --------------------------------------------------------------------------


def test_a_signature_is_the_same_for_the_same_shapes_only() -> None:
    a, b = torch.zeros(2, 3), torch.ones(2, 3)
    assert signature((a, b)) == signature([b, a])
    different = [
        (a,), (a, b), (a, b.double()), (a, b[:1]), {"x": a}, {"y": a}, (a, 1), (a, 2), (a, None),
        (a, "text"), Frozen(a), Frozen(a[:1]),
    ]  # fmt: skip
    assert len({signature(data) for data in different}) == len(different)


def test_a_digest_follows_the_content() -> None:
    assert digest({"x": torch.ones(2)}) == digest({"x": torch.ones(2)})
    different = [torch.ones(2), torch.zeros(2), {"x": torch.ones(2)}, [1, 2], [2, 1], "1", 1.5]
    assert len({digest(data) for data in different}) == len(different)


def test_digests_are_those_of_earlier_versions() -> None:
    """Records of a verification hold them."""
    data = {"x": torch.arange(3), "y": ["text", (1, 2.5)]}
    assert digest(data) == "aa641f9ba9b12d35"
