"""Rows of Parquet files and of arrow files: streams as the datasets library writes them, and IPC files."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from sppo_jax.data.forms.record import Rows, need_pyarrow, not_utf8, not_whole
from sppo_jax.data.storage.folders import Place, unreadable

COLUMNAR_SUFFIXES = (".parquet", ".arrow")
_BATCH_ROWS = 64
_BUFFER_BYTES = 1 << 20
# How an IPC file begins, and how a stream ends.
_FILE_START, _STREAM_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"


def columnar_rows(path: Place, columns: Sequence[str] | None = None) -> Rows:
    """Yields the rows of a file in order.

    Args:
        path: a .parquet or .arrow file.
        columns: the columns to read, those that the file has; None: all.

    Raises:
        ValueError: the file cannot be read or is not whole.
    """
    number = 0
    for batch in _batches(path, columns):
        for start in range(0, batch.num_rows, _BATCH_ROWS):
            try:
                rows = batch.slice(start, _BATCH_ROWS).to_pylist()
            except UnicodeDecodeError as error:
                what = f"the text of a {path.suffix} file"
                raise not_utf8(what, f"{path} behind row {number}", error, "write the file again") from error
            for row in rows:
                number += 1
                yield f"{path} row {number}", row


def column_types(path: Place) -> dict[str, Any]:
    """Returns the types of a file's columns by their names.

    Raises:
        ValueError: the file cannot be read or is not whole.
    """
    pa, pq = _pyarrow(path)
    with _told(path, pa, lambda: 0), path.open("rb") as file:
        if path.suffix == ".parquet":
            with pq.ParquetFile(file) as parquet:
                schema = parquet.schema_arrow
        else:
            source, is_stream = _source(path, file, pa)
            schema = (pa.ipc.open_stream if is_stream else pa.ipc.open_file)(source).schema
    return dict(zip(schema.names, schema.types, strict=True))


@contextlib.contextmanager
def _told(path: Place, pa: Any, number: Callable[[], int]) -> Iterator[None]:
    """Turns errors of pyarrow and of the system into one line."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise unreadable(path, error) from error
        place = f"{path} behind row {number()}" if number() else path
        raise not_whole(path.suffix, place, error) from error


def _batches(path: Place, columns: Sequence[str] | None) -> Iterator[Any]:
    pa, pq = _pyarrow(path)
    done = 0
    with _told(path, pa, lambda: done), path.open("rb") as file:
        for batch in _parquet(file, columns, pq) if path.suffix == ".parquet" else _arrow(path, file, columns, pa):
            yield batch
            done += batch.num_rows


def _parquet(file: BinaryIO, columns: Sequence[str] | None, pq: Any) -> Iterator[Any]:
    with pq.ParquetFile(file, buffer_size=_BUFFER_BYTES) as parquet:
        wanted = _wanted(parquet.schema_arrow.names, columns)
        yield from parquet.iter_batches(batch_size=_BATCH_ROWS, columns=wanted, use_threads=False)


def _arrow(path: Place, file: BinaryIO, columns: Sequence[str] | None, pa: Any) -> Iterator[Any]:
    source, is_stream = _source(path, file, pa)
    reader = pa.ipc.open_stream(source) if is_stream else pa.ipc.open_file(source)
    wanted = _wanted(reader.schema.names, columns)
    for batch in reader if is_stream else map(reader.get_batch, range(reader.num_record_batches)):
        yield batch.select(wanted)
    if is_stream:
        # A stream that was cut between two batches lacks the mark.
        end = source.tell()
        source.seek(max(0, end - len(_STREAM_END)))
        if source.read(len(_STREAM_END)) != _STREAM_END:
            raise pa.ArrowInvalid("the stream has no end mark")


def _wanted(names: Sequence[str], columns: Sequence[str] | None) -> list[str]:
    return [name for name in names if columns is None or name in columns]


def _source(path: Place, file: BinaryIO, pa: Any) -> tuple[Any, bool]:
    """Returns the bytes of an arrow file and whether they are a stream; a local file is mapped, not read."""
    start = file.read(len(_FILE_START))
    file.seek(0)
    if not start:
        raise pa.ArrowInvalid("the file is empty")
    if not isinstance(path, Path):
        return pa.PythonFile(file, "r"), start != _FILE_START
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return pa.BufferReader(pa.py_buffer(mapped)), start != _FILE_START


def _pyarrow(path: Place) -> tuple[Any, Any]:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise need_pyarrow(path) from None
    return pa, pq
