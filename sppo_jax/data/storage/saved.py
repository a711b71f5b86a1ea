"""Folders that a library wrote: which of their files hold data, and in what order.

`save_to_disk` of the datasets library writes state.json, which names the files. MDS has index.json, which names the
shards. Megatron has an .idx beside each .bin.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import Any

from sppo_jax.data.storage.folders import File, Place, exists, unreadable
from sppo_jax.files.whole import parse_json

_STATE, _INFO, _SPLITS, _INDEX = "state.json", "dataset_info.json", "dataset_dict.json", "index.json"


def in_order(root: Place, files: Iterable[File]) -> tuple[list[File], list[File]]:
    """Sorts the files of a folder or a pattern into those that hold data, and others.

    Args:
        root: the folder that the files' names begin below.
        files: the files.

    Returns:
        The files that may hold data, in the order of their names, but of a folder that a library wrote in the order of
        the library; and the files that the folder's own list leaves out, without what describes the data.

    Raises:
        ValueError: a folder holds splits, one of which must be named, or lacks a file of its own list.
    """
    by_name = {file.name: file for file in sorted(files, key=lambda file: file.name)}
    for name, file in by_name.items():
        if PurePosixPath(name).name == _SPLITS:
            _refuse_splits(file)
    order: dict[str, tuple[str, int]] = {name: (name, 0) for name in by_name}
    left_out: set[str] = set()
    described: set[str] = set()
    folders: dict[str, list[str]] = {}
    for name in by_name:
        folders.setdefault(_parent(name), []).append(name)
    for folder in sorted(folders):
        _take_folder(root, folder, folders[folder], by_name, order, left_out, described)
    for name in by_name:
        if name.endswith(".idx") and f"{name.removesuffix('.idx')}.bin" in by_name:
            described.add(name)
    kept = sorted(by_name.keys() - left_out - described, key=order.__getitem__)
    return [by_name[name] for name in kept], [by_name[name] for name in sorted(left_out)]


def _take_folder(
    root: Place,
    folder: str,
    inside: list[str],
    by_name: dict[str, File],
    order: dict[str, tuple[str, int]],
    left_out: set[str],
    described: set[str],
) -> None:
    """Applies the list of one folder, if a library wrote the folder."""
    if any(name.endswith(".arrow") for name in inside):
        state = _list_of(_below(root, folder, _STATE), by_name.get(f"{folder}{_STATE}"))
        if isinstance(state, dict) and isinstance(state.get("_data_files"), list):
            names = [f"{folder}{one.get('filename')}" for one in state["_data_files"] if isinstance(one, dict)]
            described.update({f"{folder}{_STATE}", f"{folder}{_INFO}"} & by_name.keys())
            _keep(
                names, [name for name in inside if name.endswith(".arrow")], folder + _STATE, by_name, order, left_out
            )
    index = f"{folder}{_INDEX}"
    if index in by_name:
        shards = [name for name in inside if ".mds" in name]
        found = (_list_of if shards else _read)(by_name[index].path, by_name[index])
        if isinstance(found, dict) and isinstance(found.get("shards"), list) and "version" in found:
            described.add(index)
            names = [f"{folder}{_check_shard(shard, folder, by_name)}" for shard in found["shards"]]
            _keep(names, shards, index, by_name, order, left_out)


def _keep(
    names: list[str],
    inside: list[str],
    index: str,
    by_name: dict[str, File],
    order: dict[str, tuple[str, int]],
    left_out: set[str],
) -> None:
    """Keeps the files that a list names, in its order; others of the same kind are left out."""
    named = set(names)
    # A pattern may ask for some of them; a folder must have all.
    missing = [name for name in names if name not in by_name]
    if missing and index in by_name:
        raise ValueError(
            f"a folder must hold every file that {index} names, got no {missing[0]} ({len(missing):,} of "
            f"{len(names):,} are missing); copy the folder again"
        )
    order.update({name: (index, number) for number, name in enumerate(names)})
    left_out.update(name for name in inside if name not in named)


def _check_shard(shard: Any, folder: str, by_name: dict[str, File]) -> str:
    """Returns the file of a shard, compressed or not, whose size must be that of the index."""
    shard = shard if isinstance(shard, dict) else {}
    if shard.get("format") != "mds":
        raise ValueError(
            f"a folder of shards must have the format mds, got {shard.get('format')} in {folder}{_INDEX}; write "
            "it again"
        )
    wanted = [shard[key] for key in ("raw_data", "zip_data") if isinstance(shard.get(key), dict)]
    for found in wanted:
        file = by_name.get(f"{folder}{found['basename']}")
        if file and file.num_bytes != found["bytes"]:
            raise ValueError(
                f"a shard must have the bytes that its index says, {found['bytes']:,}, got {file.num_bytes:,} in "
                f"{file.path}; copy the folder again"
            )
        if file:
            return str(found["basename"])
    return str(wanted[-1]["basename"]) if wanted else "no shard"


def _refuse_splits(file: File) -> None:
    found = _read(file.path, file)
    splits = found.get("splits") if isinstance(found, dict) else None
    names = ", ".join(map(str, splits)) if isinstance(splits, list) else "its splits"
    raise ValueError(
        f"data.source must name one split of a folder with several, got {file.path.parent} with {names}; write e.g. "
        f"{file.path.parent}/{splits[0] if splits else 'train'}"
    )


def _list_of(path: Place, listed: File | None) -> Any:
    """Returns the value of the file that lists a folder's data; None if it is missing.

    Raises:
        ValueError: the list is broken: without it, files that are no data would be read.
    """
    found = _read(path, listed)
    if found is None and (listed is not None or exists(path)):
        raise ValueError(
            f"the list of a folder must be readable JSON, got another content in {path}; copy the folder again"
        )
    return found


def _read(path: Place, listed: File | None) -> Any:
    """Returns the value of a small JSON file; None if it is missing or holds something else."""
    if listed is None and not exists(path):
        return None
    try:
        with path.open("rb") as file:
            return parse_json(file.read())
    except ValueError:
        return None
    except OSError as error:
        raise unreadable(path, error) from error


def _parent(name: str) -> str:
    folder, slash, _ = name.rpartition("/")
    return folder + slash


def _below(root: Place, folder: str, name: str) -> Place:
    for part in [*folder.split("/"), name]:
        root = root / part if part else root
    return root
