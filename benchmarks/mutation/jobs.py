"""Copies of the tree, and runs of some tests in one of them: watched, ended at the first failure, never forgotten."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import job_environment, kill_tree

__all__ = ["OTHERS", "QUICK", "SERIAL", "Copy", "Notice", "Ran", "Setting", "end_all", "run"]

#: Seconds without a word before the first test (imports, collection) and in the end.
START_S = 120.0
#: Seconds that any test may take, and how many times as long as when it was recorded.
LEAST_LIMIT_S, TIMES_AS_LONG = 30.0, 10.0

_PAUSE_S = 0.05

#: What runs now: to be ended when this process is; and whether that has begun, so that nothing new is started.
_running: set[subprocess.Popen[Any]] = set()
_ending = threading.Event()


class Setting(NamedTuple):
    """Where tests run: in one process (0 ranks), or on so many ranks of so many emulated nodes."""

    ranks: int = 0
    nodes: int = 1

    def __str__(self) -> str:
        return f"{self.ranks}x{self.nodes}" if self.ranks else "serial"

    @property
    def words(self) -> str:
        if not self.ranks:
            return "one process"
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return ranks if self.nodes == 1 else f"{ranks} on {self.nodes} nodes"


SERIAL = Setting()
#: As tests/test_mpi.py has them: in the default suite, and in the full one.
QUICK = (Setting(2), Setting(3, 2))
OTHERS = (Setting(1), Setting(3), Setting(5), Setting(5, 2))


class Notice(NamedTuple):
    """How a run ended early. how : "failed", "hang" (no end within the test's limit) or "crash" (no process left)."""

    test: str
    how: str
    text: str


@dataclass
class Ran:
    """What became of a run: test -> (outcome, seconds, marks)."""

    notice: Notice | None = None
    tests: dict[str, tuple[str, float, list[str]]] = field(default_factory=dict)
    seconds: float = 0.0
    words: str = ""


class Copy:
    """A copy of the working tree in `folder`, in which defects are planted, and its cache of compiled kernels."""

    def __init__(self, checkout: Path, folder: Path) -> None:
        self.root = folder / "tree"
        self.cache = folder / "numba"
        shutil.rmtree(self.root, ignore_errors=True)
        listed = subprocess.run(
            ["git", "-C", str(checkout), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            capture_output=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.decode().split("\0")):
            if (checkout / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(checkout / name, self.root / name)

    def environment(self) -> dict[str, str]:
        """For processes that shall import pario from this copy."""
        path = os.pathsep.join([str(self.root), str(self.root / "tests")])
        return {"PYTHONPATH": path, "PARIO_NUMBA_CACHE": str(self.cache), "PYTHONDONTWRITEBYTECODE": ""}

    @contextmanager
    def kernels_but(self, stale: set[str], kernels: Path) -> Iterator[None]:
        """Let the copy with a changed kernel begin with all compiled kernels but those of the modules `stale`.

        kernels : the folder of kernels that belongs to the sound tree
        """
        made = kernels_of(self)
        if made != kernels and kernels.is_dir():
            shutil.copytree(kernels, made, dirs_exist_ok=True)
            for path in made.glob("*.nbc"):  # named after module and function
                if any(path.name.startswith(f"{module}.") for module in stale):
                    path.unlink()
        try:
            yield
        finally:
            if made != kernels:
                shutil.rmtree(made, ignore_errors=True)


def kernels_of(copy: Copy) -> Path:
    """The folder that holds the compiled kernels of the copy as it is now."""
    code = "from pario.kernels import jit; print(jit.cache_directory())"
    environment = {**os.environ, **copy.environment()}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=copy.root
    )
    return Path(done.stdout.strip())


def run(
    copy: Copy,
    setting: Setting,
    files: Sequence[str],
    *,
    wanted: Mapping[str, float] | None = None,
    words: Sequence[str] = (),
    more: Mapping[str, str] | None = None,
    stop: bool = True,
    limit_s: float = LEAST_LIMIT_S,
    budget_s: float = 600.0,
) -> Ran:
    """Run tests in the copy, until the first failure if `stop`.

    files : test files, below the root
    wanted : test id -> seconds when recorded, in order; None: all tests of the files
    words : more words for pytest; more : more of the environment
    limit_s : seconds that any test may take at least
    budget_s : end the run after so many seconds, whatever it does
    """
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        folder = Path(name)
        (folder / "progress").mkdir()
        environment = {
            **job_environment(max(2, setting.ranks) if setting.ranks else 1, setting.nodes),
            **copy.environment(),
            "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            # Examples that Hypothesis found with another defect must not be the first of this one.
            "HYPOTHESIS_STORAGE_DIRECTORY": str(folder / "hypothesis"),
            "PARIO_MUTANTS_PROGRESS": str(folder / "progress"),
            "PARIO_MUTANTS_RANKS": f"{setting}|",
            "TMPDIR": str(folder),
            **(more or {}),
        }
        if wanted is not None:
            (folder / "wanted").write_text(json.dumps(list(wanted)))
            environment["PARIO_MUTANTS_WANTED"] = str(folder / "wanted")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.mutation.plugin", "-p", "no:cacheprovider"]
        command += ["--tb=short", "--color=no", "-m", "", *(["-x"] if stop else []), *words, *files]
        if setting.ranks:
            command = [_mpiexec(), "-n", str(setting.ranks), *command, "--with-mpi"]
        with open(folder / "words", "w+", errors="replace") as output:
            child = subprocess.Popen(
                command, cwd=copy.root, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            _running.add(child)
            try:
                if _ending.is_set():
                    raise InterruptedError("this process is about to end")
                ran = _watch(child, folder / "progress", copy, wanted or {}, stop, limit_s, budget_s)
            finally:
                _end(child)
            output.seek(0)
            ran.words = output.read()[-6000:]
    return ran


def _watch(
    child: subprocess.Popen[Any], folder: Path, copy: Copy, wanted: Mapping[str, float],
    stop: bool, limit_s: float, budget_s: float,
) -> Ran:  # fmt: skip
    ran = Ran()
    begin = time.monotonic()
    ranks: dict[Path, _Rank] = {}
    while True:
        ended = child.poll()
        for path in folder.iterdir():
            for line in ranks.setdefault(path, _Rank()).read(path):
                _note(ran, line, copy)
        now = time.monotonic()
        ran.seconds = now - begin
        if ran.notice is not None and stop:
            return ran
        busy = next((rank.test for rank in ranks.values() if rank.test), "")
        if ended is not None:
            if ended not in (0, 1, 5) and ran.notice is None:
                ran.notice = Notice(busy or "before the first test", "crash", f"status {ended}")
            return ran
        if ran.seconds > budget_s:
            return ran
        for rank in ranks.values():
            limit = max(limit_s, TIMES_AS_LONG * wanted.get(rank.test, 0.0)) if rank.test else START_S
            if now - rank.heard > limit:
                ran.notice = Notice(rank.test or "before the first test", "hang", f"no end within {limit:.0f} s")
                return ran
        if not ranks and ran.seconds > START_S:
            ran.notice = Notice("before the first test", "hang", f"no word within {START_S:.0f} s")
            return ran
        time.sleep(_PAUSE_S)


class _Rank:
    """The progress of one process: what it does now, and when it last said a word."""

    def __init__(self) -> None:
        self.test = ""
        self.heard = time.monotonic()
        self._at = 0

    def read(self, path: Path) -> list[dict[str, Any]]:
        with open(path) as file:
            file.seek(self._at)
            text = file.read()
        text = text[: text.rfind("\n") + 1]
        self._at += len(text.encode())
        lines = [json.loads(line) for line in text.splitlines()]
        for line in lines:
            self.heard = time.monotonic()
            if line.get("is_now") in ("begun", "over"):
                self.test = line["test"] if line["is_now"] == "begun" else ""
        return lines


def _note(ran: Ran, line: dict[str, Any], copy: Copy) -> None:
    if "pario" in line:
        if Path(line["pario"]) != (copy.root / "pario").resolve():
            raise RuntimeError(f"the tests imported pario from {line['pario']}, not from the copy {copy.root}")
        return
    test, now = line["test"], line["is_now"]
    outcome, seconds, marks = ran.tests.get(test, ("begun", 0.0, []))
    if now == "begun":
        marks = line["marks"]
    elif now == "over":
        seconds = max(seconds, line["seconds"])
    elif now == "failed":
        outcome = now
        ran.notice = ran.notice or Notice(test, "failed", line["text"])
    elif outcome != "failed":
        outcome = now if outcome == "begun" or now == "passed" else outcome
    ran.tests[test] = outcome, seconds, marks


def end_all() -> None:
    """End what other threads run, and let them start nothing more."""
    _ending.set()
    for child in list(_running):
        _end(child)


def _end(child: subprocess.Popen[Any]) -> None:
    """No process stays, and no segment of MPICH's either: those it leaves when it is killed."""
    _running.discard(child)
    ours = _descendants_segments(child.pid) if child.poll() is None else []
    kill_tree(child.pid)
    child.wait()
    for path in ours:
        path.unlink(missing_ok=True)


def _descendants_segments(pid: int) -> list[Path]:
    """Files of /dev/shm that the descendants of `pid` map."""
    children: dict[int, list[int]] = {}
    maps: dict[int, Path] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(folder.name))
        maps[int(folder.name)] = folder / "maps"
    found: set[Path] = set()
    todo = [pid]
    while todo:
        each = todo.pop()
        todo += children.get(each, [])
        try:
            text = maps[each].read_text() if each in maps else ""
        except OSError:
            continue
        found |= {Path(line.split()[5]) for line in text.splitlines() if "/dev/shm/mpich_shm_" in line}
    return sorted(found)


def _mpiexec() -> str:
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise FileNotFoundError("no mpiexec beside this Python nor on the PATH (pip install mpich)")
    return found


def digest(text: str) -> str:
    """Of a function or file: has it changed?"""
    return hashlib.sha256(text.rstrip("\n").encode()).hexdigest()[:12]
