"""The MPI tests, started from the serial ones: `python -m pytest` runs everything.

Every job has a time limit from outside: a test that fails on one rank only can leave the others in a collective.
"""

from __future__ import annotations

import os

import pytest
from launch import run_job

HERE = os.path.dirname(os.path.abspath(__file__))

FILES = sorted(name for name in os.listdir(HERE) if name.startswith("test_mpi_") and name.endswith(".py"))

#: One file on 5 ranks of 2 cores takes some 10 s, and up to a minute where kernels must be compiled first; a job that
#: hangs must not keep a person for longer than it takes to wonder.
LIMIT_S = 180


def check(ranks: int, name: str, env: dict[str, str]) -> None:
    path = os.path.join(HERE, name)
    # No cache provider: the ranks would write its files at once.
    argv = ["-m", "pytest", "--with-mpi", "-q", "-p", "no:cacheprovider", path]
    job = run_job(ranks, argv, limit_s=LIMIT_S, env=env)
    ended = f"did not end within {LIMIT_S} s" if job.status is None else f"ended with status {job.status}"
    assert job.status == 0, f"{name} on {ranks} ranks {ended} after {job.seconds:.0f} s:\n{job.output}"
    # Every rank ran the tests: ranks that are alone (an mpiexec of another MPI) or all skipped would pass as well.
    assert job.output.count(" passed") == ranks, job.output


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_ranks(ranks: int, name: str) -> None:
    check(ranks, name, {})


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("ranks", [3, 5])
def test_two_nodes(ranks: int, name: str) -> None:
    """MPICH shows the ranks of one machine as two nodes (even and odd ranks); other libraries run on one node again."""
    check(ranks, name, {"MPIR_CVAR_NUM_CLIQUES": "2"})
