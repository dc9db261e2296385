"""Tables written batch by batch, as CSV, JSON lines, Parquet or one array; renamed once complete."""

from __future__ import annotations

import contextlib
import csv
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from samestep.checkpoint.files import Files, partial_of
from samestep.errors import MissingExtraError, OutputError, TaskError

Column = np.ndarray[Any, Any] | list[Any]
"""One entry per row: numbers of one shape in an array, anything plain in a list."""

INDEX = "index"
"""The first column: the sample's index in the dataset."""
_ROW_GROUP_BYTES = 64 << 20


class Table(ABC):
    """A file that rows are appended to, several at a time, always with the same columns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.names: tuple[str, ...] = ()
        self.rows = 0

    def add(self, columns: Mapping[str, Column]) -> None:
        """Append rows: one entry per row in each column, which must be the same ones every time."""
        names = tuple(columns)
        if self.names and names != self.names:
            raise TaskError(
                f"the columns were {', '.join(self.names)}, and from row {self.rows} on they are "
                f"{', '.join(names)}: return the same ones in every batch"
            )
        self.names = names
        with _naming_errors(self._path):
            self._write(columns)
        self.rows += len(next(iter(columns.values())))

    @abstractmethod
    def _write(self, columns: Mapping[str, Column]) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """Write what is buffered and close the file."""


class CsvTable(Table):
    """One cell per number: a column of vectors `v` becomes `v_0`, `v_1` and so on."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = path.open("w", encoding="utf-8", newline="")
        # It writes floats by repr, which is read back exactly.
        self._rows = csv.writer(self._file, lineterminator="\n")
        self._header: list[str] = []

    def _write(self, columns: Mapping[str, Column]) -> None:
        cells = [cell for name, column in columns.items() for cell in _cells(name, column)]
        header = [name for name, _ in cells]
        if not self._header:
            if len(set(header)) < len(header):
                raise TaskError(f"two columns would have one name in {', '.join(header)}")
            self._rows.writerow(header)
            self._header = header
        elif header != self._header:
            raise TaskError(
                f"rows from {self.rows} on have the cells {_shortened(header)}, unlike "
                f"{_shortened(self._header)} before, and CSV needs one shape: write .jsonl or "
                ".parquet, or pad them"
            )
        self._rows.writerows(zip(*(values for _, values in cells), strict=True))

    def close(self) -> None:
        self._file.close()


def _cells(name: str, column: Column) -> Iterator[tuple[str, list[Any]]]:
    array = column if isinstance(column, np.ndarray) else np.array(column, dtype=object)
    flat = array.reshape(len(array), -1).T.tolist()
    for place, values in zip(np.ndindex(array.shape[1:]), flat, strict=True):
        if any(isinstance(value, (list, dict)) for value in values):
            raise TaskError(
                f"column {name!r} holds lists of different lengths or mappings, which are not "
                "cells of a CSV file: write .jsonl or .parquet, or pad them"
            )
        yield "_".join([name, *map(str, place)]), values


def _shortened(names: list[str]) -> str:
    return ", ".join(names if len(names) < 7 else [*names[:3], "...", *names[-2:]])


