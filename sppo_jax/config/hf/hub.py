"""Models by their name on the Hugging Face hub, OWNER/NAME: fetched into the hub's own cache; imports no jax."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sppo_jax.files.format_bytes import format_bytes

# A name, and the folder of the cache that holds a commit of it.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
_ADDRESS = re.compile(r"https?://(?:www\.)?(?:huggingface|hf)\.co/(" + _NAME.pattern + r")(?:/.*)?", re.ASCII)
_CACHED = re.compile(r"models--(.+?)--(.+)")
_CONFIG = "config.json"
# What of a model is read: files at its top, and of these the last only where weights are.
_READ = ("*.json", "*.jinja", "*.txt", "*.model")
_WEIGHTS = ("*.safetensors",)


def is_name(text: str) -> bool:
    """Returns whether a text names a model of the hub: it has the form of a name, and no folder has that name."""
    return bool(_NAME.fullmatch(text)) and not Path(text).exists()


def refuse_address(text: str) -> None:
    """Refuses the address of a model's page on the hub.

    Raises:
        ValueError: says the name.
    """
    if found := _ADDRESS.fullmatch(text):
        raise ValueError(f"a model of the hub must be named hf:OWNER/NAME, got the address {text}; write hf:{found[1]}")


def folder_of_config(name: str) -> Path:
    """Fetches the config.json of a model; returns its folder in the hub's cache.

    Args:
        name: OWNER/NAME.

    Raises:
        ValueError: the hub cannot be asked, or has no such model; says what to do in a line.
    """
    hub = _hub(name)
    try:
        return Path(hub.hf_hub_download(name, _CONFIG)).parent
    except Exception as error:  # of the hub's package, of its network library, of the system
        raise _problem(name, error) from None


def name_of(folder: Path) -> str | None:
    """Returns the name of the model whose commit a folder of the hub's cache holds; None for another folder."""
    found = _CACHED.fullmatch(folder.parent.parent.name) if folder.parent.name == "snapshots" else None
    return f"{found[1]}/{found[2]}" if found else None


def fetch(folder: Path, *, weights: bool, say: Callable[[str], None]) -> None:
    """Fetches the rest of a model whose config.json is in the hub's cache; does nothing for another folder.

    The hub's package locks each file, so of the processes of a host one fetches, and the others wait.

    Args:
        folder: from `folder_of_config`.
        weights: whether the weights are fetched too.
        say: prints a line.

    Raises:
        ValueError: the disk has too little space, or as `folder_of_config`.
    """
    name = name_of(folder)
    if name is None:
        return
    hub, patterns = _hub(name), [*_READ, *(_WEIGHTS if weights else ())]
    given: dict[str, Any] = dict(revision=folder.name, allow_patterns=patterns, ignore_patterns=["*/*"])
    try:
        if not hub.constants.HF_HUB_OFFLINE:
            _check_space(hub, name, folder, patterns, say)
        hub.snapshot_download(name, **given)
    except ValueError:
        raise
    except Exception as error:
        raise _problem(name, error) from None


def _check_space(hub: Any, name: str, folder: Path, patterns: list[str], say: Callable[[str], None]) -> None:
    """Says how many bytes are fetched, if any.

    Raises:
        ValueError: the disk does not have them free.
    """
    listed = hub.HfApi().model_info(name, revision=folder.name, files_metadata=True).siblings
    wanted = {one.rfilename: one.size or 0 for one in listed if "/" not in one.rfilename}
    missing = [
        path for path in hub.utils.filter_repo_objects(wanted, allow_patterns=patterns) if not (folder / path).exists()
    ]
    num_bytes, free_bytes = sum(wanted[path] for path in missing), shutil.disk_usage(folder).free
    if num_bytes > free_bytes:
        raise ValueError(
            f"the disk of the hub's cache must have {format_bytes(num_bytes)} free for {name}, got "
            f"{format_bytes(free_bytes)} at {folder}; free space, or set HF_HOME to a folder on another disk"
        )
    if missing:
        say(f"fetching {name} from the hub: {format_bytes(num_bytes)} into {folder}")


def by_hand(name: str) -> str:
    """Returns how a model is fetched without this package, as the end of a sentence."""
    folder = name.rpartition("/")[2]
    return f"run hf download {name} --local-dir {folder} and use hf:{folder}"


def _hub(name: str) -> Any:
    try:
        import huggingface_hub
        from huggingface_hub.utils import logging
    except ImportError:
        raise ValueError(
            f"a model must be a local folder, got {name}, which is no folder; {by_hand(name)}, or run pip install "
            f"huggingface_hub and use hf:{name}"
        ) from None
    logging.set_verbosity_error()  # of each try; the line of `_problem` says what counts
    return huggingface_hub


def _problem(name: str, error: Exception) -> ValueError:
    """Returns the error of a hub that does not give a model, in a line."""
    error_name, why = type(error).__name__, (str(error).strip() or type(error).__name__).splitlines()[0]
    if error_name == "GatedRepoError":
        change = f"accept its terms on https://huggingface.co/{name}, and run hf auth login or set HF_TOKEN"
    elif error_name in ("RepositoryNotFoundError", "EntryNotFoundError", "RemoteEntryNotFoundError"):
        change = "correct the folder or the name; for a private model run hf auth login or set HF_TOKEN"
    else:
        change = f"connect to the hub without HF_HUB_OFFLINE, or on a machine with network {by_hand(name)}"
    return ValueError(
        f"a model must be a local folder or a model of the hub, got {name}, which is no folder, and which the hub does "
        f"not give ({error_name}: {why}); {change}"
    )
