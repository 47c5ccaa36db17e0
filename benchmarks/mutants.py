"""Do the tests notice? Plants small defects one by one, runs the tests that reach them, writes measurements/mutants.md.

    python -m benchmarks.mutants --record              once, and after tests have changed: which test reaches which line
    python -m benchmarks.mutants                       all defects that have no result yet
    python -m benchmarks.mutants --only comm --again   those of a room (or file, or name), anew
    python -m benchmarks.mutants --table               measurements/mutants.md from the results so far

A defect is noticed when a test fails, crashes or does not end, and passes in the sound tree right afterwards. Tests run
cheapest first and stop at the first failure: those of the default suite, then the others. Defects are planted in a copy
of the working tree, never in the tree itself. Recordings and results stay in build/mutants, so that all of this may be
interrupted and goes on where it was. Needs coverage (pip install coverage).
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.marked import fill_marked
from benchmarks.mutation.defects import Defect, planted, read_all
from benchmarks.mutation.jobs import OTHERS, QUICK, SERIAL, Copy, Notice, Setting, end_all, kernels_of, run
from benchmarks.mutation.reach import Kernels, Reach, Witness, in_order, is_recorded, record

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "measurements" / "mutants.md"

#: Seconds of the recorded tests that are run first, before any job of several ranks is started; and of all tests that
#: are run in one setting for one defect. What is left out is said in the result.
FIRST_S, MOST_S = 5.0, 60.0
#: Compiling kernels anew takes its time.
LIMIT_S, KERNEL_LIMIT_S = 30.0, 90.0

#: Test files that no defect of the rooms in question needs.
_NOT_RECORDED = re.compile(r"tests/test_(mpi|house|mutants|cli|docs|examples|demo|jobscript|bench|model)\w*\.py")

Result = dict[str, Any]


def phases(tests: Sequence[Witness], rooms: set[str]) -> Iterator[tuple[str, Setting, list[Witness]]]:
    """(suite, setting, tests in order): what is run for a defect, until one of them notices it."""
    quick = in_order([test for test in tests if test.quick], rooms)
    serial = [test for test in quick if test.setting == SERIAL]
    first = _within(serial, FIRST_S)
    yield "default", SERIAL, first
    rest = ("default", SERIAL, [test for test in serial if test not in first])
    ranks = [("default", setting, [test for test in quick if test.setting == setting]) for setting in QUICK]
    yield from [*ranks, rest] if rooms & {"comm", "feed"} else [rest, *ranks]
    others = in_order([test for test in tests if not test.quick], rooms)
    for setting in (SERIAL, *QUICK, *OTHERS):
        yield "full", setting, [test for test in others if test.setting == setting]


def _within(tests: Sequence[Witness], seconds: float) -> list[Witness]:
    """As many of the first tests as take so long together; at least one."""
    kept: list[Witness] = []
    for test in tests:
        seconds -= test.seconds
        if kept and seconds < 0:
            break
        kept.append(test)
    return kept


class Worker:
    """Tries defects in a copy of its own."""

    def __init__(self, folder: Path, reach: Reach) -> None:
        self.copy = Copy(ROOT, folder)
        self.reach = reach
        self.kernels = Kernels(self.copy.root)
        self._sound = kernels_of(self.copy)
        self._tick = 0

    def try_out(self, defect: Defect) -> Result:
        """Which suite notices the defect, by which test."""
        begin = time.monotonic()
        tests, rooms = self.reach.of(defect, self.copy.root, self.kernels)
        done = {"tests": len(tests), "run": 0, "left": 0, "suite": "", "unsteady": []}
        for suite, setting, wanted in phases(tests, rooms):
            kept = _within(wanted, MOST_S)
            done["left"] += len(wanted) - len(kept)
            notice = self._run(defect, setting, kept, done)
            if notice is not None:
                done |= {"suite": suite, "setting": setting.words, **notice._asdict()}
                break
        done["seconds"] = round(time.monotonic() - begin, 1)
        return done

    def _run(self, defect: Defect, setting: Setting, tests: list[Witness], done: Result) -> Notice | None:
        """The first test that notices the defect, and neither fails in the sound tree nor hangs by chance."""
        while tests:
            notice = self._planted(defect, setting, tests, done)
            if notice is None:
                return None
            guilty = [test for test in tests if test.id == notice.test] or tests[:1]
            again = self._sound_run(setting, guilty)
            if again is None and notice.how == "hang":  # or was the machine just slow?
                notice = self._planted(defect, setting, guilty, done, times=2.0)
            if again is None and notice is not None:
                return notice
            done["unsteady"].append(f"{guilty[0].id}: {again.text if again is not None else 'does not hang again'}")
            tests = [test for test in tests if test not in guilty]
        return None

    def _planted(
        self, defect: Defect, setting: Setting, tests: list[Witness], done: Result, times: float = 1.0
    ) -> Notice | None:
        self._tick += 1
        compiled = self.kernels.is_compiled(defect.file, defect.function)
        stale = self.kernels.stale(defect.file) if compiled else set()
        with planted(defect, self.copy.root, self._tick), self.copy.kernels_but(stale, self._sound):
            limit = times * (KERNEL_LIMIT_S if compiled else LIMIT_S)
            ran = run(self.copy, setting, _files(tests), wanted=_seconds(tests), limit_s=limit)
        done["run"] += sum(outcome != "begun" for outcome, *_ in ran.tests.values())
        return ran.notice

    def _sound_run(self, setting: Setting, tests: list[Witness]) -> Notice | None:
        return run(self.copy, setting, _files(tests), wanted=_seconds(tests), limit_s=KERNEL_LIMIT_S).notice


def _files(tests: Sequence[Witness]) -> list[str]:
    return sorted({test.file for test in tests})


def _seconds(tests: Sequence[Witness]) -> dict[str, float]:
    return {test.id: test.seconds for test in tests}


class Results:
    """defect name -> Result, in a file that is written after each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self.all: dict[str, Result] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, name: str, result: Result) -> None:
        with self._lock:
            self.all[name] = result
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(self.all, indent=1))
            part.replace(self._path)


