"""Which tests reach which lines: recorded once per test file and setting, kept as JSON, asked for each defect.

Compiled kernels are invisible to coverage. A test reaches a kernel if it reaches a line that names it, in the package
or in a test, directly or through other kernels.
"""

from __future__ import annotations

import ast
import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.mutation.defects import Defect, Function, functions
from benchmarks.mutation.jobs import QUICK, SERIAL, Copy, Setting, digest, run

__all__ = ["Kernels", "Reach", "Witness", "in_order", "is_recorded", "record"]

#: Seconds that one test may take when it is recorded.
_RECORD_LIMIT_S = 240.0

_RC = """[run]
source =
    {root}/pario
    {root}/tests
parallel = true
data_file = {folder}/lines
context = ${{PARIO_MUTANTS_TEST-}}
disable_warnings = no-data-collected, module-not-imported, couldnt-parse, module-not-measured, no-sysmon
"""


@dataclass(frozen=True)
class Witness:
    """A test in a setting, as it was recorded. reaches : functions, a measure of how little it is about one thing"""

    id: str
    setting: Setting
    seconds: float
    marked: bool
    reaches: int

    @property
    def file(self) -> str:
        return self.id.split("::")[0]

    @property
    def function(self) -> str:
        return self.id.split("[")[0]

    @property
    def quick(self) -> bool:
        """The default suite has it."""
        return not self.marked and self.setting in (SERIAL, *QUICK) and not self.file.startswith("tests/system/")


def record(copy: Copy, setting: Setting, file: str, folder: Path) -> str:
    """Run a test file, write which lines each of its tests reaches, and return a line about it."""
    with tempfile.TemporaryDirectory(prefix="pario-reach-") as name:
        rc = Path(name) / "coveragerc"
        rc.write_text(_RC.format(root=copy.root, folder=name))
        start = str(copy.root / "benchmarks" / "mutation" / "start")
        more = {
            "COVERAGE_PROCESS_START": str(rc),
            "PYTHONPATH": f"{start}:{copy.environment()['PYTHONPATH']}",
            "PARIO_MUTANTS_TEST": "",
        }
        ran = run(copy, setting, [file], more=more, stop=False, limit_s=_RECORD_LIMIT_S, budget_s=1200)
        reached = dict(_lines(Path(name), copy.root))
    table: dict[tuple[str, str], int] = {}
    digests: list[tuple[str, str, str]] = []
    tests: dict[str, Any] = {}
    for test, (outcome, seconds, marks) in ran.tests.items():
        if outcome == "passed":
            row: dict[int, int] = defaultdict(int)
            for path, function, text, line in reached.get(f"{setting}|{test}", ()):
                if (path, function) not in table:
                    table[path, function] = len(table)
                    digests.append((path, function, text))
                row[table[path, function]] |= 1 << line
            reach = {str(number): f"{bits:x}" for number, bits in row.items()}
            tests[test] = {"seconds": round(seconds, 3), "marks": marks, "reach": reach}
    others = sorted({outcome for outcome, *_ in ran.tests.values()} - {"passed", "skipped"})
    bad = [f"{test} {outcome}" for test, (outcome, *_) in ran.tests.items() if outcome in others]
    text = (copy.root / file).read_text()
    folder.mkdir(parents=True, exist_ok=True)
    made = {"file": file, "setting": list(setting), "digest": digest(text), "functions": digests, "tests": tests}
    (folder / f"{Path(file).stem}.{setting}.json").write_text(json.dumps(made))
    said = f"{file} ({setting.words}): {len(tests)} tests in {ran.seconds:.0f} s"
    if tests and not digests:
        raise RuntimeError(f"{said}, and coverage saw none of them reach any line")
    if ran.notice is not None or bad:
        said += f"; {ran.notice}; not passed: {', '.join(bad) or 'none'}"
    return said


def is_recorded(path: Path, setting: Setting, folder: Path) -> bool:
    """Was this test file recorded as it is now?"""
    made = folder / f"{path.stem}.{setting}.json"
    return made.exists() and json.loads(made.read_text())["digest"] == digest(path.read_text())


