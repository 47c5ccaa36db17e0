"""The list of defects (defects/*.txt, one file per room), and how one of them gets into a copy of the tree.

    @ comm/window.py Ring.publish             file below pario/, qualified name of a function
    - futex.fence()                           text that stands exactly once in that function
    + pass                                    what takes its place
    = what goes wrong then
    ~ why no test can notice it               only where that is so

Text of several lines has a `-` or `+` before each line. A line that begins with `#` is a comment.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

__all__ = ["LISTS", "Defect", "Function", "functions", "planted", "read_all"]

LISTS = Path(__file__).parent / "defects"

_HEAD = re.compile(r"@ (\S+\.py) (\S+)$")


@dataclass(frozen=True)
class Function:
    """A function of a source file, with its decorators.

    first, last : lines, from 1; start : index of its text in the source
    """

    name: str
    first: int
    last: int
    start: int
    text: str
    node: ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Defect:
    """One defect.

    file : below the repository's root, "pario/comm/window.py"
    function : qualified name, "Ring.publish"
    old, new : text of the function, and what replaces it
    reason : what goes wrong
    excuse : why no test can notice it, or ""
    """

    file: str
    function: str
    old: str
    new: str
    reason: str
    excuse: str = ""

    @property
    def room(self) -> str:
        return self.file.split("/")[1]

    @property
    def name(self) -> str:
        """Stable as long as the defect is the same one."""
        digest = hashlib.sha256("\0".join((self.file, self.function, self.old, self.new)).encode()).hexdigest()
        return f"{self.file.removeprefix('pario/')}:{self.function}:{digest[:6]}"

    def located(self, root: Path) -> tuple[str, Function, int]:
        """(source of the file, the function, index of the text). Raises ValueError if it is not there exactly once."""
        path = root / self.file
        if not path.is_file():
            raise ValueError(f"{self.name}: there is no file {self.file}")
        source = path.read_text()
        found = [each for each in functions(source) if each.name == self.function]
        if len(found) != 1:
            raise ValueError(f"{self.name}: {len(found)} functions {self.function} in {self.file}")
        text = found[0].text
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.old!r} stands {text.count(self.old)} times in the function, not once")
        return source, found[0], found[0].start + text.index(self.old)

    def spoilt(self, root: Path) -> str:
        """The file's source with the defect. Raises ValueError if it cannot be planted, or would change nothing."""
        source, function, at = self.located(root)
        try:
            same = _meaning(function.text.replace(self.old, self.new)) == _meaning(function.text)
        except SyntaxError as error:
            raise ValueError(f"{self.name}: no Python any more: {error}") from error
        if same:
            raise ValueError(f"{self.name}: only text that nobody runs is changed")
        return source[:at] + self.new + source[at + len(self.old) :]

    def lines(self, root: Path) -> tuple[int, range]:
        """(first line of the function, lines of the statement in which the defect lies)."""
        source, function, at = self.located(root)
        line = source.count("\n", 0, at) + 1
        best = range(line, line + 1)
        for node in ast.walk(function.node):
            if isinstance(node, ast.stmt) and node is not function.node:
                body = getattr(node, "body", None)
                last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
                if node.lineno <= line <= max(last, node.lineno):
                    best = range(node.lineno, max(last, node.lineno) + 1)
        return function.first, best


@lru_cache(maxsize=512)
def functions(source: str) -> tuple[Function, ...]:
    """All functions of a source, also inner ones and methods, by qualified name without `<locals>`."""

    lines = source.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]

    def below(node: ast.AST, prefix: str) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                last = child.end_lineno or child.lineno
                text = source[starts[first - 1] : starts[last]]
                yield Function(prefix + child.name, first, last, starts[first - 1], text, child)
                yield from below(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.ClassDef):
                yield from below(child, f"{prefix}{child.name}.")
            else:
                yield from below(child, prefix)

    return tuple(below(ast.parse(source), ""))


def read_all(folder: Path = LISTS) -> list[Defect]:
    """All defects of all lists. Raises ValueError for what is no defect, and for one that is listed twice."""
    found = [defect for path in sorted(folder.glob("*.txt")) for defect in _read(path)]
    names = [defect.name for defect in found]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} is listed twice")
    return found


def _read(path: Path) -> Iterator[Defect]:
    text = "\n".join(line for line in path.read_text().splitlines() if not line.startswith("#"))
    for block in re.split(r"^(?=@ )", text, flags=re.M):
        if not block.strip():
            continue
        head, *lines = block.strip("\n").split("\n")
        named = _HEAD.match(head)
        parts: dict[str, list[str]] = {mark: [] for mark in "-+=~"}
        for line in lines:
            if line.strip():
                if line[0] not in parts or line[1:2] not in ("", " "):
                    raise ValueError(f"{path.name}: {line!r} is no line of a defect")
                parts[line[0]].append(line[2:])
        if named is None or not (parts["-"] and parts["+"] and parts["="]):
            raise ValueError(f"{path.name}: {head!r} needs a file, a function and the lines -, + and =")
        old, new = ("\n".join(parts[mark]) for mark in "-+")
        words = (" ".join(parts[mark]) for mark in "=~")
        yield Defect(f"pario/{named[1]}", named[2], old, new, *words)


def _meaning(source: str) -> str:
    """The syntax tree of a function's text without docstrings."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            node.body[0] = ast.Pass()
    return ast.dump(tree)


@contextmanager
def planted(defect: Defect, root: Path, tick: int) -> Iterator[None]:
    """The defect is in the copy below `root` for as long as the context lasts.

    tick : another number each time. Python and Numba tell a changed file by its time, in seconds the one of them.
    """
    path = root / defect.file
    sound, times = path.read_bytes(), path.stat()
    path.write_text(defect.spoilt(root))
    os.utime(path, (times.st_atime, int(times.st_mtime) + 10 * tick))
    try:
        yield
    finally:
        path.write_bytes(sound)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
