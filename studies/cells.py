"""A published figure, with its source and with how far to trust it.

Marks: [V] in the text or raw tables of the source; [C] in the authors' released code or logs; [F] read off a figure (a
few percent off); [D] derived from such figures; [R] recalled; [?] the sources contradict themselves.
"""

from dataclasses import dataclass

from studies.systems import Setup

K, M = 1024, 1024**2


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One published figure.

    Args:
        name: the name in tables.
        system: the system that ran; errors are reported by system.
        source: paper or repository, and table or figure.
        mark: how far to trust the figure.
        unit: "tokens/s", "tokens/GPU/s", "TFLOP/s", "ratio", "GB" or "tokens".
        value: the figure.
        setup: the configuration that was measured.
        role: "calibrate"; "judge": held out, counts for the claim; "list": held out, printed with its doubt.
        base: the setup that a ratio divides by.
        doubt: why the cell is not judged, or what had to be assumed.
        groups: names of groups whose cells are compared with each other: which one is fastest.
        constants: the key of the constants to predict with; empty: those calibrated for the setup's device.
    """

    name: str
    system: str
    source: str
    mark: str
    unit: str
    value: float
    setup: Setup
    role: str = "list"
    base: Setup | None = None
    doubt: str = ""
    groups: tuple[str, ...] = ()
    constants: str = ""

    @property
    def key(self) -> str:
        """The key of the constants to predict with."""
        return self.constants or self.setup.gpu

    @property
    def is_assumed(self) -> bool:
        """Whether the constants are the planner's assumptions."""
        return self.constants.endswith("assumed")

    @property
    def verified(self) -> bool:
        """Whether the source has the figure in so many words and does not contradict it."""
        return ("[V]" in self.mark or "[C]" in self.mark) and "[?]" not in self.mark