def try_all(defects: Sequence[Defect], data: Path, jobs: int, results: Results) -> None:
    todo: queue.SimpleQueue[Defect] = queue.SimpleQueue()
    for defect in defects:
        todo.put(defect)
    reach = Reach(data / "reach")
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            worker = Worker(data / f"worker{number}", reach)
            while not errors:
                defect = todo.get_nowait()
                result = worker.try_out(defect)
                results.add(defect.name, result)
                print(said(defect, result), flush=True)
        except queue.Empty:
            return
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(min(jobs, len(defects)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        end_all()
    if errors:
        raise errors[0]


def said(defect: Defect, result: Result) -> str:
    count = f"{result['run']} of {result['tests']} tests, {result['seconds']:.0f} s"
    if not result["suite"]:
        return f"{defect.name}: NOT NOTICED ({count}) {'; '.join(result['unsteady'])}"
    return f"{defect.name}: {result['suite']} suite, {result['how']} {result['test']} ({count}): {result['text']}"


def record_all(files: Sequence[str], data: Path, again: bool) -> None:
    copy = Copy(ROOT, data / "recorder")
    folder = data / "reach"
    for file in files or sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").glob("test_*.py")):
        mpi = Path(file).name.startswith("test_mpi_")
        if not files and not mpi and _NOT_RECORDED.match(file):
            continue
        for setting in (*QUICK, *OTHERS) if mpi else [SERIAL]:
            if again or not is_recorded(ROOT / file, setting, folder):
                print(record(copy, setting, file, folder), flush=True)


def table(defects: Sequence[Defect], results: dict[str, Result]) -> str:
    """The sums, one line per defect, and the survivors."""
    tried = [defect for defect in defects if defect.name in results]
    lines = []
    if len(tried) < len(defects):
        lines = [f"A sample: {len(tried)} of the {len(defects)} defects in the list.", ""]
    lines += ["| room | defects | noticed by the default suite | by the full suite |", "|---|---|---|---|"]
    rooms: dict[str, list[Defect]] = {}
    for defect in tried:
        rooms.setdefault(defect.room, []).append(defect)
    for room, those in [*rooms.items(), ("all", tried)]:
        suites = Counter(results[defect.name]["suite"] for defect in those)
        default, full = suites["default"], suites["default"] + suites["full"]
        share = [f"{count} ({count / max(1, len(those)):.0%})" for count in (default, full)]
        lines.append(f"| {' | '.join([room, str(len(those)), *share])} |")
    lines += ["", "| where | defect | suite | first test that notices it | how | s |", "|---|---|---|---|---|---|"]
    for defect in tried:
        result = results[defect.name]
        where = f"`{defect.file.removeprefix('pario/')}` {defect.function}"
        by = "" if not result["suite"] else f"`{_short(result['test'])}`"
        ranks = result.get("setting", "")
        how = "" if not result["suite"] else f"{_HOW[result['how']]}{'' if ranks == SERIAL.words else f', {ranks}'}"
        cells = [where, defect.reason, result["suite"] or "none", by, how, f"{result['seconds']:.0f}"]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    left = [defect for defect in tried if not results[defect.name]["suite"]]
    if left:
        lines += ["", "Not noticed:", ""]
    lines += [f"- `{each.file.removeprefix('pario/')}` {each.function}, {each.reason}: {each.excuse}" for each in left]
    return "\n".join(lines)


_HOW = {"failed": "fails", "hang": "does not end", "crash": "crashes"}


def _short(test: str) -> str:
    test = test.removeprefix("tests/")
    return test if len(test) <= 90 else test[:87] + "..."


def chosen(defects: Sequence[Defect], only: str) -> list[Defect]:
    """The defects of a room, of a file, or with this text in their name."""
    return [defect for defect in defects if not only or only == defect.room or only in defect.name]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "mutants", help="recordings and results")
    parser.add_argument("--record", nargs="*", metavar="FILE", help="record these test files, or all that matter")
    parser.add_argument("--only", default="", metavar="ROOM", help="defects of this room, file or name")
    parser.add_argument("--again", action="store_true", help="also what has a result already")
    parser.add_argument("--jobs", type=int, default=2, help="defects that are tried side by side")
    parser.add_argument("--table", action="store_true")
    given = parser.parse_args()
    given.data = given.data.absolute()  # processes with other working directories get it
    defects = chosen(read_all(), given.only)
    results = Results(given.data / "results.json")
    if given.record is not None:
        record_all(given.record, given.data, given.again)
    elif given.table:
        PAGE.write_text(fill_marked(PAGE.read_text(), "mutants", {"": table(defects, results.all)}))
    else:
        given.data.mkdir(parents=True, exist_ok=True)
        os.nice(5)
        for defect in defects:
            defect.spoilt(ROOT)  # before the first hour is spent
        todo = [defect for defect in defects if given.again or defect.name not in results.all]
        # In the order of their digests: what a run that is interrupted has tried is a fair sample of all.
        todo.sort(key=lambda defect: defect.name.rpartition(":")[2])
        try_all(todo, given.data, given.jobs, results)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended
    sys.exit(main())
