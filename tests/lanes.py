"""Two workers of pytest-xdist for a run of all tests: jobs of other processes on one, with as much of the rest as keeps
both busy; everything else on the other. The tests of `full` and `system` have three workers for seven lanes: their jobs
wait for much of the time (for ranks to be missed, for Slurm), and two workers left half a core idle.

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
    "test_cli_doctor.py",
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
#: Rooms whose tests go beside them: without these the lanes took 285 and 541 s.
BESIDE = ("test_checkpoint_", "test_comm_", "test_dataset_", "test_plane_", "test_tiers_", "test_tune_")
#: Where the other lane is cut in a run of everything: the worker that is done first takes the next part.
CUTS = ("test_f", "test_l", "test_locate", "test_m")


class Lanes(LoadScopeScheduling):
    """Hands out whole lanes; a worker that is done takes the next one."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.split("::")[0]
        if "system" in path.split("/"):
            return "system"
        name = os.path.basename(path)
        if name in JOBS or name.startswith(BESIDE):
            return "jobs"
        part = sum(name >= cut for cut in CUTS) if everything(self.config) else 0
        return f"here, part {part}"


def everything(config: pytest.Config) -> bool:
    """Whether more is asked for than the default tests."""
    return "not full" not in config.option.markexpr


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Lanes:
    config.option.loadscopereorder = False  # the lanes begin in the order of their first files: system does first
    return Lanes(config, log)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    if config.args_source != pytest.Config.ArgsSource.TESTPATHS:
        return 0
    return 3 if everything(config) else 2
