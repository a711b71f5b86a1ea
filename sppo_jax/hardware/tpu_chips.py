"""What a kernel for TPUs must know of a chip: its cores, and their memory.

Sources: Google Cloud TPU system architecture pages; libtpu 0.0.50.1, which says what it takes of the memory of a core.
"""

from dataclasses import dataclass

_MiB = 2**20


@dataclass(frozen=True)
class TpuChip:
    """One device of a kind of chip.

    Args:
        name: as in `hardware.DEVICES`; "cpu" for a CPU that interprets the kernel.
        kind: how jax names the device.
        cores: that share the memory of the device and run one program.
        vmem_bytes: of the memory of a core for blocks, what a kernel may use.
    """

    name: str
    kind: str
    cores: int
    vmem_bytes: int

    @property
    def is_interpreter(self) -> bool:
        """Whether it is no chip: a CPU runs the kernel."""
        return self.kind == "cpu"


TPU_CHIPS = {
    chip.name: chip
    for chip in (
        TpuChip("cpu", "cpu", 2, 56 * _MiB),
        TpuChip("v5e", "TPU v5 lite", 1, 100 * _MiB),
        TpuChip("v5p", "TPU v5", 2, 56 * _MiB),
        TpuChip("v6e", "TPU v6 lite", 1, 100 * _MiB),
        TpuChip("tpu7x", "TPU7x", 1, 56 * _MiB),
    )
}


def chip_of(kind: str) -> TpuChip:
    """Returns the chip of a device, by jax's name of its kind.

    Raises:
        ValueError: the kernel was not compiled for this chip.
    """
    found = [chip for chip in TPU_CHIPS.values() if chip.kind == kind]
    if not found:
        known = ", ".join(chip.name for chip in TPU_CHIPS.values() if chip.name != "cpu")
        raise ValueError(f"model.kernel=pallas must run on {known}, got {kind}; use model.kernel=blockwise")
    return found[0]
