"""Nobody waits for the compiler: pario.lmdb is plain Python until its functions are compiled, then changes to these."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb as real
import lmdb_fuzz
import lmdb_walks
import pytest
from lmdb_walks import ENGINES, walked
from plain_lmdb import use_plain_python

import pario.lmdb as ours
from pario.kernels.private import PrivateDirectory
from pario.lmdb import compiling, engine, native, pages, plain
from pario.lmdb.compiling import Compiling

HOUSE = Path(__file__).resolve().parents[1]
N = 3000
LIMIT_S = 120


def value(i: int) -> bytes:
    return b"%d" % i * (1 + i % 200 + 3000 * (i % 10 == 0))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Some 250 pages of leaves, more than the smallest cache holds, and values of their own pages."""
    place = os.fspath(tmp_path_factory.mktemp("plain") / "db")
    with real.open(place, map_size=1 << 28, subdir=False) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%08d" % i, value(i))
    return place


@pytest.fixture
def as_plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    use_plain_python(monkeypatch)


def opened(path: str) -> ours.Environment:
    return ours.open(path, subdir=False, readonly=True, lock=False, cache_bytes=0)


# -- from an empty cache -----------------------------------------------------------------------------------------------

#: Reads, then tells whether its functions were compiled before it could.
FIRST = """
import glob, os, signal, sys, time
import lmdb
begin = time.monotonic()
env = lmdb.open(sys.argv[1], subdir=False, readonly=True, lock=False)
with env.begin() as txn:
    assert txn.get(b"%08d" % 7) == b"7" * 8
    assert len(txn.get(b"%08d" % 2990)) == 4 * (1 + 2990 % 200 + 3000)
    assert sum(1 for _ in txn.cursor()) == 3000
    found = txn.cursor().getmulti([b"%08d" % 1, b"none", b"%08d" % 20])
    assert [len(v) for _, v in found] == [2, 2 * (1 + 20 + 3000)]
compiled = glob.glob(os.environ["PARIO_NUMBA_CACHE"] + "/*/pario.lmdb.native.*.nbc")
print(type(env).__module__, len(compiled), flush=True)
if len(sys.argv) > 2:
    os.kill(os.getpid(), signal.SIGKILL)
"""


def nobody_compiles(cache: Path) -> bool:
    try:
        os.close(lock_of(cache))
    except BlockingIOError:
        return False
    return True


def lock_of(cache: Path) -> int:
    (folder,) = cache.iterdir()
    fd = PrivateDirectory(os.fspath(folder)).open_file("lmdb.lock")
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise
    return fd


@pytest.mark.parametrize("end", [[], ["killed"]], ids=["ends", "killed"])
def test_the_first_reads_wait_for_no_compiler(tmp_path: Path, path: str, end: list[str]) -> None:
    """A script on a new machine. What compiles for it ends with it, however that happens."""
    (tmp_path / "script.py").write_text(FIRST)
    cache = tmp_path / "cache"
    done = subprocess.run(
        [sys.executable, "-m", "pario", "run", os.fspath(tmp_path / "script.py"), path, *end],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, "PYTHONPATH": os.fspath(HOUSE), "PARIO_NUMBA_CACHE": os.fspath(cache)},
    )
    assert done.returncode == (-signal.SIGKILL if end else 0), done.stderr
    assert done.stdout.split() == ["pario.lmdb.env", "0"], done.stderr
    assert done.stderr == ""
    limit = time.monotonic() + 10
    while not nobody_compiles(cache):
        assert time.monotonic() < limit, "the process that compiles goes on"
        time.sleep(0.05)


#: Reads on until the functions are compiled, in children of a fork too.
ON = """
import os, sys, time
import pario.lmdb as lmdb
from pario.lmdb import native
env = lmdb.open(sys.argv[1], subdir=False, readonly=True, lock=False)
def rounds():
    n = 0
    while type(lmdb.Transaction.get).__name__ != "method_descriptor":
        with env.begin() as txn:
            assert txn.get(b"%08d" % (n % 3000)).startswith(b"%d" % (n % 3000))
            assert sum(1 for _ in txn.cursor().iternext(values=False)) == 3000
        n += 1
        time.sleep(0.1)
    return n
env.begin().get(b"0")
child = os.fork()
n = rounds()
assert not native._compiling._started or not child or n > 1, n
if not child:
    os._exit(0)
assert os.wait() == (child, 0)
"""


