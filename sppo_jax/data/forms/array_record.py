"""Records of ArrayRecord files: each is a JSON object, a tf.train.Example, or plain text."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sppo_jax.data.forms.example import example_features
from sppo_jax.data.forms.record import Rows, json_object, not_utf8, not_whole
from sppo_jax.data.storage.folders import Place, unreadable
from sppo_jax.data.storage.room import check_room

ARRAY_RECORD_SUFFIXES = (".array_record", ".arrayrecord")
# Larger batches were slower.
_BATCH_BYTES = 1 << 21
_MOST_RECORDS = 4096


def array_record_rows(path: Place, text_key: str) -> Rows:
    """Yields the records of a file in order.

    Args:
        path: an ArrayRecord file.
        text_key: the key that a record of plain text gets.

    Raises:
        ValueError: the file cannot be read, is not whole, or a record is no text.
    """
    for number, record in enumerate(_records(path), 1):
        where = f"{path} record {number}"
        yield where, _row(record, text_key, where)


def _row(record: bytes, text_key: str, where: str) -> dict[str, Any]:
    if record[:1] == b"{":
        return json_object(record, "a record that begins with { must be a JSON object", where, "write the file again")
    features = example_features(record)
    if features is not None:
        return features
    try:
        return {text_key: record.decode()}
    except UnicodeDecodeError as error:
        raise not_utf8("a record that is no tf.train.Example", where, error, "write the file again") from error


def _records(path: Place) -> Iterator[bytes]:
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError:
        raise ValueError(
            f"{path} needs the array_record library, which is not installed; run pip install array_record"
        ) from None
    with _local(path) as local:
        try:
            local.open("rb").close()
            reader = ArrayRecordReader(str(local), "readahead_buffer_size:0")
        except OSError as error:
            raise unreadable(path, error) from error
        except (RuntimeError, ValueError, IndexError) as error:
            raise not_whole(".array_record", path, error, "copy the file again") from error
        try:
            count = reader.num_records()
            # About as many records as some megabytes of the file hold.
            step = max(1, min(_MOST_RECORDS, count * _BATCH_BYTES // max(1, local.stat().st_size)))
            for start in range(0, count, step):
                yield from reader.read(start, min(start + step, count))
            if not reader.ok():  # of a file that is cut short it gives no record, and raises nothing
                raise RuntimeError("its index cannot be read")
        except (RuntimeError, ValueError, IndexError) as error:
            raise not_whole(".array_record", path, error, "copy the file again") from error
        finally:
            with contextlib.suppress(RuntimeError):
                reader.close()


@contextlib.contextmanager
def _local(path: Place) -> Iterator[Path]:
    """Gives a file of this machine, which the library asks for: a remote one is copied while it is read."""
    if isinstance(path, Path):
        yield path
        return
    rule = f"the temporary directory must have room for a copy of {path}"
    check_room(Path(tempfile.gettempdir()), path.look().size or 0, rule, "free space, or set TMPDIR to another disk")
    with tempfile.NamedTemporaryFile(suffix=path.suffix) as copy:
        with path.open("rb") as file:
            shutil.copyfileobj(file, copy, 1 << 22)
        copy.flush()
        yield Path(copy.name)
