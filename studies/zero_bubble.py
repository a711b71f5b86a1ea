"""Simulates zero-bubble and V schedules beside cut sequences, in lock-step and free-running, for docs/validation.md.

    python -m studies.zero_bubble            print
    python -m studies.zero_bubble --write    print, and write the block `zero_bubble`

A bubble is the time of a step beyond the work of its whole sequences on one stage, as a share of that work. So cut
sequences also pay for their shorter matmuls and for more additions to the gradients. Heads, hops between stages and the
time that any tick takes are left out. No jax needed; takes about 15 seconds.
"""

from pathlib import Path

from bench.blocks import print_block
from sppo_jax.units import format_bytes
from studies.zero_bubble_costs import Setting, token_bytes
from studies.zero_bubble_rows import CHUNKS, CUT, MEGATRON, SEQUENCES, WAVE, Gain, Row, gains, rows

DOCS = Path(__file__).parents[1] / "docs"
STAGES, SHOWN = (4, 8, 16), 8  # SHOWN: the stages of the pipeline that the text is about
PEAKS = (2**14, 2**20)
Found = dict[tuple[int, int], dict[str, Row]]  # by stages and tokens of a sequence; then by name


def find() -> Found:
    """Simulates all schedules for all numbers of stages and lengths."""
    return {
        (stages, length): {
            row.name: row for row in rows(Setting(length=length, stages=stages, chunks=chunks, sequences=SEQUENCES))
        }
        for stages in STAGES
        for length, chunks in CHUNKS.items()
    }


_SETTING = """\
Simulated with the planner's cost model; nothing was run. The model is llama2-7b. Each stage of a pipeline is eight
A100-80G of a host, and a step has {sequences} sequences. A layer keeps {all_:,} bytes of a token between F and B if it
keeps everything, and {stash:,} if it keeps its input and attention's output. A B without its W leaves {weights:,} bytes
until W runs: the inputs of the layer's seven matrices and the gradients of their outputs. That is {of_all:.1f} and
{of_stash:.1f} times what the layer keeps. The generators of the papers' orders are our own
(`studies/zero_bubble_orders.py`). Each figure is that of the best of a few orders; other generators may find better
ones.
"""
_COLUMNS = """\
Each cell has the bubble in percent, three times. The first is for lock-step ticks of one kind of unit, which our
executor runs. The second is for lock-step ticks in which each stage runs any kind of unit (the papers' orders alone).
The third is for free-running stages. Peaks are activations of the fullest stage, in those of a sequence: if everything
is kept, and in brackets if layer inputs and attention outputs are kept. The times are those of keeping everything.
"""
_PAPERS = """\
**Zero Bubble** (arXiv 2401.10241). The paper promises for ZB1P the memory of 1F1B, and a wait of F + B - W for each
other stage instead of F + B + W. The longer the sequence, the smaller W, and the less the wait shrinks. With {stages}
stages that run freely ZB1P waits {zb_4k} against {f_4k} of 1F1B at 4K, and {zb_1m} against {f_1m} at 1M. Lock-step
ticks of one kind keep none of this. ZB1P waits {zb_one_4k} at 4K, because it has room for {stages} sequences, and a
stage that never pauses needs the {own_peak:.0f} that our 1F1B table holds. With ticks of W the wait of our table would
fall from {own_4k} to {own_w_4k} at 4K, and from {own_1m} to {own_w_1m} at 1M. What we do instead is to cut sequences:
at 1M Seq1F1B waits {cut_1m}, and waves of {wave} sequences wait {wave_1m}. At 16K cutting saves memory, not time:
Seq1F1B waits {cut_16k}.

**Controllable Memory** (arXiv 2405.15362). The paper promises a half (V-Half) and a third (V-Min) of 1F1B's activations
for many stages. With {stages} stages, and with what waits for W, V-Half holds {half_peak:.1f} sequences and V-Min
{min_peak:.1f} at 16K; 1F1B holds {f_peak:.0f}. The paper's times are for F = B = W. At 16K free-running V-Half waits
{half_16k} and V-Min {min_16k}, against {f_16k} of 1F1B; at 1M they wait {half_1m} and {min_1m}. In lock-step ticks of
one kind they wait {half_one_16k} and {min_one_16k} at 16K. What we do instead is to cut sequences, too. Seq1F1B holds
{cut_peak_16k:.1f} sequences at 16K, where the cut costs time, and {cut_peak_1m:.1f} at 1M. Waves of {wave} trade some
of this memory for time: they hold {wave_peak_1m:.1f} sequences at 1M. Activations can also wait on the host, which no
figure here counts.
"""
_GAINS = """\
**Ticks of W for our own tables**, {stages} stages: the share of a step's time that they save. Here each tick takes
{overhead_ms:.1f} ms more than its units. A tick of W runs as soon as every stage has a W, so up to P chunks wait. The
bytes are what waits on a device.
"""


def block() -> str:
    """Simulates everything and returns the block."""
    return report(find(), list(gains()))


