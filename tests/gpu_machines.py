"""Machines with GPUs that are not here: a program that answers as nvidia-smi does."""

from pathlib import Path

GiB = 2**30


def machine(folder: Path, *gpus: tuple[str, int], slices: dict[int, list[str]] | None = None) -> dict[str, str]:
    """Returns the environment of a machine whose nvidia-smi knows these GPUs.

    Args:
        folder: empty; takes the program.
        gpus: name and MiB of each; the driver keeps 600 MiB.
        slices: profiles, e.g. "1g.10gb", of the slices of the GPUs that are divided.
    """
    slices = slices or {}
    rows, listed = [], []
    for number, (name, total_mib) in enumerate(gpus):
        mode = "Enabled" if number in slices else "Disabled"
        rows.append(f"{name}, GPU-{number}{number}aa-bb, {total_mib}, 600, {mode}")
        listed.append(f"GPU {number}: {name} (UUID: GPU-{number}{number}aa-bb)")
        for place, profile in enumerate(slices.get(number, [])):
            listed.append(f"  MIG {profile:<12} Device  {place}: (UUID: MIG-{number}{place}cc-dd)")
    program = folder / "nvidia-smi"
    lines = ["#!/bin/sh", 'if [ "$1" = -L ]; then cat <<END', *listed, "END", "else cat <<END", *rows, "END", "fi"]
    program.write_text("\n".join(lines) + "\n")
    program.chmod(0o755)
    return {"PATH": f"{folder}:/usr/bin:/bin"}
