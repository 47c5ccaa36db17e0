"""Two workers of pytest-xdist for a run of all tests: jobs of other processes on one, everything else on the other.

A file always runs as a whole and in the same lane, after the same other files, so a failure can be repeated:
`pytest -n 0 tests/test_a.py tests/test_b.py`. Runs of chosen files or tests need no workers, and get none.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

#: Files whose tests mostly start other processes, in the order of nothing: that of their names.
JOBS = {
    "test_bench_study.py",
    "test_cli_doctor.py",
    "test_comm_jobs.py",
    "test_demo.py",
    "test_examples.py",
    "test_failures.py",
    "test_frameworks.py",
    "test_kernels_jit.py",
    "test_lmdb_run.py",
    "test_lmdb_workers.py",
    "test_loader_jobs.py",
    "test_mpi.py",
}


class Lanes(LoadScopeScheduling):
    """Hands out whole lanes; a worker that is done takes the next one."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        if "system" in path.split("/"):
            return "system"
        return "jobs" if os.path.basename(path) in JOBS else "here"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    return Lanes(config, log)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return 2 if config.args_source == pytest.Config.ArgsSource.TESTPATHS else 0
