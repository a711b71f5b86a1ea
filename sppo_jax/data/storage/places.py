"""Addresses: the one place that knows their schemes. Credentials come from the environment, as each service's tools
take them, and never from an address."""

from __future__ import annotations

import datetime
import functools
import glob
import os
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from sppo_jax.data.storage.remote import Remote, patiently, remote_error
from sppo_jax.files.paths import has_keys

_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_SCHEMES = ("s3", "gs", "abfs", "abfss", "hf")
_TRIES_S = 20.0


def is_address(text: str) -> bool:
    """Returns whether a source or a cache is an address and no path of this machine."""
    return bool(_ADDRESS.match(text))


def place_of(address: str, name: str) -> Remote:
    """Returns the file system of an address and the path within it.

    Args:
        address: as the user gave it, such as s3://bucket/folder; may be a pattern.
        name: the setting, for errors.

    Raises:
        ValueError: the address is of another kind, or holds credentials, which are not echoed.
    """
    found = _ADDRESS.match(address)
    assert found
    scheme, rest = found["scheme"].lower(), found["rest"]
    if has_keys(address):
        raise ValueError(
            f"{name} must be an address without credentials, got one of {scheme}:// with keys in it; remove the keys, "
            "and set them in the environment"
        )
    if scheme not in _SCHEMES:
        raise ValueError(_other_scheme(scheme, address, name))
    path = "/".join(part for part in rest.split("/") if part)
    if not path or not rest.split("/")[0]:
        raise ValueError(f"{name} must name a bucket, got {address}; write {scheme}://BUCKET/FOLDER")
    try:
        # Only the hub is asked for something here: the commit of a branch.
        files, path, version = patiently(address, lambda: _hf(path)) if scheme == "hf" else (*_open(scheme, path), "")
    except ImportError as error:
        package = "huggingface_hub" if scheme == "hf" else "pyarrow"
        raise ValueError(f"{name}={address} needs the {package} library; run pip install {package}") from error
    except OSError as error:
        raise remote_error(address, error, "see docs/data.md for what the service needs") from error
    return Remote(files=files, host=f"{scheme}://{rest.split('/')[0]}", path=path, version=version)


def _other_scheme(scheme: str, address: str, name: str) -> str:
    if scheme in ("http", "https"):
        change = "download the file, or name a bucket (s3://, gs://, abfs://) or a data set (hf://datasets/OWNER/NAME)"
    elif scheme == "hdfs":
        change = "copy the files to a bucket or to this machine, or mount HDFS"
    else:
        change = f"name a path, or an address of {', '.join(f'{known}://' for known in _SCHEMES)}"
    return f"{name} must be a path or an address that can be read, got {address}; {change}"


