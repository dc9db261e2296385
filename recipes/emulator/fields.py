"""Fields of the atmosphere, the ocean and the ice: what they are called, and made-up ones as NetCDF files.

python recipes/emulator/fields.py data --times 40 --size 48 64
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from samestep.errors import OutputError, SamestepError, TaskError

LEVELS = 2
"""Of the atmosphere; the last one is at the surface."""


class Variable(NamedTuple):
    """A field: where it is, and what CF calls it."""

    file: str
    standard_name: str
    units: str
    has_levels: bool = False


VARIABLES = {
    "tair": Variable("atmosphere", "air_temperature", "K", True),
    "qref": Variable("atmosphere", "specific_humidity", "kg kg-1", True),
    "uatm": Variable("atmosphere", "eastward_wind", "m s-1", True),
    "vatm": Variable("atmosphere", "northward_wind", "m s-1", True),
    "tsfc": Variable("atmosphere", "surface_temperature", "K"),
    "flwdn": Variable("atmosphere", "surface_downwelling_longwave_flux_in_air", "W m-2"),
    "fswdn": Variable("atmosphere", "surface_downwelling_shortwave_flux_in_air", "W m-2"),
    "sst": Variable("ocean", "sea_surface_temperature", "degC"),
    "sss": Variable("ocean", "sea_surface_salinity", "1e-3"),
    "uocn": Variable("ocean", "eastward_sea_water_velocity", "m s-1"),
    "vocn": Variable("ocean", "northward_sea_water_velocity", "m s-1"),
    "hi": Variable("ocean", "sea_ice_thickness", "m"),
    "hs": Variable("ocean", "surface_snow_thickness", "m"),
    "sice": Variable("ocean", "sea_ice_salinity", "1e-3"),
    "aice": Variable("ocean", "sea_ice_area_fraction", "1"),
    "vice": Variable("ocean", "sea_ice_volume_per_unit_area", "m"),
}
INPUTS = ("sst", "sss", "tair", "tsfc", "hi", "hs", "sice", "uocn", "vocn", "uatm", "vatm", "qref", "flwdn", "fswdn")
OUTPUTS = ("aice", "vice")

_MEANS_AND_RANGES = {
    "sst": (0.5, 3.0), "sss": (33.5, 1.5), "tair": (258.0, 12.0), "tsfc": (257.0, 11.0), "hi": (1.2, 0.8),
    "hs": (0.25, 0.15), "sice": (6.0, 2.0), "uocn": (0.0, 0.15), "vocn": (0.0, 0.15), "uatm": (0.0, 6.0),
    "vatm": (0.0, 6.0), "qref": (0.0015, 0.0008), "flwdn": (210.0, 40.0), "fswdn": (90.0, 60.0),
}  # fmt: skip
_NOT_NEGATIVE = ("hi", "hs", "sice", "qref", "fswdn")
_WAVES = 6
"""In a field: smooth in space and time, as fields are."""


def netcdf() -> Any:
    """xarray, which reads and writes the files.

    Raises:
        TaskError: if it, or netCDF4 behind it, is not installed.
    """
    try:
        import netCDF4  # noqa: F401
        import xarray
    except ImportError as error:
        raise TaskError(f"NetCDF files need the extra netcdf: {error}") from None
    return xarray


def true_state(x: Tensor) -> Tensor:
    """Return what the made-up ice follows from its surroundings: area and volume, from the inputs in their order."""
    at = {name: x[:, place] for place, name in enumerate(INPUTS)}
    cold = (263.0 - at["tair"]) / 8 + 0.4 * (260.0 - at["tsfc"]) / 10
    wet = (-0.3 - at["sst"]) / 1.5 - 0.15 * (at["sss"] - 33.5)
    packed = 0.5 * torch.tanh(at["uatm"] * at["uocn"] + at["vatm"] * at["vocn"])
    light = -(at["fswdn"] - 90) / 150 - (at["flwdn"] - 210) / 200
    area = torch.sigmoid(cold + wet + packed + light + 0.6 * at["hi"])
    volume = area * at["hi"] * (1 + 0.1 * torch.tanh(2 * at["hs"])) * (1 - 0.01 * at["sice"])
    return torch.stack([area, volume], 1)


def _smooth(rng: np.random.Generator, times: int, rows: int, columns: int) -> NDArray[np.float64]:
    """Return a sum of waves with a mean of about 0 and a standard deviation of about 1."""
    t, y, x = np.meshgrid(np.linspace(0, 1, times), np.linspace(0, 1, rows), np.linspace(0, 1, columns), indexing="ij")
    field = np.zeros_like(t)
    for _ in range(_WAVES):
        a, b, c = rng.normal(0, 6, 3)
        field += np.sin(a * t + b * y + c * x + rng.uniform(0, 2 * np.pi))
    return field * np.sqrt(2 / _WAVES)


def make_fields(times: int, rows: int, columns: int, seed: int) -> dict[str, NDArray[np.float32]]:
    """Return all fields of (time, y, x); land is missing, and a few cells hold what no instrument means."""
    rng = np.random.default_rng(seed)
    fields = {}
    for name in INPUTS:
        mean, spread = _MEANS_AND_RANGES[name]
        noise = rng.normal(0, 0.3, (times, rows, columns))
        field = mean + spread * (_smooth(rng, times, rows, columns) + noise)
        fields[name] = np.abs(field) if name in _NOT_NEGATIVE else field
    x = torch.from_numpy(np.stack([fields[name].ravel() for name in INPUTS], 1))
    y = true_state(x).numpy() + rng.normal(0, 0.01, (x.shape[0], len(OUTPUTS)))
    for place, name in enumerate(OUTPUTS):
        fields[name] = np.maximum(y[:, place], 0).reshape(times, rows, columns)
    fields["aice"] = np.minimum(fields["aice"], 1)
    land = _smooth(rng, 1, rows, columns)[0] > 1
    for field in fields.values():
        field[:, land] = np.nan
    for name, wrong in (("tair", 0.0), ("hi", 9999.0)):
        fields[name][rng.random(fields[name].shape) < 0.002] = wrong
    return {name: field.astype(np.float32) for name, field in fields.items()}


def write_fields(folder: Path, times: int, rows: int, columns: int, seed: int = 0) -> list[Path]:
    """Write `atmosphere.nc` and `ocean.nc`, each of them as a whole or not at all.

    Args:
        folder: where they go; created if missing.
        times: how many states.
        rows: cells from south to north.
        columns: cells from west to east.
        seed: of the fields.
    """
    xr = netcdf()
    if min(times, rows, columns) < 2:
        raise OutputError(f"{times} times of {rows} x {columns} cells: give at least 2 of each")
    fields = make_fields(times, rows, columns, seed)
    coordinates = {
        "time": ("time", np.arange(times) * 6.0, {"units": "hours since 2026-01-01", "axis": "T"}),
        "y": ("y", np.linspace(60, 89, rows), {"standard_name": "latitude", "units": "degrees_north"}),
        "x": ("x", np.linspace(0, 359, columns), {"standard_name": "longitude", "units": "degrees_east"}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for file in ("atmosphere", "ocean"):
        data = {name: _array(fields[name], variable) for name, variable in VARIABLES.items() if variable.file == file}
        dataset = xr.Dataset(data, coords=coordinates, attrs={"Conventions": "CF-1.8"})
        path = folder / f"{file}.nc"
        partial = path.with_suffix(".nc.partial")
        dataset.to_netcdf(partial, engine="netcdf4")
        partial.replace(path)
        written.append(path)
    return written


def _array(field: NDArray[np.float32], variable: Variable) -> tuple[Any, ...]:
    attributes = {"standard_name": variable.standard_name, "units": variable.units}
    if not variable.has_levels:
        return ("time", "y", "x"), field, attributes
    # Higher up it is all a little less.
    layers = [field * np.float32(0.9 ** (LEVELS - 1 - level)) for level in range(LEVELS)]
    return ("time", "level", "y", "x"), np.stack(layers, 1), attributes


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write made-up fields as NetCDF files.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--times", type=int, default=40)
    parser.add_argument("--size", type=int, nargs=2, default=(48, 64), metavar=("ROWS", "COLUMNS"))
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        for path in write_fields(given.folder, given.times, *given.size, given.seed):
            print(f"wrote {path}")
    except SamestepError as error:
        print(f"fields.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
