"""The recipe's parts by themselves: masks, moments, patterns, Jacobians, when a run ends."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samestep import orders
from samestep.errors import TaskError

pytestmark = pytest.mark.usefixtures("recipe")


@pytest.fixture
def fields(tmp_path: Path) -> Any:
    from fields import INPUTS, OUTPUTS, write_fields
    from patterns import Fields

    files = write_fields(tmp_path, times=6, rows=8, columns=10)
    return Fields(*files, INPUTS, OUTPUTS, valid_every=3)


def test_cells_without_a_meaning_do_not_count(fields: Any) -> None:
    import xarray as xr

    with xr.open_dataset(fields.ocean) as ocean, xr.open_dataset(fields.atmosphere) as air:
        aice, hi = ocean["aice"][1].to_numpy().ravel(), ocean["hi"][1].to_numpy().ravel()
        tair = air["tair"][1, 1].to_numpy().ravel()
    meant = np.isfinite(aice) & (hi <= 500) & (tair >= 183.15)
    assert 0 < meant.sum() < len(aice), "there is land"
    rows = {mask: replace(fields, mask=mask).read(1) for mask in ("sea_ice", "ocean", "both")}
    assert len(rows["both"]) == meant.sum()
    assert len(rows["sea_ice"]) == (meant & (aice > 0.05) & (hi > 0)).sum()
    assert len(rows["ocean"]) == (meant & (aice <= 0.05)).sum()
    column = fields.columns.index("tair")
    assert np.array_equal(rows["both"][:, column], tair[meant]), "of the level at the surface"
    thin = replace(fields, mask="both", thin=0.5)
    assert 0 < len(thin.read(1)) < len(rows["both"])
    assert np.array_equal(thin.read(1), thin.read(1))


def test_moments_of_shares_are_those_of_all_with_a_floor_for_what_does_not_vary(fields: Any) -> None:
    from patterns import Patterns

    class Rank:
        """A rank that finds what the others have gathered."""

        def __init__(self, rank: int, world: int, shares: list[Any]) -> None:
            self.rank, self.world, self._shares = rank, world, shares

        def gather(self, mine: Any) -> list[Any]:
            if len(self._shares) < self.world:
                self._shares.append(mine)
                raise InterruptedError
            return self._shares

    alone = Patterns.look(fields)
    for world in (2, 4):
        shares: list[Any] = []
        for rank in range(world):
            with pytest.raises(InterruptedError):
                Patterns.look(fields, Rank(rank, world, shares))  # type: ignore[arg-type]
        assert len(set().union(*shares)) == 6
        together = Patterns.look(fields, Rank(0, world, shares))  # type: ignore[arg-type]
        assert together.counts == alone.counts
        assert together.moments.mean.tobytes() == alone.moments.mean.tobytes()
        assert together.moments.squares.tobytes() == alone.moments.squares.tobytes()
    train = np.concatenate([fields.read(time) for time in (0, 1, 3, 4)]).astype(np.float64)
    mean, std = alone.moments.scale()
    np.testing.assert_allclose(mean, train.mean(0), rtol=1e-6)
    np.testing.assert_allclose(std, train.std(0), rtol=1e-5)


def test_a_column_that_does_not_vary_is_only_shifted() -> None:
    from patterns import Moments

    rows = np.array([[1e4, 3.0], [1e4, 5.0]], np.float32)
    mean, std = Moments.of(rows[:1]).merge(Moments.of(rows[1:])).scale()
    assert mean.tolist() == [1e4, 4.0]
    assert std.tolist() == [1.0, 1.0]
    assert Moments.of(rows[:0]).merge(Moments.of(rows)).count == 2


@pytest.mark.requirement("002-X-1b")
def test_only_pieces_that_are_asked_for_are_kept(fields: Any) -> None:
    from patterns import Patterns

    patterns = Patterns.look(fields)
    rows = patterns.rows(valid=False)
    parts = [orders.lane_part(rows, 4, lane) for lane in range(4)]
    data = patterns.dataset(valid=False, pieces=parts)
    expected = np.concatenate([fields.read(time) for time in (0, 1, 3, 4)])
    assert len(data) == rows == len(expected)
    wanted = [parts[2].stop - 1, parts[2].start]
    assert np.array_equal(torch.stack(data.__getitems__(wanted)).numpy(), expected[wanted])
    assert data.held == len(parts[2])
    assert np.array_equal(torch.stack([data[n] for n in range(rows)]).numpy(), expected)


def test_what_cannot_be_read_is_named(fields: Any, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"params\.mask is 'land': give sea_ice, ocean, both"):
        replace(fields, mask="land")
    with pytest.raises(TaskError, match=r"params\.inputs or params\.outputs is empty"):
        replace(fields, inputs=())
    with pytest.raises(TaskError, match=r"neither .* has salt: there are .*sst"):
        replace(fields, inputs=("salt",)).refuse_missing()
    with pytest.raises(TaskError, match=r"params\.ocean is .*no\.nc, and there is no such file"):
        replace(fields, ocean=tmp_path / "no.nc").refuse_missing()
    with pytest.raises(TaskError, match=r"atmosphere\.nc has aice, sst|has sst"):
        replace(fields, ocean=fields.atmosphere, inputs=("sst",)).refuse_missing()


def test_any_variables_of_the_files_are_taken_by_name(fields: Any, tmp_path: Path) -> None:
    import xarray as xr

    for number, file in enumerate(("atmosphere", "ocean")):
        values = np.arange(4 * 6.0).reshape(4, 2, 3) + number
        values[0, 0, 0] = np.nan
        name = "rain" if number else "cloud"
        array = xr.DataArray(values, dims=("time", "y", "x"), attrs={"units": f"u{number}"})
        xr.Dataset({name: array}).to_netcdf(tmp_path / f"{file}.nc")
    own = replace(
        fields, atmosphere=tmp_path / "atmosphere.nc", ocean=tmp_path / "ocean.nc", inputs=("cloud",),
        outputs=("rain",), mask="none", thin=1.0,
    )  # fmt: skip
    own.refuse_missing()
    assert own.read(0).tolist() == [[float(n), float(n + 1)] for n in range(1, 6)]
    assert len(own.read(1)) == 6
    assert own.variable("rain") == ("ocean", "rain", "u1", False)
    with pytest.raises(TaskError, match=r"has aice, hi, tair: there are cloud, rain"):
        replace(own, mask="both").refuse_missing()


@pytest.mark.requirement("002-X-2b")
def test_the_jacobian_is_that_of_predict_in_physical_units() -> None:
    from networks import Emulator

    torch.manual_seed(0)
    model = Emulator({"a": 0, "b": 1, "c": 0}, {"y": 0, "z": 0}, {}, hidden=5, layers=2)
    for name in ("input_mean", "input_std", "output_mean", "output_std"):
        getattr(model, name).uniform_(0.5, 2.0)
    model.double()
    x = torch.randn(4, 3, dtype=torch.float64)
    found, step = model.jac_physical(x), 1e-6
    for place in range(3):
        aside = torch.zeros(3, dtype=torch.float64)
        aside[place] = step
        slope = (model.predict(x + aside) - model.predict(x - aside)) / (2 * step)
        torch.testing.assert_close(found[:, :, place], slope.detach(), rtol=1e-6, atol=1e-7)


def test_jacobian_metrics_by_hand_and_merged() -> None:
    from jacobians import JacobianMetrics

    first, second = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]]), torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    one, other = JacobianMetrics(["a", "b"]), JacobianMetrics(["a", "b"])
    one.update(first)
    other.update(second)
    one.merge(other)
    found = one.compute()
    assert found["frobenius"] == pytest.approx((5 + math.sqrt(2)) / 2)
    assert found["spectral"] == pytest.approx((4 + 1) / 2)
    assert found["condition"] == pytest.approx((4 / 3 + 1) / 2)
    assert found["max"] == 4
    assert found["std"] == pytest.approx(np.std([3, 0, 0, 4, 1, 0, 0, 1]))
    assert found["sensitivity"] == pytest.approx({"a": 1.0, "b": 1.25})
    assert JacobianMetrics(["a"]).compute() == {}


class Stopped:
    """A run that is told to end."""

    def __init__(self) -> None:
        self.why, self.context = "", self

    @property
    def log(self) -> Any:
        return self

    def main(self, line: str) -> None:
        assert line.startswith("Stopping early: the Jacobian")

    def register(self, name: str, item: Any) -> None:
        self.kept = item

    def stop(self, why: str) -> None:
        self.why = why


def test_a_run_ends_when_its_sensitivities_are_still() -> None:
    from jacobians import JacobianStopping

    def measured(a: float) -> dict[str, float]:
        return {"val_loss": 1.0, "jacobian/sensitivity/a": a, "jacobian/sensitivity/b": 1.0}

    run = Stopped()
    listener = JacobianStopping(run, tolerance=0.1, patience=2, least_evaluations=4)  # type: ignore[arg-type]
    for value in (1.0, 1.01, 1.02):
        listener.on_evaluation(0, measured(value))
    assert run.why == "", "two are still, and four must have been measured"
    listener.on_evaluation(0, {"ema_val_loss": 1.0})
    assert run.why == ""
    listener.on_evaluation(0, measured(2.0))
    listener.on_evaluation(0, measured(2.01))
    again = Stopped()
    resumed = JacobianStopping(again, tolerance=0.1, patience=2, least_evaluations=4)  # type: ignore[arg-type]
    resumed.load_state_dict(listener.state_dict())
    resumed.on_evaluation(0, measured(2.02))
    assert again.why == "the Jacobian has changed by less than 0.1 in each of 2 evaluations"
    with pytest.raises(TaskError, match="has tolerance 0 and patience 2"):
        JacobianStopping(run, tolerance=0, patience=2, least_evaluations=4)  # type: ignore[arg-type]