def _lines(folder: Path, root: Path) -> Iterator[tuple[str, set[tuple[str, str, str, int]]]]:
    """(context, {(file, function, digest of its text, line counted from its first one)})"""
    from coverage import CoverageData
    from coverage.exceptions import DataError

    found: dict[str, set[tuple[str, str, str, int]]] = defaultdict(set)
    spans: dict[str, dict[int, tuple[str, str, int]]] = {}
    for path in folder.glob("lines.*"):
        data = CoverageData(str(path), no_disk=False)
        try:
            data.read()
        except DataError:  # of a process that was killed, as some tests do
            continue
        for name in data.measured_files():
            if name not in spans:
                spans[name] = _owners(Path(name))
            file = str(Path(name).relative_to(root))
            for line, contexts in data.contexts_by_lineno(name).items():
                if line in spans[name]:
                    function, text, first = spans[name][line]
                    for context in filter(None, contexts):
                        found[context].add((file, function, text, line - first))
    yield from found.items()


def _owners(path: Path) -> dict[int, tuple[str, str, int]]:
    """line -> (innermost function, digest of its text, its first line)"""
    source = path.read_text()
    owner: dict[int, tuple[str, str, int]] = {}
    for each in functions(source):  # inner ones come after those around them
        # The line of `def` is run by whoever defines it.
        for line in range(each.node.body[0].lineno, each.last + 1):
            owner[line] = each.name, digest(each.text), each.first
    return owner


class _Row(NamedTuple):
    test: Witness
    text: str
    bits: int


class Reach:
    """All that was recorded."""

    def __init__(self, folder: Path) -> None:
        self._rows: dict[tuple[str, str], list[_Row]] = defaultdict(list)
        self._moved: dict[str, set[str]] = defaultdict(set)
        self.tests: list[Witness] = []
        for path in sorted(folder.glob("*.json")):
            made = json.loads(path.read_text())
            names = [tuple(each) for each in made["functions"]]
            for name, each in made["tests"].items():
                reach = each["reach"]
                test = Witness(name, Setting(*made["setting"]), each["seconds"], bool(each["marks"]), len(reach))
                self.tests.append(test)
                for number, bits in reach.items():
                    file, function, text = names[int(number)]
                    self._rows[file, function].append(_Row(test, text, int(bits, 16)))
                    self._moved[function].add(file)

    def of(self, defect: Defect, root: Path, kernels: Kernels) -> tuple[list[Witness], set[str]]:
        """The tests that reach the defect, in no order, and the rooms by which they reach it."""
        found: set[Witness] = set()
        rooms = {defect.room}
        for file, function, lines in kernels.lines_of(defect, root):
            found |= self._of_lines(root, file, function, lines)
            if file.startswith("pario/"):
                rooms.add(file.split("/")[1])
        return list(found), rooms

    def _of_lines(self, root: Path, file: str, function: str, lines: range) -> set[Witness]:
        rows = self._rows.get((file, function), [])
        if not rows:  # moved since it was recorded, or another function by now
            homes = self._moved.get(function, set())
            homes = {home for home in homes if Path(home).name == Path(file).name} or homes
            rows = [row for home in homes for row in self._rows[home, function]]
        if not rows and file.startswith("tests/"):
            return set()  # a test that was not recorded
        if not rows:
            rows = [row for (home, _), those in self._rows.items() if home == file for row in those]
            return {row.test for row in rows}
        source = (root / file).read_text()
        each = next(each for each in functions(source) if each.name == function)
        text = digest(each.text)
        wanted = sum(1 << (line - each.first) for line in lines)
        # A function that has changed since: all tests that reach it.
        return {row.test for row in rows if row.text != text or row.bits & wanted}


