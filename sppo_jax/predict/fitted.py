"""The fitted numbers of the memory model: what no structure of the program tells.

`python bench/fit_numbers.py` fits them again on the plans of bench/results/fit.json that count (those that
are not held out), and prints what stands here: the numbers, the plans that tell each, and their errors.
"""

from typing import NamedTuple


class Numbers(NamedTuple):
    """Numbers counted in compiled programs.

    Attributes:
        token_arrays: arrays of a token's hidden state, queries, keys and values that a layer's backward holds at once:
            before and after norm, rotary and the all-to-all, with their cotangents. With the kernel for TPUs they are
            counted one by one (`tpu_work`).
        late_share: of a layer's arrays, the share that waits for each layer outside a loop, where chunks wait on the
            host and devices exchange: XLA puts the gradients of such layers' matrices off.
    """

    token_arrays: float
    late_share: float


class Told(NamedTuple):
    """What tells a number.

    Attributes:
        plans: compiled plans whose predicted bytes change with the number.
        error: their median error, as a share of the compiled bytes.
    """

    plans: int
    error: float


NUMBERS = Numbers(token_arrays=6.25, late_share=0.6)
TOLD = {
    "token_arrays": Told(plans=98, error=0.011),
    "late_share": Told(plans=7, error=0.025),
}
