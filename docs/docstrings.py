"""pario's docstrings as reStructuredText. They are plain text with a few habits, which this file translates:

* "name : what it is" describes a parameter, in lines of its own, with or without the heading "Parameters". The words
  go on in indented lines. Where the first line breaks off early it is a type, as numpydoc has it, and the indented
  lines are the description. Below a heading, "    name: what it is" does the same.
* `x` is code; every other character stands for itself, and docs/x.md is a page.
* A paragraph that is indented as a whole, or has columns, is shown as it stands.
"""

from __future__ import annotations

import re
from typing import Any

import pario

__all__ = ["convert", "process"]

_NAME = r"\*{0,2}[A-Za-z_][\w.]*(?: \(\w+\))?"
_ITEM = re.compile(rf"({_NAME}(?:, {_NAME})*) : (\S.*)")
_BELOW = re.compile(r"    (\w+): (\S.*)")
#: The source's lines have at most 120 columns, 8 of which are indentation.
_COLUMNS = 108


def process(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """For Sphinx's event autodoc-process-docstring."""
    lines[:] = convert(lines)


def convert(lines: list[str]) -> list[str]:
    """The lines of a docstring in reStructuredText."""
    made: list[str] = []
    at = 0
    while at < len(lines):
        if not lines[at].strip():
            made.append("")
            at += 1
            continue
        end = at
        while end < len(lines) and lines[end].strip():
            end += 1
        made += [*_paragraph(lines[at:end]), ""]
        at = end
    return [*made, ""]


def _paragraph(lines: list[str]) -> list[str]:
    """One paragraph: lines without an empty one."""
    if lines[0].startswith("* "):
        return [escape(line) for line in lines]
    if len(lines) > 1 and re.fullmatch(r"-{3,}", lines[1]):
        head = [] if lines[0] in ("Parameters", "Attributes") else [f"**{lines[0]}**", ""]
        return head + (_paragraph(lines[2:]) if lines[2:] else [])
    if len(lines) > 1 and not lines[0].startswith(" ") and _BELOW.fullmatch(lines[1]):
        below = [_BELOW.sub(r"\1 : \2", line) if line[4:5] != " " else line[4:] for line in lines[1:]]
        return [f"**{escape(lines[0])}**", "", *_items(below)]
    flush = [line for line in lines if not line.startswith(" ")]
    if len(flush) > 1 and all(re.match(r"[a-z_]+: \S", line) for line in flush):
        lines = [line if line.startswith(" ") else line.replace(":", " :", 1) for line in lines]
    if _ITEM.fullmatch(lines[0]):
        return _items(lines)
    if lines[0].startswith("    ") or any(re.search(r"\S  +\S", line) for line in lines):
        return ["::", "", *(f"    {line}" for line in lines)]
    return [escape(line) for line in lines]


def _items(lines: list[str]) -> list[str]:
    """Parameters, one after another; the rest of the paragraph is prose again."""
    made: list[str] = []
    at = 0
    while at < len(lines) and (item := _ITEM.fullmatch(lines[at])):
        end = at + 1
        while end < len(lines) and lines[end].startswith("    "):
            end += 1
        made += _field(item[1], item[2], [line.strip() for line in lines[at + 1 : end]])
        at = end
    return made if at == len(lines) else [*made, "", *_paragraph(lines[at:])]


def _field(names: str, first: str, words: list[str]) -> list[str]:
    """Fields of Sphinx for the parameters of one item."""
    is_type = bool(words) and len(f"{names} : {first} {words[0].split()[0]}") < _COLUMNS
    # The annotation says "int" already.
    text = words if is_type and re.fullmatch(r"int|bool|float|str", first) else [first, *words]
    if is_type and text is not words:
        text[0] = f"{first.rstrip('.')}."
    made = []
    for name in names.split(", "):
        shown = escape(name)
        body = text if names.endswith(name) else [f"see {names.split(', ')[-1]}"]
        made += [f":param {shown}: {escape(body[0])}", *(f"    {escape(line)}" for line in body[1:])]
    return made


def escape(line: str) -> str:
    """Outside of `code`, what reStructuredText would take for markup; a bullet at the beginning stays."""
    indent, rest = re.fullmatch(r"(\s*(?:\* )?)(.*)", line).groups()  # type: ignore[union-attr]
    parts = re.split(r"(`[^`]*`)", rest)
    for k, part in enumerate(parts):
        if k % 2 == 0:
            part = re.sub(r"([\\*|`]|(?<=\w)_(?!\w))", r"\\\1", part)
            parts[k] = re.sub(r"docs/([\w-]+)\.md", r":doc:`/\1`", part)
        else:
            parts[k] = _code(part[1:-1]) + ("\\ " if parts[k + 1][:1].isalnum() else "")
    return indent + "".join(parts)


def _code(text: str) -> str:
    """A public name leads to its entry; other code is code."""
    name = text.removeprefix("pario.").split(".")[0]
    if name in pario.__all__ and (name[0].isupper() or name == "split"):
        return f":py:obj:`{text} <pario.{name}>`"
    return f"``{text}``"