class JsonLinesTable(Table):
    """One JSON object per line; floats in full, so that they are read back exactly."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = path.open("w", encoding="utf-8", newline="\n")

    def _write(self, columns: Mapping[str, Column]) -> None:
        plain = [c.tolist() if isinstance(c, np.ndarray) else c for c in columns.values()]
        for row in zip(*plain, strict=True):
            line = json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False)
            self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()


class ParquetTable(Table):
    """Numbers in their own type, vectors as lists."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError:
            raise MissingExtraError("writing Parquet", "parquet") from None
        self._arrow = pyarrow
        path.touch()  # fails now if it cannot be written, and not after the first batch
        self._writer: Any = None
        self._schema: Any = None
        self._waiting: list[Any] = []

    def _write(self, columns: Mapping[str, Column]) -> None:
        arrays = [self._array(name, column) for name, column in columns.items()]
        part = self._arrow.table(arrays, names=list(columns))
        if self._writer is None:
            self._schema = part.schema
            self._writer = self._arrow.parquet.ParquetWriter(self._path, part.schema)
        self._waiting.append(part)
        # By the bytes so far, and not by how many batches arrived at once.
        if sum(waiting.nbytes for waiting in self._waiting) >= _ROW_GROUP_BYTES:
            self._flush()

    def _array(self, name: str, column: Column) -> Any:
        wanted = None if self._schema is None else self._schema.field(name).type
        try:
            if isinstance(column, list):
                return self._arrow.array(column, type=wanted)
            array = self._nested(column)
        except (self._arrow.ArrowInvalid, self._arrow.ArrowTypeError, OverflowError) as error:
            before = "" if wanted is None else f" of {wanted}, as in the rows before"
            raise TaskError(
                f"column {name!r} is not of one type{before}: {error}. Parquet needs that; .jsonl does not"
            ) from None
        if wanted is not None and array.type != wanted:
            raise TaskError(
                f"column {name!r} was of {wanted} and is of {array.type} from row {self.rows} on: "
                "return one type in every batch"
            )
        return array

    def _nested(self, column: np.ndarray[Any, Any]) -> Any:
        array = self._arrow.array(column.reshape(-1))
        for axis in range(column.ndim - 1, 0, -1):
            entries = int(np.prod(column.shape[:axis]))
            offsets = (np.arange(entries + 1) * column.shape[axis]).astype(np.int32)
            array = self._arrow.ListArray.from_arrays(offsets, array)
        return array

    def _flush(self) -> None:
        if self._waiting:
            whole = self._arrow.concat_tables(self._waiting)
            self._writer.write_table(whole)
            self._waiting = []

    def close(self) -> None:
        if self._writer is not None:
            self._flush()
            self._writer.close()


class NpyTable(Table):
    """One array for numpy, with a row for each sample: a single column of numbers, besides the index."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = path.open("wb")
        self._dtype: Any = None
        self._shape: tuple[int, ...] = ()

    def _write(self, columns: Mapping[str, Column]) -> None:
        # Rows are in order: a sample's index is its row's number.
        name, *others = [name for name in columns if name != INDEX]
        column = columns[name]
        if others:
            raise TaskError(
                f"an .npy file is one array, and there are the columns {', '.join([name, *others])}: choose "
                "one, of embeddings by --view, or write .parquet"
            )
        if not isinstance(column, np.ndarray):
            raise TaskError(
                f"column {name!r} holds more than numbers of one shape, and an .npy file is one array: "
                "write .jsonl or .parquet"
            )
        if self._dtype is None:
            self._dtype, self._shape = column.dtype, column.shape[1:]
            self._write_header(0)
        elif (column.dtype, column.shape[1:]) != (self._dtype, self._shape):
            raise TaskError(
                f"rows from {self.rows} on are {column.dtype} {column.shape[1:]}, unlike {self._dtype} "
                f"{self._shape} before, and an .npy file is one array"
            )
        self._file.write(np.ascontiguousarray(column).tobytes())

    def _write_header(self, rows: int) -> None:
        # numpy pads it so that any number of rows fits.
        shape = (rows, *self._shape)
        described = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": described, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)

    def close(self) -> None:
        if not self._file.closed and self._dtype is not None:
            self._file.seek(0)
            self._write_header(self.rows)
        self._file.close()


FORMATS: dict[str, Callable[[Path], Table]] = {
    "csv": CsvTable,
    "jsonl": JsonLinesTable,
    "parquet": ParquetTable,
    "npy": NpyTable,
}


def format_of(path: Path, requested: str | None) -> str:
    """Return the format of a file: the requested one, or else by its suffix."""
    given = path.suffix.removeprefix(".").lower() if requested is None else requested
    if given in FORMATS:
        return given
    no_suffix = f"the name {path} has no known suffix"
    wrong = no_suffix if requested is None else f"--format is {requested!r}"
    raise OutputError(f"{wrong}: end the name in, or give --format, {' or '.join(FORMATS)}")


@contextmanager
def new_table(path: Path, kind: str) -> Iterator[Table]:
    """A table that is renamed to `path` when the block ends; if it fails, no file remains.

    Raises:
        OutputError: if the file cannot be written.
    """
    files, partial = Files(), partial_of(path)
    with _naming_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        table = FORMATS[kind](partial)
    try:
        yield table
        with _naming_errors(path):
            table.close()
            files.sync(partial)
            files.replace(partial, path)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to report
            table.close()
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def _naming_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(f"{path} could not be written: {error.strerror or error}") from error
