"""Highlighting: source and machine code as lines of HTML, with a handful of classes for the style sheet."""

import functools
import re
from collections.abc import Iterator
from typing import Final

from markupsafe import Markup, escape

_SASS: Final = re.compile(
    r"(?P<address> {2}[0-9a-f]{4,}) +(?P<predicate>@\S+ )?(?P<opcode>\S+)(?P<operands>.*?)(?P<comment> *//.*)?",
    re.ASCII,
)


@functools.lru_cache(maxsize=32)
def source_lines(text: str) -> tuple[Markup, ...]:
    """CUDA C++, a line each. Takes tens of milliseconds, hence the memory of it."""
    from pygments.lexers import CudaLexer

    lines = [Markup()]
    for token, value in CudaLexer(stripnl=False, ensurenl=False).get_tokens(text):
        kind = _class_of(str(token))
        for number, piece in enumerate(value.split("\n")):
            if number:
                lines.append(Markup())
            lines[-1] += _span(kind, piece)
    return tuple(lines if lines[-1] else lines[:-1])


def sass_lines(text: str) -> tuple[Markup, ...]:
    """A listing of machine code, a line each."""
    return tuple(Markup().join(_sass_line(line)) for line in text.splitlines())


def _class_of(token: str) -> str:
    """The style sheet's class for one of Pygments' token types, "" for plain text."""
    for prefix, kind in _CLASSES:
        if token.startswith(prefix):
            return kind
    return ""


_CLASSES: Final = (
    ("Token.Comment.Preproc", "cp"),
    ("Token.Comment", "c"),
    ("Token.Keyword.Type", "t"),
    ("Token.Keyword", "k"),
    ("Token.Literal.String", "s"),
    ("Token.Literal.Number", "n"),
    ("Token.Name.Function", "f"),
    ("Token.Name.Builtin", "t"),
)


def _sass_line(line: str) -> Iterator[Markup]:
    match = _SASS.fullmatch(line)
    if match is None:
        yield _span("f", line)
        return
    kinds = {"address": "c", "predicate": "t", "opcode": "k", "operands": "", "comment": "c"}
    at = 0
    for name, kind in kinds.items():
        if match[name]:
            yield escape(line[at : match.start(name)])
            yield _span(kind, match[name])
            at = match.end(name)
    yield escape(line[at:])


def _span(kind: str, text: str) -> Markup:
    return Markup('<span class="{}">{}</span>').format(kind, text) if kind and text.strip() else escape(text)