class Kernels:
    """Who calls which compiled kernel, read from the sources below `root`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @cached_property
    def _users(self) -> list[_User]:
        """The files that know any kernel."""
        paths = [*self._root.glob("pario/**/*.py"), *self._root.glob("tests/**/*.py")]
        sources = {str(path.relative_to(self._root)): path.read_text() for path in paths}
        return [_User(file, source) for file, source in sources.items() if "kernels" in source or "kernels" in file]

    def is_compiled(self, file: str, function: str) -> bool:
        return any(user.file == file and function.split(".")[0] in user.kernels for user in self._users)

    def lines_of(self, defect: Defect, root: Path) -> Iterator[tuple[str, str, range]]:
        """(file, function, lines) that a test must reach: those of the defect or, in a kernel, of who calls it."""
        if self.is_compiled(defect.file, defect.function):
            yield from self._callers(defect.file, defect.function.split(".")[0], set())
        else:
            yield defect.file, defect.function, defect.lines(root)[1]

    def _callers(self, file: str, function: str, seen: set[tuple[str, str]]) -> Iterator[tuple[str, str, range]]:
        if (file, function) in seen:
            return
        seen.add((file, function))
        for user in self._users:
            for name, line in user.names_of(file, function):
                if name in user.kernels:
                    yield from self._callers(user.file, name, seen)
                else:
                    yield user.file, name, range(line, line + 1)

    def stale(self, file: str) -> set[str]:
        """The modules whose compiled code may hold that of `file`."""
        found = {_module(file)}
        todo = list(found)
        while todo:
            module = todo.pop()
            new = {_module(user.file) for user in self._users if user.kernels and module in user.modules} - found
            found |= new
            todo += new
        return found


def _is_kernel(function: Function) -> bool:
    made = [each.func if isinstance(each, ast.Call) else each for each in function.node.decorator_list]
    return any(isinstance(each, ast.Name) and each.id in ("kernel", "inner") for each in made)


def _module(file: str) -> str:
    return file.removesuffix(".py").replace("/", ".")


class _User:
    """A file that knows kernels: what it imports, and which of its functions name what in which line."""

    def __init__(self, file: str, source: str) -> None:
        self.file = file
        tree = ast.parse(source)
        froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
        #: (module, name) -> the name it has here
        self._bound = {(node.module, alias.name): alias.asname or alias.name for node in froms for alias in node.names}
        self.modules = {module for module, _ in self._bound} | {f"{module}.{name}" for module, name in self._bound}
        self.kernels = {each.name for each in functions(source) if _is_kernel(each)}
        #: name or module.name -> (function, line)
        self._named: dict[str, set[tuple[str, int]]] = defaultdict(set)
        for each in functions(source):
            for node in ast.walk(each.node):
                if isinstance(node, ast.Name):
                    self._named[node.id].add((each.name, node.lineno))
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    self._named[f"{node.value.id}.{node.attr}"].add((each.name, node.lineno))

    def names_of(self, file: str, function: str) -> set[tuple[str, int]]:
        """(function, line) of this file that name this kernel."""
        module = _module(file)
        if file == self.file:
            return {(name, line) for name, line in self._named[function] if name != function}
        parent, _, last = module.rpartition(".")
        found = set()
        if (module, function) in self._bound:
            found |= self._named[self._bound[module, function]]
        if (parent, last) in self._bound:
            found |= self._named[f"{self._bound[parent, last]}.{function}"]
        return found


def in_order(tests: Sequence[Witness], rooms: set[str]) -> list[Witness]:
    """Cheap tests of these rooms first. A further case of one test counts as dearer than the one before it: of many
    cases the first ones go early, and cheap ones all the same go before a first case that takes long."""
    weighed = sorted(tests, key=lambda test: (_cost(test, rooms), test.id))
    rounds: dict[tuple[str, Setting], int] = defaultdict(int)
    order = []
    for test in weighed:
        rounds[test.function, test.setting] += 1
        order.append((rounds[test.function, test.setting] * _cost(test, rooms), test.id, test))
    return [test for *_, test in sorted(order, key=lambda row: row[:2])]  # a test may be there in two settings


def _cost(test: Witness, rooms: set[str]) -> float:
    """Seconds, a few times as many for a test of other rooms, and for one that is about many things."""
    about = 1.0 if any(f"_{room}" in test.file for room in rooms) else 3.0
    return (test.seconds + 0.02) * about * (1 + test.reaches / 200)
