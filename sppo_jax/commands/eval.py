"""`sppo eval`: the validation loss of a checkpoint by position, and recall by distance, on the devices at hand."""

import math
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sppo_jax.commands.command import DONE, FAILED, Parser
from sppo_jax.commands.eval_tasks import add_options, check_without_tasks, run_or_folder, run_tasks
from sppo_jax.files.format_bytes import NOT_FINITE, format_figure
from sppo_jax.files.whole import finite, json_text, parse_json, write_whole
from sppo_jax.plan.plan import Plan
from sppo_jax.processes.environment import set_memory_fraction, simulate_devices, skip_cuda_without_driver

if TYPE_CHECKING:
    from sppo_jax.evaluation.validate import Validation

# Characters of the longest bar.
_BAR = 32


def run(words: Sequence[str]) -> int:
    """Evaluates a checkpoint, prints the result and writes it into the run directory; returns the exit code.

    A loss that is not finite is written too, and makes the command fail.
    """
    args = _parser().parse_intermixed_args(words)
    if args.tasks and args.context:
        raise ValueError("--context measures held-out documents, got it with --tasks; remove one of the two")
    if args.tasks:
        return run_tasks(args)
    check_without_tasks(args)

    from sppo_jax.train.checkpoints.read import find_checkpoint, read_run

    checkpoint = find_checkpoint(Path(args.checkpoint))
    saved = read_run(checkpoint)
    _simulate(saved, args.overrides)
    set_memory_fraction()

    from sppo_jax.train.evaluate_saved import evaluate_saved, plan_for_devices

    config, plan = plan_for_devices(saved, args.overrides)
    begin_s = time.perf_counter()
    fingerprint = None if args.overrides else saved.get("data", {}).get("fingerprint")

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    found = evaluate_saved(checkpoint, config, plan, fingerprint, say, args.context)
    entry = _entry(checkpoint, saved, args.overrides, plan, found)
    written = _write(checkpoint, entry)
    if args.json:
        print(json_text(entry, indent=2))
    else:
        print(_text(entry, found, plan, time.perf_counter() - begin_s))
        print(f"wrote {written}" if written else "")
    if found.is_finite:
        return DONE
    print(
        f"the validation loss of a checkpoint must be finite, got {NOT_FINITE} for {checkpoint}; evaluate an earlier "
        "checkpoint, or train again from one with a lower optimizer.lr",
        file=sys.stderr,
    )
    return FAILED


def _parser() -> Parser:
    parser = Parser(
        prog="sppo eval",
        description="Validate a checkpoint: loss by position, recall by distance; or score a model on tasks.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="RUN_OR_CHECKPOINT",
        type=run_or_folder,
        help="a run (its newest checkpoint is used), or a checkpoint; with --tasks also hf:FOLDER or hf:OWNER/NAME",
    )
    parser.add_argument("overrides", metavar="key=value", nargs="*", default=[], help="settings that replace the run's")
    parser.add_argument(
        "--context",
        action="store_true",
        help="also measure what context beyond K tokens is worth: K = length/2, ... 64",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_options(parser)
    return parser


def _simulate(saved: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Simulates the devices that the settings ask for; jax is already imported, but has not looked for devices yet."""
    from sppo_jax.train.evaluate_saved import saved_config

    num_devices = saved_config(saved, overrides).train.num_simulated_devices
    if num_devices:
        simulate_devices(num_devices)
    skip_cuda_without_driver()


def _entry(
    checkpoint: Path, saved: Mapping[str, Any], overrides: Sequence[str], plan: Plan, found: "Validation"
) -> dict[str, Any]:
    mesh = {"data": plan.mesh.data, "pipe": plan.mesh.pipe, "seq": plan.mesh.seq}
    return {
        "checkpoint": str(checkpoint),
        "step": saved.get("step", int(checkpoint.name)),
        "overrides": list(overrides),
        "mesh": mesh,
        "sequence_length": plan.sequence_length,
        "num_targets": found.num_targets,
        **finite(found.metrics()),
    }


def _write(checkpoint: Path, entry: Mapping[str, Any]) -> Path | None:
    """Writes the result into the run directory, beside those of other evaluations; warns if that is not possible."""
    directory = checkpoint.parent
    run_dir = directory.parent if directory.name == "checkpoints" else directory
    mesh = "-".join(f"{axis}{size}" for axis, size in entry["mesh"].items())
    stem, text = f"eval-{entry['step']}-{mesh}-len{entry['sequence_length']}", json_text(entry, indent=2) + "\n"
    path = run_dir / f"{stem}.json"
    try:
        path = _free_path(run_dir, stem, text)
        write_whole(path, text)
    except OSError as error:
        warnings.warn(f"the result is not stored, because {path} cannot be written ({error.strerror})", stacklevel=2)
        return None
    return path


def _free_path(run_dir: Path, stem: str, text: str) -> Path:
    """Returns the first path that holds this result or nothing: the stem, or the stem followed by a number."""
    names = (f"{stem}-{number}.json" if number > 1 else f"{stem}.json" for number in count(1))
    paths = (run_dir / name for name in names)
    return next(path for path in paths if not path.exists() or _result(path.read_bytes()) == _result(text))


def _result(text: str | bytes) -> dict[str, Any] | None:
    """Returns the values of an evaluation without its seconds; None if the text is not an evaluation."""
    try:
        values = parse_json(text)
    except ValueError:
        return None
    seconds = ("validation_s", "validation_compile_s")
    return {key: value for key, value in values.items() if key not in seconds} if isinstance(values, dict) else None


def _text(entry: Mapping[str, Any], found: "Validation", plan: Plan, seconds: float) -> str:
    mesh = plan.mesh
    lines = [
        f"{entry['checkpoint']}: validation loss {format_figure(found.loss, '.4f')} nats per token over {found.extent} "
        f"({seconds:.1f} s on data {mesh.data} x pipe {mesh.pipe} x seq {mesh.seq})",
        "",
        f"{'position':>19}  {'loss':>7}  {'tokens':>9}",
    ]
    most = max((bucket.loss for bucket in found.buckets if math.isfinite(bucket.loss)), default=1.0)
    for bucket in found.buckets:
        span = f"{bucket.first}..{bucket.last}"
        loss, share = format_figure(bucket.loss, "7.4f"), bucket.loss / most if most else 0.0
        lines.append(f"{span:>19}  {loss:>7}  {bucket.num_targets:9,}  {_bar(share)}".rstrip())
    if found.gains:
        lines += ["", f"{'context beyond':>19}  {'gain':>7}  {'tokens':>9}  {'whole':>7}  {'cut':>7}"]
    for gain in found.gains:
        of_gain = [format_figure(gain.gain, "+7.4f"), f"{gain.num_targets:9,}"]
        losses = [format_figure(loss, "7.4f") for loss in (gain.whole, gain.cut)]
        lines.append(f"{gain.beyond:>19,}  " + "  ".join(of_gain + losses))
    if found.recall:
        lines += ["", f"{'recall at distance':>19}  {'found':>7}  {'answers':>9}"]
    for recall in found.recall:
        share = format_figure(recall.accuracy, ".1%")
        lines.append(f"{recall.distance:>19}  {share:>7}  {recall.num_targets:9,}  {_bar(recall.accuracy)}")
    return "\n".join(lines)


def _bar(share: float) -> str:
    return "#" * round(_BAR * max(0.0, share)) if math.isfinite(share) else ""