def report(found: Found, gained: list[Gain]) -> str:
    """Writes the block."""
    kept = token_bytes()
    setting = _SETTING.format(
        sequences=SEQUENCES,
        all_=kept.all,
        stash=kept.stash,
        weights=kept.weights,
        of_all=kept.weights / kept.all,
        of_stash=kept.weights / kept.stash,
    )
    parts = [setting, _costs(), _COLUMNS]
    parts += [_table(stages, found) for stages in STAGES]
    parts += [_papers(found), _gains(gained)]
    return "\n".join(parts)


def _costs() -> str:
    lines = ["| tokens of a sequence | F : B : W | N | work in N chunks over whole |", "|---|---|---|---|"]
    for length, chunks in CHUNKS.items():
        seconds = Setting(length=length, stages=SHOWN, chunks=chunks, sequences=1).seconds
        whole = seconds[1]
        ratio = " : ".join(f"{whole[kind, 0] / whole['F', 0]:.2f}" for kind in "FBW")
        over = sum(seconds[chunks].values()) / sum(whole.values())
        lines.append(f"| {_kilo(length)} | {ratio} | {chunks} | {over:.2f} |")
    return "\n".join([*lines, ""])


def _table(stages: int, found: Found) -> str:
    lines = [
        f"| P = {stages} | {' | '.join(map(_kilo, CHUNKS))} | {' | '.join(f'peak, {_kilo(at)}' for at in PEAKS)} |",
        "|---|" + "---|" * (len(CHUNKS) + len(PEAKS)),
    ]
    for name in found[stages, PEAKS[0]]:
        of_length = {length: found[stages, length][name] for length in CHUNKS}
        cells = [_bubbles(row) for row in of_length.values()]
        cells += [f"{of_length[at].peak_all:.2f} ({of_length[at].peak_stash:.2f})" for at in PEAKS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def _bubbles(row: Row) -> str:
    any_kind = "-" if row.any_kind is None else _percent(row.any_kind)
    return f"{_percent(row.one_kind)} / {any_kind} / {_percent(row.free)}"


def _percent(share: float) -> str:
    # The last bits of a sum depend on the version of Python, and (P - 1) / m may lie between two figures.
    return f"{round(100 * share, 6):.1f}"


def _papers(found: Found) -> str:
    short, middle, long = (found[SHOWN, length] for length in (2**12, 2**14, 2**20))
    wave = f"waves of {WAVE}, N chunks"
    shares = {
        "zb_4k": short["ZB1P"].free,
        "f_4k": short[MEGATRON].free,
        "zb_1m": long["ZB1P"].free,
        "f_1m": long[MEGATRON].free,
        "zb_one_4k": short["ZB1P"].one_kind,
        "own_4k": short["1F1B"].one_kind,
        "own_1m": long["1F1B"].one_kind,
        "cut_16k": middle[CUT].one_kind,
        "own_w_4k": short["1F1B, ticks of W"].one_kind,
        "own_w_1m": long["1F1B, ticks of W"].one_kind,
        "cut_1m": long[CUT].one_kind,
        "wave_1m": long[wave].one_kind,
        "half_16k": middle["V-Half"].free,
        "min_16k": middle["V-Min"].free,
        "f_16k": middle[MEGATRON].free,
        "half_1m": long["V-Half"].free,
        "min_1m": long["V-Min"].free,
        "half_one_16k": middle["V-Half"].one_kind,
        "min_one_16k": middle["V-Min"].one_kind,
    }
    return _PAPERS.format(
        **{name: f"{_percent(share)}%" for name, share in shares.items()},
        stages=SHOWN,
        wave=WAVE,
        f_peak=middle[MEGATRON].peak_all,
        own_peak=short["1F1B"].peak_all,
        half_peak=middle["V-Half"].peak_all,
        min_peak=middle["V-Min"].peak_all,
        cut_peak_16k=middle[CUT].peak_all,
        cut_peak_1m=long[CUT].peak_all,
        wave_peak_1m=long[wave].peak_all,
    )


def _gains(gained: list[Gain]) -> str:
    text = _GAINS.format(stages=SHOWN, overhead_ms=1000 * gained[0].overhead_s)
    # Zero is added to lose the sign of -0.
    lines = [text, "| sequences, chunks of each | v = 1 | v = 2 | v = 4 |", "|---|---|---|---|"]
    for at in range(0, len(gained), 3):
        setting = gained[at].setting
        cells = [
            f"{round(gain.saved, 3) + 0.0:+.1%}, {format_bytes(gain.waiting_bytes)}" for gain in gained[at : at + 3]
        ]
        lines.append(f"| {setting.sequences} x {_kilo(setting.length)}, {setting.chunks} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _kilo(tokens: int) -> str:
    return f"{tokens // 2**20}M" if tokens >= 2**20 else f"{tokens // 2**10}K"


def main(arguments: list[str] | None = None) -> int:
    """Prints the block, and writes it if asked to."""
    return print_block(DOCS / "validation.md", "zero_bubble", block, __doc__, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
