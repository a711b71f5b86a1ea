"""Rows of files, whatever their form."""

from __future__ import annotations

from collections.abc import Sequence

from sppo_jax.data.cache.left_out import Tally
from sppo_jax.data.forms.array_record import ARRAY_RECORD_SUFFIXES, array_record_rows
from sppo_jax.data.forms.columnar import COLUMNAR_SUFFIXES, column_types, columnar_rows
from sppo_jax.data.forms.json_rows import JSON_SUFFIXES, json_rows
from sppo_jax.data.forms.mds import MDS_SUFFIXES, mds_columns, mds_rows
from sppo_jax.data.forms.record import Rows
from sppo_jax.data.forms.tar import TAR_SUFFIXES, tar_rows
from sppo_jax.data.storage.folders import Place

ROW_SUFFIXES = (*JSON_SUFFIXES, *COLUMNAR_SUFFIXES, *MDS_SUFFIXES, *TAR_SUFFIXES, *ARRAY_RECORD_SUFFIXES)


def read_rows(
    path: Place, *, text_key: str = "text", columns: Sequence[str] | None = None, left_out: Tally | None = None
) -> Rows:
    """Yields the rows of a file in order, each with its place for messages.

    Args:
        path: a file with one of ROW_SUFFIXES.
        text_key: the key of text that stands alone in its row, such as that of a `.txt` member.
        columns: the columns that are needed, where the form can leave out others; None: all.
        left_out: takes the number of what is not read.

    Raises:
        ValueError: the file cannot be read or is not whole; the message names the file and the place.
    """
    if path.name.endswith(JSON_SUFFIXES):
        return json_rows(path)
    if path.name.endswith(COLUMNAR_SUFFIXES):
        return columnar_rows(path, columns)
    if path.name.endswith(MDS_SUFFIXES):
        return mds_rows(path, columns)
    if path.name.endswith(TAR_SUFFIXES):
        return tar_rows(path, text_key, left_out)
    return array_record_rows(path, text_key)


def columns_of(path: Place) -> list[str] | None:
    """Returns the names of the columns of a file whose form names them once; None where each row names its own.

    Raises:
        ValueError: the file cannot be read.
    """
    if path.name.endswith(COLUMNAR_SUFFIXES):
        return list(column_types(path))
    return mds_columns(path) if path.name.endswith(MDS_SUFFIXES) else None
