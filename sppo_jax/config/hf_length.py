"""How long the sequences may be for which a Hugging Face model was made; imports no jax."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

from sppo_jax.config.hf.families import read_num_positions, read_shape
from sppo_jax.config.hf.rope import scaled_length
from sppo_jax.files.paths import local_path

if TYPE_CHECKING:
    from sppo_jax.config.sections import Config


def warn_beyond_length(config: Config) -> None:
    """Warns if the sequences are longer than the imported model's positions, and names the scaling that would do.

    A base that differs from the folder's is another way to train on longer sequences, so it ends the warning. A run
    that continues without its folder is not warned.

    Args:
        config: all settings.
    """
    if config.model.hf is None:
        return
    try:
        folder = local_path(config.model.hf, "model.hf")
        rope, num_positions = read_shape(folder)["rope"], read_num_positions(folder)
    except ValueError:
        return
    length, now = config.sequence.length, config.model.rope
    known = int(num_positions * now.factor / rope["factor"])
    if now.scaling == "yarn":  # the positions may be those before the scaling
        known = max(known, scaled_length(now))
    if length <= known or now.theta != rope["theta"]:
        return
    scaling = "yarn" if now.scaling == "none" else now.scaling
    change = f"model.rope.scaling={scaling} model.rope.factor={math.ceil(now.factor * length / known)}"
    warnings.warn(
        f"sequence.length should be at most {known}, the positions of {folder} with "
        f"model.rope.scaling={now.scaling}, got {length}; set {change}, or raise model.rope.theta",
        stacklevel=2,
    )
