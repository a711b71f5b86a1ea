"""What is learned of conversations, as text."""

from __future__ import annotations

from sppo_jax.data.chat.controls import control_line
from sppo_jax.data.chat.thoughts import thoughts_line
from sppo_jax.data.summary.chats import Conversation, Segment
from sppo_jax.data.summary.summary import Summary
from sppo_jax.data.tokens.learned import Learned

_GREEN, _PLAIN = "\x1b[32m", "\x1b[0m"
_MOST_PARTS, _HEAD, _TAIL = 12, 240, 120


def learned_text(summary: Summary, *, colour: bool) -> list[str]:
    """Returns paragraphs about conversations, none if everything is learned.

    Args:
        summary: the result of `summarize`.
        colour: whether what is learned is green; otherwise it stands in double brackets.
    """
    counted = [source.learned for source in summary.sources if source.learned]
    if not counted:
        return []
    total = sum(counted, Learned())
    found = [f"What is learned\n{_counts(total)}"]
    if summary.conversation:
        found.append(_shown(summary.conversation, colour=colour))
    return found


def _counts(found: Learned) -> str:
    kept = max(1, found.kept_tokens)
    lines = [
        f"{found.trained_tokens / kept:.1%} of the tokens are trained, as these say: {', '.join(found.marks)}",
        f"{found.read:,} {found.noun} read; {found.too_long:,} longer than a sequence, {found.cut:,} cut, "
        f"{found.dropped:,} left out without trained tokens",
        f"{found.cut_tokens / max(1, found.tokens):.1%} of all tokens lie after cuts, "
        f"{found.dropped_tokens / max(1, found.tokens):.1%} in {found.noun} that are left out",
        control_line(found),
        thoughts_line(found),
    ]
    return "\n".join(f"  {line}" for line in lines if line)


def _shown(conversation: Conversation, *, colour: bool) -> str:
    how = "green" if colour else "in [[ ]]"
    title = f"A {conversation.noun} of {conversation.where}, {conversation.tokens:,} tokens; what is trained is {how}"
    parts = conversation.parts[:_MOST_PARTS]
    text = "".join(_marked(part, colour=colour) for part in parts)
    left = len(conversation.parts) - len(parts)
    text += f"\n... and {left:,} more parts" if left else ""
    return f"{title}\n" + "\n".join(f"  {line}".rstrip() for line in text.split("\n"))


def _marked(part: Segment, *, colour: bool) -> str:
    text = _printable(_shortened(part.text))
    if not part.learned:
        return text
    # A line that ends with a part has no colour behind it.
    return text.join((_GREEN, _PLAIN)) if colour else f"[[{text}]]"


def _shortened(text: str) -> str:
    left = len(text) - _HEAD - _TAIL
    return text if left < 40 else f"{text[:_HEAD]} ... {left:,} characters ... {text[-_TAIL:]}"


def _printable(text: str) -> str:
    return "".join(
        char if char == "\n" or char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
