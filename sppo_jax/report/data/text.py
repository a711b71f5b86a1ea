"""A run's data as text."""

from sppo_jax.data.summary.summary import Sample, SourceSummary, Summary
from sppo_jax.report.data.chats import learned_text
from sppo_jax.report.draw.columns import WIDTH, aligned, bar

_PACKS = {
    "whole": "documents whole, packed by best fit",
    "stream": "documents end to end, cut at the ends of sequences",
    "none": "every document in sequences of its own",
}


def data_text(summary: Summary, *, colour: bool = False) -> str:
    """Returns everything `sppo data` prints.

    Args:
        summary: the result of `summarize`.
        colour: whether what is learned of a conversation is coloured; otherwise it stands in brackets.
    """
    if not summary.sources:
        return f"{_drawn(summary)}\n\n{_first_sequence(summary)}"
    return "\n\n".join(
        [
            _headline(summary),
            f"Sources\n{_sources(summary)}",
            *_left_out(summary),
            f"Lengths of the documents to train on, in tokens\n{_histogram(summary)}\n{_percentiles(summary)}",
            *learned_text(summary, colour=colour),
            f"How documents begin\n{_samples('source', summary.documents)}",
            f"How documents end\n{_samples('source', summary.ends, ends=True)}",
            _first_sequence(summary),
        ]
    )


def _drawn(summary: Summary) -> str:
    return (
        f"sequences of {summary.length:,} tokens drawn at random, each only once; the {summary.run_steps:,} steps of "
        f"the run read {summary.run_steps * summary.num_sequences:,} of them"
    )


def _headline(summary: Summary) -> str:
    tokens = sum(source.tokens for source in summary.sources)
    documents = sum(source.documents for source in summary.sources)
    split = sum(source.split for source in summary.sources)
    epoch = f"{_epochs(summary.epoch_steps)} {_plural(summary.epoch_steps, 'step')}"
    several = sum(source.sequences > 0 for source in summary.sources) > 1
    until = " (until every source has been read whole)" if several else ""
    return "\n".join(
        [
            f"{_count(tokens)} tokens to train on in {documents:,} {_plural(documents, 'document')}, as sequences of "
            f"{summary.length:,}: {_PACKS[summary.pack]}",
            f"{summary.filled:.1%} of the sequences' places are filled, the rest is padding; {split:,} "
            f"{_plural(split, 'document')} cut into pieces",
            f"an epoch is {summary.epoch_sequences:,} {_plural(summary.epoch_sequences, 'sequence')}{until}, "
            f"{epoch} of {summary.num_sequences:,}; the {summary.run_steps:,} steps of the run read "
            f"{_epochs(summary.run_epochs)} {_plural(summary.run_epochs, 'epoch')}",
        ]
    )


def _sources(summary: Summary) -> str:
    header = ["", "share", "documents", "tokens", "held out", "sequences", "filled", "cut", "epochs per run"]
    names = _shortened([source.name for source in summary.sources], 34)
    rows = [_source_row(name, source) for name, source in zip(names, summary.sources, strict=True)]
    return aligned(header, rows, left=(0,))


def _source_row(name: str, source: SourceSummary) -> list[str]:
    held_out = _count(source.held_out_tokens) if source.held_out_tokens else "-"
    if not source.sequences:
        return [name, *["-"] * 3, held_out, *["-"] * 4]
    return [
        name,
        f"{source.weight:.1%}",
        f"{source.documents:,}",
        _count(source.tokens),
        held_out,
        f"{source.sequences:,}",
        f"{source.filled:.1%}",
        f"{source.split:,}",
        _epochs(source.run_epochs),
    ]


def _left_out(summary: Summary) -> list[str]:
    """Returns a paragraph about what is not read, none if all is."""
    names = _shortened([source.name for source in summary.sources], 34)
    rows = [
        [name, f"{one.count:,}", f"{one.what}: {one.why}"]
        for name, source in zip(names, summary.sources, strict=True)
        for one in source.left_out
    ]
    return [f"Left out\n{aligned(['', 'number', 'what and why'], rows, left=(0, 2))}"] if rows else []


def _shortened(names: list[str], width: int) -> list[str]:
    """Returns names shortened to a width; their ends, in which they differ, are kept."""
    return [name if len(name) <= width else f"...{name[3 - width :]}" for name in names]


def _histogram(summary: Summary) -> str:
    tokens = sum(bucket.tokens for bucket in summary.histogram)
    most = max(bucket.tokens for bucket in summary.histogram)
    longest = next((bucket for bucket in summary.histogram if bucket.last > summary.length), None)
    rows = []
    for bucket in summary.histogram:
        note = f"  <- a sequence has {summary.length:,}" if bucket is longest else ""
        rows.append(
            [
                f"{bucket.first:,}..{bucket.last:,}" if bucket.last > bucket.first else f"{bucket.first:,}",
                f"{bucket.documents:,}",
                _count(bucket.tokens),
                f"{bucket.tokens / tokens:.1%}",
                f"{bar(bucket.tokens / most, 32)}{note}",
            ]
        )
    return aligned(["length", "documents", "tokens", "share", ""], rows, left=(4,))


def _percentiles(summary: Summary) -> str:
    *most, (_, longest) = summary.percentiles
    at = ", ".join(f"{size:,} in {percent}%" for percent, size in most)
    return f"  at most {at} of the documents; the longest has {longest:,}"


def _first_sequence(summary: Summary) -> str:
    count, shown = summary.num_pieces, len(summary.pieces)
    some = f", of which {shown} are shown" if shown < count else ""
    title = f"Sequence {summary.sequence:,}: {count:,} {_plural(count, 'piece')}{some}"
    return f"{title}\n{_samples('at', summary.pieces)}"


def _samples(title: str, samples: tuple[Sample, ...], *, ends: bool = False) -> str:
    places = _shortened([sample.where for sample in samples], 34)
    sizes = [f"{sample.tokens:,}" for sample in samples]
    room = WIDTH - 6 - max(map(len, (*places, title))) - max(map(len, (*sizes, "tokens")))
    show = _last_line if ends else _line
    rows = [[place, size, show(sample.text, room)] for place, size, sample in zip(places, sizes, samples, strict=True)]
    return aligned([title, "tokens", "text"], rows, left=(0, 2))


def _line(text: str, width: int) -> str:
    """Returns the start of a text in one line, with unprintable characters escaped."""
    shown = ""
    for char in map(_shown, text):
        if len(shown) + len(char) > width - 3:
            return f"{shown}..."
        shown += char
    return shown


def _last_line(text: str, width: int) -> str:
    """Returns the end of a text in one line, as `_line` its start."""
    shown = ""
    for char in map(_shown, reversed(text)):
        if len(shown) + len(char) > width - 3:
            return f"...{shown}"
        shown = char + shown
    return shown


def _shown(char: str) -> str:
    return char if char.isprintable() and char != "\\" else char.encode("unicode_escape").decode()


def _count(value: int) -> str:
    """Returns a count in three or four figures."""
    for unit, name in ((10**12, "T"), (10**9, "G"), (10**6, "M")):
        if value >= unit:
            return f"{value / unit:.3g} {name}"
    return f"{value:,}"


def _epochs(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def _plural(count: float, word: str) -> str:
    return word if count == 1 else f"{word}s"
