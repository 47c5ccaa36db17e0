"""A plugin for pytest on the ranks of an MPI job (`-p rank_reports`): every rank writes what each test came to.

The file of a rank has a JSON line when a test begins and one when it has ended, so that whoever started the job knows
which test failed, on which ranks, and in which one a rank hung or died. After a failure the job is over: the ranks are
out of step, and the next collective call would pair with the wrong one.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
from typing import IO, Any

import pytest
from mpi4py import MPI

#: Seconds that ranks have to report a failure of their own, and to leave the fixtures of a test that failed.
LAST_WORDS_S = 2.0

#: Seconds for the end of a process, from the end of its last test.
END_S = 30.0


class Reports:
    """What this rank tells about its tests, and the limit for each."""

    def __init__(self, folder: str, limit_s: float) -> None:
        self.limit_s = limit_s
        # Ranks that are alone, as under the mpiexec of another MPI, are all rank 0: the second one fails here.
        self.lines: IO[str] = open(f"{folder}/{MPI.COMM_WORLD.rank}.json", "x", buffering=1)  # noqa: SIM115
        self.stacks: IO[str] = open(f"{folder}/{MPI.COMM_WORLD.rank}.stacks", "x")  # noqa: SIM115
        self.ended: dict[str, Any] = {}

    def line(self, **words: Any) -> None:
        self.lines.write(json.dumps(words) + "\n")

    def end_within(self, seconds: float) -> None:
        """Write where every thread is after so many seconds, and soon after that end this process: the kernel does, as
        the interpreter may be the one that hangs. In between the other ranks write theirs; the launcher kills them."""
        faulthandler.dump_traceback_later(seconds, file=self.stacks)
        signal.setitimer(signal.ITIMER_REAL, seconds + LAST_WORDS_S)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.ended = {"outcome": "passed", "seconds": 0.0, "text": ""}
        self.line(test=nodeid, outcome="began")
        self.end_within(self.limit_s)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.ended["seconds"] += report.duration
        if report.outcome != "passed" and self.ended["outcome"] != "failed":
            self.ended["outcome"] = report.outcome
            self.ended["text"] = report.longreprtext
            for title, said in report.sections:
                self.ended["text"] += f"\n--- {title}\n{said}"
        if report.failed:
            self.line(test=report.nodeid, **self.ended)  # now: the other ranks may keep this one from going on
            self.end_within(LAST_WORDS_S)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        self.line(test=nodeid, **self.ended)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) and MPI.COMM_WORLD.size > 1:
            time.sleep(LAST_WORDS_S)
            MPI.COMM_WORLD.Abort(1)
            return  # it returns here and there before the kill comes
        self.line(test="the end of the process", outcome="began")
        self.end_within(END_S)  # atexit and MPI_Finalize can hang, too


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What each rank does alone, on COMM_SELF, is tried on 1 to 3 ranks: on more it is the same for all of them."""
    if MPI.COMM_WORLD.size > 3:
        together: list[pytest.Item] = []
        alone: list[pytest.Item] = []
        for each in items:
            params = getattr(getattr(each, "callspec", None), "params", {})
            (alone if "self" in params.values() else together).append(each)
        config.hook.pytest_deselected(items=alone)
        items[:] = together


def pytest_configure(config: pytest.Config) -> None:
    folder, limit_s = os.environ["PARIO_RANK_REPORTS"], float(os.environ["PARIO_RANK_TEST_LIMIT_S"])
    config.pluginmanager.register(Reports(folder, limit_s), "rank-reports-of-this-rank")
