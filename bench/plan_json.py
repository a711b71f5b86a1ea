"""`sppo plan --json` of all shipped configs, of an older commit and of this checkout, key by key.

    python -m bench.plan_json --against COMMIT                a line a config: equal, or the keys that differ
    python -m bench.plan_json --against COMMIT --only WORD    only configs whose name has this word

Each version plans its own files of configs/, each in a process of its own. Keys and values are compared byte by byte,
save for `LEFT_OUT`; settings of the older plan's model are read by their names of today, as those of a saved plan.
A config that names no devices is planned for `CLUSTER`. Takes about 8 seconds of CPU a config. The command fails where
something differs.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sppo_jax.plan.renamed import model_of_today

HERE = Path(__file__).parents[1]
CLUSTER = "h100:1x8"
# Seconds of this process, the format, which a renamed key raises, and the version that planned.
LEFT_OUT = ("search.seconds", "schema_version", "version")
_MOST_SHOWN = 5


def lines_of(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the key of each value of a JSON document, such as `rejected.0.step_s`, with its text, in order."""
    named = value if isinstance(value, dict) else dict(enumerate(value)) if isinstance(value, list) else None
    if not named:
        yield key, json.dumps(value)
        return
    for name, one in named.items():
        yield from lines_of(one, f"{key}.{name}" if key else str(name))


def compared(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the keys and texts of a plan that are compared, by the names of today."""
    today = {key: model_of_today(value) if key == "model" else value for key, value in plan.items()}
    return [(key, text) for key, text in lines_of(today) if key not in LEFT_OUT]


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return what differs of two plans, a key a line; one line where only the order of keys differs."""
    before, after = compared(old), compared(new)
    if before == after:
        return []
    texts, now = dict(before), dict(after)
    keys = [key for key in {**texts, **now} if texts.get(key) != now.get(key)]
    return [f"{key}: {texts.get(key, 'absent')} -> {now.get(key, 'absent')}" for key in keys] or ["the order of keys"]


def plan_json(folder: Path, config: Path) -> Any:
    """Return what `sppo plan --json` of a checkout prints for one of its configs.

    Raises:
        RuntimeError: the command prints no plan.
    """
    settings = yaml.safe_load((folder / config).read_text(encoding="utf-8"))
    words = [sys.executable, "-m", "sppo_jax.cli", "plan", str(config), "--json"]
    if "cluster" not in settings.get("hardware", {}) and "devices" not in settings.get("train", {}):
        words += ["--cluster", CLUSTER]
    with tempfile.TemporaryDirectory() as cache:  # no plan depends on what this user's cache has
        environment = {**os.environ, "PYTHONPATH": str(folder), "XDG_CACHE_HOME": cache}
        ran = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if not ran.stdout:
        raise RuntimeError(f"sppo plan {config} in {folder} prints no plan: {ran.stderr.strip()[-500:]}")
    return json.loads(ran.stdout)


def configs(folder: Path) -> list[Path]:
    """Return the shipped configs of a checkout, as paths within it."""
    return sorted(path.relative_to(folder) for path in (folder / "configs").rglob("*.yaml"))


def unpack(commit: str, folder: Path) -> None:
    """Write the files of a commit of this repository to a folder."""
    ran = subprocess.run(["git", "archive", commit], cwd=HERE, stdout=subprocess.PIPE, check=True)
    with tarfile.open(fileobj=io.BytesIO(ran.stdout)) as files:
        files.extractall(folder, filter="data")


def main(words: Sequence[str] | None = None) -> int:
    """Print how the plans of both versions compare; 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", required=True, metavar="COMMIT", help="the older version")
    parser.add_argument("--only", default="", metavar="WORD", help="configs whose name has this word")
    args = parser.parse_args(words)
    num_equal = num_compared = 0
    with tempfile.TemporaryDirectory() as name:
        before = Path(name)
        unpack(args.against, before)
        for config in sorted({*configs(before), *configs(HERE)}):
            if args.only not in config.stem:
                continue
            absent = [where for where, folder in (("before", before), ("now", HERE)) if not (folder / config).exists()]
            found = (
                [f"absent {absent[0]}"] if absent else differences(plan_json(before, config), plan_json(HERE, config))
            )
            num_compared, num_equal = num_compared + 1, num_equal + (not found)
            print(f"{config.stem:<28}{'equal' if not found else f'{len(found)} differ'}", flush=True)
            for line in found[:_MOST_SHOWN]:
                print(f"    {line}")
    print(f"{num_equal} of {num_compared} equal")
    return int(num_equal < num_compared)


if __name__ == "__main__":
    raise SystemExit(main())