@pytest.mark.full
def test_calls_go_to_the_compiled_functions_once_there_are_such(tmp_path: Path, path: str) -> None:
    """Compiled by one process, for the script and for what it forked meanwhile. `os.wait` finds no other child."""
    cache = tmp_path / "cache"
    env = {**os.environ, "PYTHONPATH": os.fspath(HOUSE), "PARIO_NUMBA_CACHE": os.fspath(cache)}
    done = subprocess.run([sys.executable, "-c", ON, path], capture_output=True, text=True, timeout=400, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert any(cache.glob("*/pario.lmdb.native._find_many-*.nbc"))


# -- who compiles ------------------------------------------------------------------------------------------------------


START = compiling._start


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Locks that a process was started with; one that does nothing. The cache is empty."""
    locks: list[int] = []
    (tmp_path / "cache" / "digest").mkdir(mode=0o700, parents=True)
    monkeypatch.setattr("pario.kernels.jit._FOLDER", PrivateDirectory(os.fspath(tmp_path / "cache" / "digest")))
    monkeypatch.setattr(compiling, "_start", lambda lock: locks.append(os.dup(lock)))
    monkeypatch.setattr(compiling, "_PAUSE_S", 0.0)
    return locks


def test_one_process_compiles(started: list[int]) -> None:
    one, other = Compiling(), Compiling()
    held = False
    assert [one.look(lambda: held), other.look(lambda: held), one.look(lambda: held)] == [False] * 3
    assert len(started) == 1
    held = True
    assert not other.look(lambda: held), "it has saved the last function and not yet ended"
    os.close(started[0])
    assert other.look(lambda: held)
    assert one.look(lambda: held)
    assert len(started) == 1


def test_whose_process_died_compiles_itself(started: list[int]) -> None:
    one = Compiling()
    assert not one.look(lambda: False)
    os.close(started[0])
    assert one.look(lambda: False)
    assert len(started) == 1


def test_who_waited_for_one_that_died_starts_the_next(started: list[int]) -> None:
    one, other = Compiling(), Compiling()
    assert not one.look(lambda: False)
    assert not other.look(lambda: False)
    os.close(started[0])
    assert not other.look(lambda: False)
    assert len(started) == 2
    os.close(started[1])


def test_what_is_compiled_is_not_compiled_again(started: list[int]) -> None:
    assert Compiling().look(lambda: True)
    assert started == []


def test_where_no_process_can_be_started_calls_compile(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def start(lock: int) -> None:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(compiling, "_start", start)
    assert Compiling().look(lambda: False)


def test_who_reads_does_not_wait_for_an_interpreter_that_hangs(
    started: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(sys, "executable", os.fspath(hanging))
    monkeypatch.setattr(compiling, "_start", START)
    monkeypatch.setattr(compiling, "_START_S", 0.1)
    begin = time.monotonic()
    assert Compiling().look(lambda: False)
    assert time.monotonic() - begin < 20


def test_where_nothing_can_be_kept_calls_compile(started: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pario.kernels.jit._FOLDER", PrivateDirectory("/proc/pario"))
    assert Compiling().look(lambda: False)
    assert started == []


# -- plain Python answers as what is compiled --------------------------------------------------------------------------


@pytest.mark.usefixtures("as_plain_python")
@pytest.mark.parametrize("version", ENGINES)
@pytest.mark.parametrize(("file", "db"), [("main_deep", None), ("mixed", b"deep"), ("mixed", b"integerdup_8")])
def test_walks(tmp_path: Path, file: str, db: bytes | None, version: int) -> None:
    place = lmdb_walks.make(tmp_path, file, version)
    assert sum(walked(place, db, version, seed, 80).total() for seed in (1, 2)) >= 160


@pytest.mark.usefixtures("as_plain_python")
def test_damaged_files(tmp_path: Path) -> None:
    examined(tmp_path, range(20_000, 20_450, 30))


@pytest.mark.full
@pytest.mark.usefixtures("as_plain_python")
def test_many_damaged_files(tmp_path: Path) -> None:
    examined(tmp_path, range(30_000, 30_100))


def examined(folder: Path, seeds: range) -> None:
    bases = [lmdb_fuzz.Base.load(folder, name) for name in lmdb_fuzz.make_bases(folder)]
    for seed in seeds:
        base, what, damaged = lmdb_fuzz.seed_of(bases, seed)
        touched, wrong, answers = lmdb_fuzz.examine(base, damaged, os.fspath(folder / "damaged"))
        touched |= base.shape.quiet(damaged) if wrong else set()
        touched |= {"a copied page"} if what.endswith("renumbered") else set()
        assert answers
        assert not wrong or lmdb_fuzz.tolerated({"wrong": wrong, "touched": touched}), (seed, base.name, what, wrong)


@pytest.mark.full
@pytest.mark.parametrize("file", ["test_lmdb_api.py", "test_lmdb_cursor.py", "test_lmdb_walk.py"])
def test_the_whole_suite(file: str) -> None:
    """What the compiled functions must do, by plain Python."""
    words = ["-p", "plain_lmdb", "-q", "-n", "0", "-k", "not compiled_method", os.fspath(HOUSE / "tests" / file)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((os.fspath(HOUSE), os.fspath(HOUSE / "tests")))}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], capture_output=True, text=True, timeout=600, env=env
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]


# -- interrupted, threads, forks ---------------------------------------------------------------------------------------


@pytest.fixture
def meanwhile(as_plain_python: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """meanwhile(compiled function, another that it calls, what): once, `what` happens just before the other is called,
    as if a handler of signals or a destructor did it. Returns what it has done.
    """

    def arrange(function: Any, called: str, what: Callable[[], Any]) -> list[Any]:
        names = plain.interpreted(function).__globals__
        call, done = names[called], []

        def after_it(*arguments: Any) -> Any:
            if not done:
                done.append(None)
                done[0] = what()
            return call(*arguments)

        monkeypatch.setitem(names, called, after_it)
        return done

    return arrange


def test_what_interrupts_a_read_may_read(path: str, meanwhile: Callable[..., list[Any]]) -> None:
    """It reads every page, and displaces none that the interrupted call uses."""
    with opened(path) as env, env.begin() as txn:
        done = meanwhile(engine.find_in_leaf, "search_leaf", lambda: [v for _, v in txn.cursor()])
        assert txn.get(b"%08d" % 2001) == value(2001)
        assert done == [[value(i) for i in range(N)]]


def test_an_exception_in_the_middle_of_a_read_leaves_no_wrong_page(
    path: str, meanwhile: Callable[..., list[Any]]
) -> None:
    """The page was noted as read when the exception came, and its bytes were not there yet."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    with opened(path) as env, env.begin() as txn:
        assert [v for _, v in txn.cursor()] == [value(i) for i in range(N)]  # every place of the cache holds a page
        meanwhile(pages._keep, "copy_bytes", interrupt)
        with pytest.raises(KeyboardInterrupt):
            txn.get(b"%08d" % 7)
        assert not plain.busy()
        assert [txn.get(b"%08d" % i) for i in range(0, N, 7)] == [value(i) for i in range(0, N, 7)]


def test_threads_go_on_through_the_change(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the compiled functions while four threads read, a cursor each, and a fork finds all in order."""
    native.compile_all()
    use_plain_python(monkeypatch)
    faults: list[BaseException] = []
    passed = [0] * 4
    over = threading.Event()

    def work(me: int) -> None:
        try:
            while not over.is_set():
                cursor = txn.cursor()
                for i, (_, found) in enumerate(cursor):
                    assert found == value(i)
                    if i % 100 == me:
                        assert txn.get(b"%08d" % i) == found
                        passed[me] += 1
                assert i == N - 1
        except BaseException as e:
            faults.append(e)

    with opened(path) as env, env.begin() as txn:
        threads = [threading.Thread(target=work, args=(me,)) for me in range(4)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: faults or min(passed) > 2)
            child = os.fork()
            if not child:
                os._exit(txn.get(b"%08d" % 5) != value(5) or plain.busy())
            assert os.waitpid(child, 0)[1] == 0
            native.compile_now()
            before = list(passed)
            wait_for(lambda: faults or all(now > then + 40 for now, then in zip(passed, before, strict=True)))
        finally:
            over.set()
            for thread in threads:
                thread.join()
    assert not faults, faults
    assert type(ours.Transaction.get).__name__ == "method_descriptor"


def wait_for(happened: Any) -> None:
    limit = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < limit
        time.sleep(0.005)
