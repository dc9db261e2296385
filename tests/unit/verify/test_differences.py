"""Distances between runs, in units in the last place."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import ConfigError
from samestep.train.record import RunRecord
from samestep.verify.differences import (
    Difference,
    first_loss_difference,
    first_sample_difference,
    furthest_tensor,
    model_distance,
    read_curve,
    relative_distance,
    same_bits,
    ulp_distance,
)

FLOATS = [torch.float64, torch.float32, torch.bfloat16]


def after(tensor, towards=math.inf):
    return torch.nextafter(tensor, torch.full_like(tensor, towards))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [1.0, -1.0, 0.0, -0.0, 3e-39, 0.75, -1000.0])
def test_neighbours_are_one_apart(dtype, value):
    tensor = torch.tensor([value], dtype=dtype)
    assert ulp_distance(tensor, after(tensor)) == 1
    assert ulp_distance(after(tensor), tensor) == 1
    assert ulp_distance(tensor, after(tensor, -math.inf)) == 1
    assert ulp_distance(tensor, tensor) == 0


@given(st.floats(allow_nan=False, allow_infinity=False, width=32))
def test_neighbours_are_one_apart_wherever_they_are(value):
    for dtype in (torch.float32, torch.float64):
        tensor = torch.tensor([value], dtype=dtype)
        assert ulp_distance(tensor, after(tensor)) == 1


@given(st.lists(st.floats(-1, 1, width=32), min_size=3, max_size=3).map(sorted))
def test_distances_on_the_number_line_add_up(values):
    low, middle, high = torch.tensor(values).split(1)
    there = ulp_distance(low, middle) + ulp_distance(middle, high)
    assert ulp_distance(low, high) == there


def test_half_precision_has_its_own_last_place():
    assert ulp_distance(torch.tensor([1.0]).half(), torch.tensor([1.0 + 2**-10]).half()) == 1


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16])
def test_both_zeros_are_the_same_number(dtype):
    zeros = torch.tensor([0.0], dtype=dtype), torch.tensor([-0.0], dtype=dtype)
    assert ulp_distance(*zeros) == 0
    assert not same_bits(*zeros)


@pytest.mark.parametrize("dtype", FLOATS)
def test_distance_counts_through_zero(dtype):
    zero = torch.zeros(1, dtype=dtype)
    assert ulp_distance(after(zero, -math.inf), after(zero)) == 2


def test_the_furthest_element_counts():
    left = torch.ones(3)
    right = torch.stack([left[0], after(left)[0], after(after(left))[0]])
    assert ulp_distance(left, right) == 2


def test_a_transposed_tensor_is_compared_by_its_elements():
    left = torch.arange(6.0).reshape(2, 3).t()
    assert ulp_distance(left, left.contiguous()) == 0
    assert same_bits(left, left.contiguous())


def test_nan_on_one_side_is_the_largest_distance():
    nan, one = torch.tensor([math.nan]), torch.tensor([1.0])
    assert ulp_distance(nan, one) == ulp_distance(one, nan) == 2**63 - 1
    assert ulp_distance(nan, nan) == 0


def test_whole_numbers_are_apart_by_their_difference():
    assert ulp_distance(torch.tensor([1, 5]), torch.tensor([1, 2])) == 3
    assert ulp_distance(torch.tensor([True]), torch.tensor([False])) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_empty_tensors_do_not_differ(dtype):
    assert ulp_distance(torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype)) == 0


def test_relative_distance_is_over_the_first():
    assert relative_distance(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == 0.1
    assert relative_distance(torch.zeros(2), torch.zeros(2)) == 0.0
    assert relative_distance(torch.zeros(2), torch.ones(2)) == math.inf


def test_equal_states_have_no_furthest_tensor():
    state = {"a": torch.ones(2), "step": torch.tensor(3), "nan": torch.tensor([math.nan])}
    assert furthest_tensor(state, {name: tensor.clone() for name, tensor in state.items()}) is None


def test_the_furthest_tensor_is_named_with_its_distance():
    left = {name: torch.ones(2) for name in "abc"}
    right = {"a": after(left["a"]), "b": torch.tensor([1.0, 2.0]), "c": left["c"]}
    found = furthest_tensor(left, right)
    assert (found.what, found.tensor, found.ulp) == ("state", "b", 2**23)
    assert found.relative == pytest.approx(1 / math.sqrt(2))


def test_a_zero_that_changed_its_sign_is_a_difference_of_no_ulp():
    found = furthest_tensor({"a": torch.tensor([0.0])}, {"a": torch.tensor([-0.0])})
    assert (found.tensor, found.ulp) == ("a", 0)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({}, "a (in one run only)"),
        ({"a": torch.ones(2), "b": torch.ones(1)}, "b (in one run only)"),
        ({"a": torch.ones(3)}, "a (shape or type)"),
        ({"a": torch.ones(2, dtype=torch.float64)}, "a (shape or type)"),
    ],
)
def test_states_that_do_not_match_name_the_tensor(other, named):
    assert furthest_tensor({"a": torch.ones(2)}, other).tensor == named


def test_models_are_compared_as_one_vector_and_optimizers_not_at_all():
    left = {"model.a": torch.ones(4), "model.b": torch.zeros(1), "optimizer0.a": torch.ones(1)}
    right = {**left, "model.b": torch.tensor([0.02]), "optimizer0.a": torch.zeros(1)}
    assert model_distance(left, right) == pytest.approx(0.01)
    assert model_distance(left, left) == 0.0
    assert model_distance(left, {"model.a": torch.ones(4)}) == math.inf


def test_the_imaginary_part_counts():
    left, right = torch.tensor([1 + 1j]), torch.tensor([1 + 5j])
    assert relative_distance(left, right) > 1
    assert ulp_distance(left, right) > 0


def test_ulps_do_not_overflow():
    two = torch.tensor([2.0], dtype=torch.float64)
    assert ulp_distance(two, -two) == 2 * 0x4000000000000000


def test_the_first_loss_that_differs_is_found():
    found = first_loss_difference([1.0, 0.5, 0.25], [1.0, math.nextafter(0.5, 1), 9.0])
    assert (found.what, found.step, found.ulp) == ("loss", 1, 1)
    assert found.relative == pytest.approx(2**-52)


def test_equal_curves_do_not_differ():
    curve = [1.0, math.nan, math.inf, 0.0]
    assert first_loss_difference(curve, list(curve)) is None


@pytest.mark.parametrize(("rtol", "step"), [(0.0, 0), (0.015, 1), (0.05, None)])
def test_losses_within_the_tolerance_do_not_differ(rtol, step):
    found = first_loss_difference([1.0, 2.0], [1.01, 2.06], rtol)
    assert found is None if step is None else found.step == step


@pytest.mark.parametrize("pair", [(0.0, 1e-9), (1.0, math.nan), (math.nan, 1.0), (1.0, math.inf)])
def test_no_tolerance_covers_a_loss_that_is_no_longer_zero_or_finite(pair):
    left, right = pair
    assert first_loss_difference([left], [right], rtol=0.5).step == 0


def test_a_shorter_curve_differs_where_it_ends():
    assert first_loss_difference([1.0, 2.0, 3.0], [1.0, 2.0]) == Difference("steps", 2)


def record(samples):
    return RunRecord(1, len(samples), [0.0] * len(samples), samples, "", [""], 0.0)


def test_the_first_step_with_other_samples_is_found():
    assert first_sample_difference(record(["a", "b"]), record(["a", "b"])) is None
    assert first_sample_difference(record(["a", "b"]), record(["a", "c"])).step == 1
    shorter = first_sample_difference(record(["a", "b"]), record(["a"]))
    assert (shorter.what, shorter.step) == ("steps", 1)


def test_a_difference_reads_as_a_sentence():
    full = Difference("loss", 3, tensor="w", ulp=12345, relative=0.00012)
    assert str(full) == "loss from step 3 on, w, 12,345 ULP, 0.00012 relative"
    assert str(Difference("state", tensor="w", ulp=0)) == "state, w, 0 ULP"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("last_column.csv", "step,loss\n0,0.5\n1,0.25\n"),
        ("first_column.csv", "Loss , step\n0.5,0\n0.25,1\n"),
        ("between.csv", "step,loss,val_loss\n0,0.5,7\n1,0.25,8\n"),
        ("no_header.csv", "0,0.5\n1,0.25\n"),
        ("one_column.csv", "0.5\n\n0.25\n"),
        ("log.txt", "loss\n0.5\n0.25\n"),
        ("metrics.jsonl", '{"step": 0, "loss": 0.5}\n{"val_loss": 3}\n{"loss": 0.25}\n'),
    ],
)
def test_a_loss_curve_is_read(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    assert read_curve(path) == [0.5, 0.25]


def test_a_loss_in_json_keeps_every_bit(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"loss": 0.1 + 0.2}))
    assert read_curve(path) == [0.1 + 0.2]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("words.csv", "step,loss\n0,low\n", "is not a loss curve: .*low"),
        ("ragged.csv", "step,loss\n0\n", "is not a loss curve"),
        ("header.csv", "step,loss\n", "holds no losses: give a CSV with a 'loss' column"),
        ("broken.jsonl", '{"loss": 0.5}\n{"loss"\n', "is not a loss curve"),
        ("text.jsonl", '{"loss": "low"}\n', "is not a loss curve: .*low"),
        ("number.jsonl", "0.5\n", "is not a loss curve"),
        ("other.jsonl", '{"accuracy": 1}\n', "holds no losses"),
        ("empty.jsonl", "", "or JSON lines with 'loss'"),
    ],
)
def test_a_file_that_is_not_a_loss_curve_is_refused(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_curve(path)
    assert name in str(caught.value)
