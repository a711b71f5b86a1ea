"""All published figures as data, and the figures that are left out with the reason."""

from studies.cells import Cell
from studies.published_burst import KERNEL, burst_cells
from studies.published_context import context_cells
from studies.published_pipelines import length_cells, memory_cells, out_of_memory, seq1f1b_cells, sppo_cells

__all__ = ["KERNEL", "LEFT_OUT", "published_cells", "out_of_memory"]


def published_cells() -> list[Cell]:
    """Returns all cells but the kernel's, throughput first."""
    return [
        *seq1f1b_cells(),
        *sppo_cells(),
        *burst_cells(),
        *context_cells(),
        *memory_cells(),
        *length_cells(),
    ]


# Published figures that are no cells: which ones, and why.
LEFT_OUT = (
    ("SPPO 7B against Megatron with the same strategy: 1.13x to 1.29x", "the paper gives no figure for each length"),
    (
        "Seq1F1B's 1.14x at half the memory",
        "the abstract does not say for which setting; 30B at 64K on 64 A100 without recomputation is a cell of memory",
    ),
    (
        "Seq1F1B on Ascend: Qwen3-4B and a cut of DeepSeek-V3",
        "the planner has no figures of the device, and none of experts",
    ),
    ("TRL Qwen3-30B-A3B 1M: 483 s", "the model has no experts"),
    ("MaxText on 64 Ironwood: 44.6% to 52.5% MFU", "the planner has no figures of the device"),
    ("FPDT: MFU by model and length", "whether its FLOPs are causal and count recomputation is not published"),
    ("SuperOffload-Ulysses 13B 1M: 55% MFU", "the counting of FLOPs is not published"),
    ("SlimPipe 70B 2M on 256 Hopper: more than 45% MFU", "a bound, and the model has no exchange of attention work"),
    ("NeMo with FP8 on H100 and B200", "the model has no FP8 products"),
    ("FlexSP and InfiniPipe", "batches of many lengths; the model has one length a step"),
    ("MEPipe on RTX 4090", "a secondary source; the planner has no figures of the device"),
    (
        "LoongTrain without selective checkpoints, 14B 1M: 79.2 tokens/GPU/s",
        "the sheet of the 13B model, which has fewer parameters in the vocabulary alone, has 95.8",
    ),
)
