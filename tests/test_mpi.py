"""The MPI tests, started from the serial ones: `python -m pytest` runs them on 3 ranks of two nodes, in one job;
`python -m pytest -m full` on 1 and 2 ranks and on 5 of two nodes, and what is marked `full` on all of them; and on 3
that find each other without MPI (no_mpi.py). PARIO_NO_MPI=1: all of it without MPI, too, on 2, 3 and 5 ranks.

A file that did not pass in the common job runs once more in a job of its own, so that each failure has its file's name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi_session import FILES, Ranks, Session, run_tests

QUICK = [Ranks(3, nodes=2)]
OTHERS = [Ranks(1), Ranks(2), Ranks(5, nodes=2)]
#: Without MPI a single rank is alone (pario/comm/solo.py).
NO_MPI = [Ranks(3, nodes=2, mpi=False)]

EVERYTHING = ("-m", "full or not full")

if os.environ.get("PARIO_NO_MPI") == "1":
    OTHERS += [Ranks(2, mpi=False), *NO_MPI, Ranks(5, nodes=3, mpi=False)]

Jobs = Callable[..., Session]


@pytest.fixture(scope="module")
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """job(world, *words for pytest): all files that this run asks for on these ranks, in one job, once."""
    done: dict[tuple[object, ...], Session] = {}

    def get(world: Ranks, *more: str) -> Session:
        key = (world, *more)
        if key not in done:
            wanted = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
            names = [params["name"] for params in wanted if params.get("world") == world and "name" in params]
            done[key] = run_tests(world, names or FILES, tmp_path_factory.mktemp("ranks"), *more)
        return done[key]

    return get


def check(job: Jobs, folder: Path, world: Ranks, name: str, *more: str) -> None:
    together = job(world, *more).of(name)
    if together.wrong:
        alone = run_tests(world, [name], folder, *more)
        assert not alone.of(name).wrong, str(alone.of(name))
        assert alone.job.status == 0, alone.ended_where
        assert not together.began, f"passes alone, and not together with the other files: {together}"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("world", QUICK, ids=str)
def test_ranks(job: Jobs, tmp_path: Path, world: Ranks, name: str) -> None:
    check(job, tmp_path, world, name)


@pytest.mark.parametrize("world", QUICK, ids=str)
def test_the_job_ends_well(job: Jobs, world: Ranks) -> None:
    """After the last test, too: what all files left behind in one process keeps it from nothing."""
    assert job(world).job.status == 0, job(world).ended_where


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("world", OTHERS, ids=str)
def test_more_ranks(job: Jobs, tmp_path: Path, world: Ranks, name: str) -> None:
    check(job, tmp_path, world, name, *EVERYTHING)


@pytest.mark.full
@pytest.mark.parametrize("world", OTHERS, ids=str)
def test_jobs_of_more_ranks_end_well(job: Jobs, world: Ranks) -> None:
    assert job(world, *EVERYTHING).job.status == 0, job(world, *EVERYTHING).ended_where


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("world", NO_MPI, ids=str)
def test_ranks_without_mpi(job: Jobs, tmp_path: Path, world: Ranks, name: str) -> None:
    check(job, tmp_path, world, name)


@pytest.mark.full
@pytest.mark.parametrize("world", NO_MPI, ids=str)
def test_the_job_without_mpi_ends_well(job: Jobs, world: Ranks) -> None:
    assert job(world).job.status == 0, job(world).ended_where


@pytest.mark.full
@pytest.mark.parametrize("world", QUICK, ids=str)
def test_what_is_marked_full(tmp_path: Path, world: Ranks) -> None:
    session = run_tests(world, FILES, tmp_path, "-m", "full")
    assert session.job.status == 0, session.ended_where
    for name in session.names:
        assert not session.of(name).wrong, str(session.of(name))
    assert len(session.names) > 1, session.ended


@pytest.mark.full
@pytest.mark.parametrize(
    ("world", "what"),
    [
        (Ranks(8, nodes=4), "every_recipe and (commits-False or mixed-global)"),
        (Ranks(5, nodes=5), "turn or once or best or early"),
    ],
    ids=str,
)
def test_recipes_on_more_nodes(tmp_path: Path, world: Ranks, what: str) -> None:
    session = run_tests(world, ["test_mpi_recipes.py"], tmp_path, "-k", what)
    assert not session.of("test_mpi_recipes.py").wrong, str(session.of("test_mpi_recipes.py"))
    assert session.job.status == 0, session.ended_where


#: Two ranks: a test that passes, and one that goes wrong on rank 1 while rank 0 waits for it.
WRONG = """
import time
from mpi4py import MPI
def test_right(): pass
def test_wrong():
    MPI.COMM_WORLD.Barrier()  # both have begun: a launcher kills the other rank at once
    if MPI.COMM_WORLD.rank == 1: {}
    MPI.COMM_WORLD.Barrier()
def test_afterwards(): MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize(
    ("what", "here", "there"),
    [
        ("assert not 'this time'", "failed", "began"),
        pytest.param("time.sleep(60)", "began", "began", marks=pytest.mark.full),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "began", "began"),
    ],
    ids=["fails", "hangs", "dies"],
)
def test_a_failure_is_told_by_name(tmp_path: Path, what: str, here: str, there: str) -> None:
    (tmp_path / "test_it.py").write_text(WRONG.format(what))
    session = run_tests(Ranks(2), [str(tmp_path / "test_it.py")], tmp_path, test_limit_s=5)
    assert session.job.seconds < 30 * session.job.slowness, session.ended
    assert [list(line["outcome"] for line in rank.values()) for rank in session.reports] == [
        ["passed", there],
        ["passed", here],
    ]
    told = str(session.of("test_it.py"))
    # pytest may put a path before it: to the file from a folder that has it and the package in common.
    assert re.search(rf"rank 1: \S*test_it\.py::test_wrong: {here}", told), told
    assert "afterwards" not in told
    assert told.count('test_it.py", line') == (2 if "sleep" in what else 0), "where each rank hangs"
    assert ("not 'this time'" in told) == (here == "failed")
