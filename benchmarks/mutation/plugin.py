"""What pytest does inside a run of benchmarks.mutants, on every rank: the wanted tests in the wanted order, a line of
progress before and after each, and for recording runs the name of the test beside the lines that it reaches.

PARIO_MUTANTS_WANTED    a JSON list of test ids, in order (all tests if not set)
PARIO_MUTANTS_PROGRESS  a folder: each process appends JSON lines to a file of its own
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest

_progress: Any = None
_begin = 0.0


def _say(**words: Any) -> None:
    global _progress
    if _progress is None:
        _progress = open(os.path.join(os.environ["PARIO_MUTANTS_PROGRESS"], f"{os.getpid()}.jsonl"), "a")  # noqa: SIM115
    _progress.write(json.dumps(words) + "\n")
    _progress.flush()


def pytest_configure() -> None:
    import pario

    _say(pario=os.path.dirname(os.path.abspath(pario.__file__)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = os.environ.get("PARIO_MUTANTS_WANTED")
    if wanted:
        with open(wanted) as file:
            order = {name: number for number, name in enumerate(json.load(file))}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    global _begin
    _begin = time.monotonic()
    marks = sorted({mark.name for mark in item.iter_markers()} & {"full", "system"})
    _say(test=item.nodeid, is_now="begun", marks=marks)
    _reaches(item.nodeid)
    try:
        return (yield)
    finally:
        _reaches("")
        _say(test=item.nodeid, is_now="over", seconds=time.monotonic() - _begin)


def _reaches(test: str) -> None:
    """Lines that are run from now on are this test's."""
    if "COVERAGE_PROCESS_START" in os.environ:
        import coverage

        name = os.environ.get("PARIO_MUTANTS_RANKS", "") + test
        os.environ["PARIO_MUTANTS_TEST"] = name
        current = coverage.Coverage.current()
        if current is not None:
            current.switch_context(name)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _say(test=report.nodeid, is_now="failed", text=_words(report))
    elif report.when == "call" or report.skipped:
        _say(test=report.nodeid, is_now=report.outcome)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _say(test=report.nodeid, is_now="failed", text=_words(report))


def _words(report: Any) -> str:
    """The line in which pytest says what was wrong."""
    crash = getattr(getattr(report.longrepr, "reprcrash", None), "message", None)
    lines = str(crash or report.longrepr).strip().splitlines()
    return (lines[0] if crash else lines[-1])[:300] if lines else ""
