"""Marks in a chat template's syntax tree, which say in the text who wrote what; nothing else of the text changes.

A template is other people's program. It is parsed as it is. A mark that opens goes before the body of every loop that
writes, a mark that closes goes behind the body and before each `break` and `continue`. When the loop runs, the opening
mark says which message the loop's variable holds, by the message's identity. So it does not matter whether the loop
goes over a slice, a filtered or reversed list, an argument of a macro, a namespace's list, or over numbers that
select from a list. `{% generation %}` regions have marks of their own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer

from sppo_jax.data.chat.roles import Region

# Single characters of the private use planes, so that no filter can change a part of a mark.
BEGIN, END, CLOSE, UNKNOWN = "\U000f1000", "\U000f1001", "\U000f1002", "\U000f1003"
_FIRST_MESSAGE = 0x100000
MOST_MESSAGES = 0xFFFD
_MARK = re.compile(f"[{BEGIN}-{UNKNOWN}{chr(_FIRST_MESSAGE)}-{chr(0x10FFFF)}]")
FIND = "__message_mark__"  # the function in the tree that returns an opening mark


class Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: writes its body between two marks."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Returns the body between marks; what is set in the body stays there, as transformers has it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope([_text(BEGIN), *body, _text(END)], lineno=line)


@dataclass(frozen=True, kw_only=True)
class Marked:
    """A text without its marks, and what the marks said.

    Args:
        text: the text.
        turns: what each message wrote in its own loop, in order.
        generated: the `{% generation %}` regions, in order.
        tail: the first character behind all turns.
    """

    text: str
    turns: tuple[Region, ...]
    generated: tuple[Region, ...]
    tail: int


class MarksError(ValueError):
    """Marks lack their other half."""


def without_marks(tree: nodes.Template) -> nodes.Template:
    """Empties the marks of generation regions, for the plain rendering."""
    for data in tree.find_all(nodes.TemplateData):
        data.data = "" if data.data in (BEGIN, END) else data.data
    return tree


def has_generation(tree: nodes.Template) -> bool:
    """Returns whether a template has `{% generation %}` regions."""
    return any(data.data == BEGIN for data in tree.find_all(nodes.TemplateData))


def put_marks(tree: nodes.Template) -> nodes.Template:
    """Puts marks around the bodies of all loops that write."""
    marked = _Marker().visit(tree)
    assert isinstance(marked, nodes.Template)
    return marked


def finder(messages: Sequence[dict[str, Any]]) -> Any:
    """Returns the function FIND of a rendering: the mark of the first candidate that is one of the messages."""
    marks = {id(message): chr(_FIRST_MESSAGE + number) for number, message in enumerate(messages)}

    def find(*candidates: Any) -> str:
        return next((marks[id(one)] for one in candidates if id(one) in marks), UNKNOWN)

    return find


def read_marks(text: str) -> Marked:
    """Takes the marks out of a text.

    Raises:
        MarksError: a mark lacks its other half; the message says what is wrong with the template.
    """
    parts, turns, generated, owners = list[str](), list[Region](), list[Region](), list[int]()
    at = last = begun = tail = 0
    inside, searching = False, list[bool]()
    for mark in _MARK.finditer(text):
        place, char = mark.start(), mark[0]
        parts.append(text[last:place])
        if owners and last < place:
            turns.append(Region(message=owners[-1], first=at, last=at + place - last))
        at, last = at + place - last, place + 1
        if char in (BEGIN, END):
            if inside == (char == BEGIN):
                raise MarksError("{% generation %} regions must not be left by break, or lie in each other")
            inside = char == BEGIN
            if char == END:
                generated.append(Region(message=owners[-1] if owners else -1, first=begun, last=at))
            begun = at
        elif char == CLOSE:
            if not owners:
                raise MarksError("a loop over messages must not be left inside a set block, a filter or a macro")
            owners.pop()
            searching.pop()
            tail = at
        else:
            inherited = owners[-1] if owners else -1
            named = inherited if char == UNKNOWN else ord(char) - _FIRST_MESSAGE
            # A loop inside a turn belongs to the turn: one over calls, or one that looks through earlier messages. A
            # loop that goes on with later messages does not.
            if owners and named < inherited:
                searching[-1] = True
            owners.append(inherited if owners and searching[-1] else named)
            searching.append(False)
    if owners or inside:
        raise MarksError("a loop over messages must not be left inside a set block, a filter or a macro")
    parts.append(text[last:])
    return Marked(text="".join(parts), turns=_joined(turns), generated=tuple(generated), tail=tail)


def _joined(turns: list[Region]) -> tuple[Region, ...]:
    """Joins the neighbouring regions of one message, and leaves out those of none."""
    found: list[Region] = []
    for turn in turns:
        if found and found[-1].message == turn.message and found[-1].last == turn.first:
            found[-1] = Region(message=turn.message, first=found[-1].first, last=turn.last)
        else:
            found.append(turn)
    return tuple(turn for turn in found if turn.message >= 0)


def _text(text: str) -> nodes.Output:
    return nodes.Output([nodes.TemplateData(text)])


class _Marker(NodeTransformer):
    """Puts the marks; remembers whether the loop that `break` would leave is marked."""

    def __init__(self) -> None:
        self._loops: list[bool] = []

    def visit_For(self, loop: nodes.For) -> nodes.Node:
        writes = any(True for _ in _body(loop, nodes.Output)) or any(True for _ in _body(loop, nodes.CallBlock))
        candidates = _candidates(loop)
        self._loops.append(writes)
        self.generic_visit(loop)
        self._loops.pop()
        if writes:
            call = nodes.Call(nodes.Name(FIND, "load"), candidates, [], None, None)
            loop.body = [nodes.Output([call]), *loop.body, _text(CLOSE)]
        return loop

    def _leave(self, node: nodes.Node) -> nodes.Node | list[nodes.Node]:
        return [_text(CLOSE), node] if self._loops and self._loops[-1] else node

    visit_Break = visit_Continue = _leave


def _body(loop: nodes.For, node_type: type[Any]) -> Any:
    for statement in loop.body:
        if isinstance(statement, node_type):
            yield statement
        yield from statement.find_all(node_type)


def _candidates(loop: nodes.For) -> list[nodes.Expr]:
    """Returns expressions that may be the loop's message: its variables, and what they select from a list."""
    targets = [loop.target] if isinstance(loop.target, nodes.Name) else list(loop.target.find_all(nodes.Name))
    names = {target.name for target in targets}
    found: dict[str, nodes.Expr] = {name: nodes.Name(name, "load") for name in sorted(names)}
    for item in _body(loop, nodes.Getitem):
        if isinstance(item.node, nodes.Name) and _is_number(item.arg, names):
            # A name that is not there gives no message rather than an error of the template.
            list_of = nodes.Name(item.node.name, "load")
            chosen = nodes.Getitem(list_of, item.arg, "load")
            found[repr(chosen)] = nodes.CondExpr(nodes.Test(list_of, "defined", [], [], None, None), chosen, None)
    return list(found.values())


def _is_number(arg: nodes.Expr, names: set[str]) -> bool:
    if isinstance(arg, nodes.Getattr):
        return arg.attr == "index0" and isinstance(arg.node, nodes.Name) and arg.node.name == "loop"
    return isinstance(arg, nodes.Name) and arg.name in names
