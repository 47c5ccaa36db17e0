"""One mpiexec that runs the MPI tests of many files, and what they came to on every rank."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch import Job, run_job

HERE = Path(__file__).resolve().parent

FILES = sorted(path.name for path in HERE.glob("test_mpi_*.py"))

#: Whatever happens, the job has ended by then.
LIMIT_S = 900


@dataclass(frozen=True)
class Ranks:
    """How many ranks, and on how many nodes MPI shows them (MPICH; with other libraries it is one node).

    mpi : False: they find each other without it
    """

    ranks: int
    nodes: int = 1
    mpi: bool = True

    def __str__(self) -> str:
        words = (f"{n} {what}{'s' * (n > 1)}" for n, what in ((self.ranks, "rank"), (self.nodes, "node")))
        return " on ".join(words) + " without MPI" * (not self.mpi)


@dataclass
class Outcome:
    """What one test file came to: what is wrong, and whether it began at all."""

    name: str
    began: bool
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"{self.name}:", *self.wrong])


class Session:
    """The reports of all ranks of one job."""

    def __init__(self, world: Ranks, job: Job, folder: Path) -> None:
        self.world, self.job = world, job
        self.reports = [self._read(folder / f"{rank}.json") for rank in range(world.ranks)]
        self.stacks = [self._text(folder / f"{rank}.stacks") for rank in range(world.ranks)]

    @staticmethod
    def _text(path: Path) -> str:
        return path.read_text() if path.exists() else ""

    def _read(self, path: Path) -> dict[str, dict[str, Any]]:
        """test -> its last line, in the order of the tests"""
        lines = self._text(path).splitlines(keepends=True)
        return {line["test"]: line for line in map(json.loads, (one for one in lines if one.endswith("\n")))}

    @property
    def names(self) -> list[str]:
        """The files of which some rank began a test."""
        tests = [test for rank in self.reports for test in rank if "::" in test]
        return list(dict.fromkeys(os.path.basename(test.split("::")[0]) for test in tests))

    @property
    def ended(self) -> str:
        job = self.job
        how = f"did not end within {LIMIT_S} s" if job.status is None else f"ended with status {job.status}"
        return f"{self.world}: the job {how} after {job.seconds:.0f} s and said:\n{job.output}"

    @property
    def ended_where(self) -> str:
        """How the job ended, and where each rank hung at last."""
        return self.ended + "".join(f"rank {rank}: {stack}" for rank, stack in enumerate(self.stacks) if stack)

    def of(self, name: str) -> Outcome:
        """What the tests of one file came to: each must have passed on every rank, or say why it does not run there."""
        mine = [{test: line for test, line in rank.items() if f"{name}::" in test} for rank in self.reports]
        found = Outcome(name, began=any(mine))
        for test in dict.fromkeys(test for rank in mine for test in rank):
            for number, rank in enumerate(mine):
                line = rank.get(test, {"outcome": "never begun", "text": ""})
                if line["outcome"] not in ("passed", "skipped"):
                    stack = self.stacks[number] if line["outcome"] == "began" else ""
                    found.wrong.append(f"rank {number}: {test}: {line['outcome']}\n{line.get('text', '')}{stack}")
        for number, rank in enumerate(mine):
            # Ranks that are alone (an mpiexec of another MPI), or all skipped, would pass as well.
            if not any(line["outcome"] == "passed" for line in rank.values()):
                found.wrong.append(f"rank {number}: no test passed")
        if found.wrong:
            found.wrong.append(self.ended)
        return found


def run_tests(
    world: Ranks,
    names: Sequence[str],
    folder: Path,
    *more: str,
    test_limit_s: float = 90,
    python: str = sys.executable,
) -> Session:
    """These test files on so many ranks, in one job, which leaves its reports in the empty `folder`.

    more : further words for pytest
    test_limit_s : for each test. On 5 ranks of 2 cores it takes seconds, and half a minute where kernels must be
        compiled first.
    """
    stand_in = [] if world.mpi else ["-p", "no_mpi"]
    argv = ["-m", "pytest", *stand_in, "--with-mpi", "-q", "-x", "-p", "rank_reports", "--color=no"]
    # Ranks would write the cache's files at once; and the plugin has a limit per test of its own.
    argv += ["-p", "no:cacheprovider", "-p", "no:faulthandler", *more]
    # Without a root pytest takes the folder that the working directory and the files have in common, and looks at all
    # that lies in it: in /tmp, at a mount whose server was killed, and ends.
    paths = [HERE / name for name in names]
    argv += [f"--rootdir={HERE.parent if paths[0].is_relative_to(HERE) else paths[0].parent}", *map(str, paths)]
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")])),
        "PARIO_RANK_REPORTS": str(folder),
        "PARIO_RANK_TEST_LIMIT_S": str(test_limit_s),
    }
    if world.nodes > 1:
        env["MPIR_CVAR_NUM_CLIQUES"] = str(world.nodes)
    launcher = None if world.mpi else str(HERE / "start_ranks.py")
    job = run_job(world.ranks, argv, limit_s=LIMIT_S, env=env, python=python, launcher=launcher)
    return Session(world, job, folder)