def _open(scheme: str, path: str) -> tuple[Any, str]:
    """Opens the file system of a scheme; returns it with the path as this file system takes it."""
    bucket = path.split("/")[0]
    if scheme == "s3":
        return _s3(bucket, os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")), path
    if scheme == "gs":
        return _gs(), path
    container, _, host = bucket.partition("@")
    return _azure(host.split(".")[0]), "/".join([container, *path.split("/")[1:]])


@functools.cache
def _s3(bucket: str, endpoint: str | None) -> Any:
    from pyarrow import fs

    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    # One try of the SDK: waiting and trying again is done by remote.patiently.
    once = fs.AwsStandardS3RetryStrategy(max_attempts=1)
    settings: dict[str, Any] = {"connect_timeout": _TRIES_S, "request_timeout": _TRIES_S, "retry_strategy": once}
    if endpoint:
        # The SDK that pyarrow carries does not read this variable.
        scheme, _, host = endpoint.partition("://")
        settings |= {"scheme": scheme, "endpoint_override": host.rstrip("/")} if host else {"endpoint_override": scheme}
    elif not region:
        region = fs.resolve_s3_region(bucket)
    return fs.S3FileSystem(region=region, **settings)


@functools.cache
def _gs() -> Any:
    from pyarrow import fs

    return fs.GcsFileSystem(retry_time_limit=datetime.timedelta(seconds=_TRIES_S))


@functools.cache
def _azure(account: str) -> Any:
    from pyarrow import fs

    account = account or os.environ.get("AZURE_STORAGE_ACCOUNT", "")
    if not account:
        raise OSError("no account is named; write abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER")
    given = {"account_key": os.environ.get("AZURE_STORAGE_KEY"), "sas_token": os.environ.get("AZURE_STORAGE_SAS_TOKEN")}
    return fs.AzureFileSystem(account, **{name: value for name, value in given.items() if value})


def _hf(path: str) -> tuple[Any, str, str]:
    """Opens the hub; a branch, or no revision, becomes its present commit, which is returned last."""
    from huggingface_hub import HfFileSystem
    from pyarrow import fs

    hub = HfFileSystem()
    magic = next((at for at, part in enumerate(path.split("/")) if at > 2 and glob.has_magic(part)), None)
    parts = path.split("/")
    try:
        resolved: Any = hub.resolve_path("/".join(parts[:magic]))
    except (ValueError, NotImplementedError) as error:
        raise ValueError(
            f"an address of the hub must have an owner and a name, got hf://{path}; write "
            "hf://datasets/OWNER/NAME@REVISION/PATH"
        ) from error
    folder = {"dataset": "datasets/", "space": "spaces/"}.get(resolved.repo_type, "")
    info = hub._api.repo_info(resolved.repo_id, repo_type=resolved.repo_type, revision=resolved.revision)
    rest = [part for part in (resolved.path_in_repo, *parts[magic:]) if part] if magic else [resolved.path_in_repo]
    whole = "/".join([f"{folder}{resolved.repo_id}@{info.sha}", *(part for part in rest if part)])
    return fs.PyFileSystem(fs.FSSpecHandler(hub)), whole, str(info.sha)


def remote_files(place: Remote, pattern: Sequence[str]) -> tuple[Remote, list[tuple[Remote, int, int]]]:
    """Finds the files of a folder or of a pattern, as `folders.files_in` finds those of this machine.

    Args:
        place: a file, a folder or a pattern.
        pattern: what a folder means.

    Returns:
        The folder, or the folders before the first `*`, `?` or `[`; and its files with their bytes and times (ns).

    Raises:
        ValueError: nothing is there, or it cannot be read.
    """
    from pyarrow import fs

    parts = place.path.split("/")
    first = next((at for at, part in enumerate(parts) if glob.has_magic(part)), None)
    # A name may hold the marks of a pattern.
    found = place.look() if first is None or place.name.count("*") == 0 else None
    if found is not None and found.type == fs.FileType.File:
        return place.at("/".join(parts[:-1])), [(place, found.size, found.mtime_ns or 0)]
    if first is not None and (found is None or found.type == fs.FileType.NotFound):
        root, pattern = place.at("/".join(parts[:first])), parts[first:]
    elif found is None or found.type == fs.FileType.NotFound:
        raise remote_error(place, FileNotFoundError("nothing is there"), "name what exists")
    else:
        root = place
    if not root.path:
        raise ValueError(f"data.source must name a bucket before a pattern, got {place}; write the bucket out")
    selector = fs.FileSelector(root.path, recursive=True)
    infos = patiently(root, lambda: root.files.get_file_info(selector))
    files = [
        (root.at(info.path), info.size, info.mtime_ns or 0)
        for info in infos
        if info.type == fs.FileType.File and matches(info.path.removeprefix(root.path).strip("/").split("/"), pattern)
    ]
    return root, files


def matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Returns whether the names on the way to a file match a pattern, by the rule of `folders.files_in`."""
    if not pattern or not parts:
        return not pattern and not parts
    first, rest = pattern[0], pattern[1:]
    if first == "**":
        deeper = not parts[0].startswith(".") and len(parts) > 1 and matches(parts[1:], pattern)
        return deeper or matches(parts, rest or ("*",))
    shown = not parts[0].startswith(".") or first.startswith(".")
    return shown and fnmatchcase(parts[0], first) and matches(parts[1:], rest)
