"""Where compiled kernels are kept."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from pario.kernels import cache, jit, permute
from pario.kernels.private import PrivateDirectory


@pytest.mark.parametrize("name", ["PARIO_NUMBA_CACHE", "NUMBA_CACHE_DIR"])
def test_a_chosen_directory_holds_one_state_of_the_sources(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Numba does not see that a kernel inlined from another file has changed: each state has a folder of its own."""
    monkeypatch.delenv("PARIO_NUMBA_CACHE", raising=False)
    monkeypatch.setenv(name, str(tmp_path))
    before = jit.cache_directory()
    assert os.path.dirname(before) == str(tmp_path)
    original = os.scandir

    class Newer:
        """A folder one of whose files was edited."""

        def __init__(self, folder: str) -> None:
            self.folder = folder

        def __enter__(self) -> list[object]:
            (tmp_path / "edited.py").touch()
            with original(self.folder) as entries, original(tmp_path) as more:
                return [*entries, *(entry for entry in more if entry.is_file())]

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(jit.os, "scandir", Newer)
    assert jit.cache_directory() != before


#: Compiles a kernel and those below it, and tells what it had to compile itself.
USER = """
import gc, json, os, signal, sys, time
import numpy as np
from numba.core.dispatcher import Dispatcher
from pario.kernels import cache, jit, permute
if sys.argv[2] == "dies":
    cache.KernelCache.save_overload = lambda *_: (time.sleep(1), os.kill(os.getpid(), signal.SIGKILL))
if sys.argv[2] == "comes later":
    there = lambda: os.listdir(jit.cache_directory()) if os.path.isdir(jit.cache_directory()) else []
    while not any(name.endswith(".lock") for name in there()):
        time.sleep(0.01)
while time.time() < float(sys.argv[1]):  # all at once
    time.sleep(0.001)
out = np.empty(1000, np.int64)
permute.permute(permute.stream_key(1, 2, 3), out)
missed = {}
for one in gc.get_objects():
    if isinstance(one, Dispatcher) and one.py_func.__module__.startswith("pario"):
        for signature, count in one.stats.cache_misses.items():
            missed[f"{one.py_func.__name__}{signature}"] = count
print(json.dumps([missed, sorted(out.tolist()) == list(range(1000))]))
"""


def users(cache: Path, *ways: str) -> list[tuple[int, str]]:
    """So many processes at once: exit status and output of each."""
    start = str(time.time() + 2)
    env = {**os.environ, "PARIO_NUMBA_CACHE": str(cache)}
    started = [
        subprocess.Popen([sys.executable, "-c", USER, start, way], env=env, stdout=subprocess.PIPE, text=True)
        for way in ways
    ]
    try:
        return [(one.wait(), out) for one in started for out in [one.communicate(timeout=120)[0]]]
    finally:
        for one in started:
            one.kill()


@pytest.mark.full
def test_processes_that_come_at_once_compile_once(tmp_path: Path) -> None:
    ended = users(tmp_path, "lives", "lives", "lives")
    assert [status for status, _ in ended] == [0, 0, 0]
    total: Counter[str] = Counter()
    for _, said in ended:
        missed, right = json.loads(said)
        assert right
        total.update(missed)
    assert len(total) > 3
    assert set(total.values()) == {1}, total
    assert len(list(tmp_path.rglob("*.nbc"))) == len(total)


@pytest.mark.full
def test_one_that_dies_while_it_compiles_keeps_nobody(tmp_path: Path) -> None:
    (dead, _), (status, said) = users(tmp_path, "dies", "comes later")
    assert dead == -signal.SIGKILL
    assert status == 0
    assert json.loads(said)[1]


def test_one_that_sleeps_while_it_compiles_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = PrivateDirectory(str(tmp_path))
    held = cache._locked(folder, "lock")
    assert held >= 0
    monkeypatch.setattr(cache, "_PATIENCE_S", 0.1)
    assert cache._locked(folder, "lock") == -1
    os.close(held)
    again = cache._locked(folder, "lock")
    assert again >= 0
    os.close(again)


def twice(x):
    return 2 * x


def compiled(folder: Path) -> tuple[int, bool]:
    """(twice(21), whether it had to be compiled), as a new process would do it with the cache in `folder`."""
    made = numba.njit(twice)
    made._cache = cache.KernelCache(twice, PrivateDirectory(str(folder)))
    return made(21), bool(made.stats.cache_misses)


def test_what_is_kept_is_inlined_by_what_is_compiled_later(tmp_path: Path) -> None:
    compiled(tmp_path)
    kept = numba.njit(twice)
    kept._cache = cache.KernelCache(twice, PrivateDirectory(str(tmp_path)))
    assert kept(21) == 42
    assert not kept.stats.cache_misses
    assert numba.njit(lambda x: kept(x) + 1)(21) == 43


def test_what_is_kept_is_loaded(tmp_path: Path) -> None:
    before = cache.KernelCache.spent_s
    assert compiled(tmp_path) == (42, True)
    spent = cache.KernelCache.spent_s
    assert spent > before
    assert compiled(tmp_path) == (42, False)
    assert cache.KernelCache.spent_s == spent
    (kept,) = tmp_path.glob("*.nbc")
    whole = kept.read_bytes()
    for cut in (0, 10, 40, len(whole) - 1):  # a full disk, a crash
        kept.write_bytes(whole[:cut])
        assert compiled(tmp_path) == (42, True)
        assert compiled(tmp_path) == (42, False)


#: What only compiling needs.
COMPILER = ("numba.np.arrayobj", "numba.cpython.unicode", "scipy.linalg")
FRESH = f"""
import json, sys
import numpy as np
from pario.kernels.permute import permute, stream_key
out = np.empty(100, np.int64)
permute(stream_key(1, 2, 3), out)
loaded = [name for name in {COMPILER} if name in sys.modules]
print(json.dumps([sorted(out.tolist()) == list(range(100)), loaded]))
"""
#: Numba's own functions are inlined into this one (slices, `min`); it allocates, and it may raise.
KERNEL = f"""
import json, sys
import numpy as np
from pario.kernels.jit import kernel

@kernel
def ends(values, count):
    if count > len(values):
        raise ValueError("too few values")
    both = np.empty(2 * min(count, len(values)), values.dtype)
    both[:count], both[count:] = values[:count], values[-count:]
    return both

if __name__ == "__main__":
    own = ends(np.arange(10), 3)
    try:
        ends(np.arange(10), 11)
    except ValueError as e:
        print(json.dumps([own.tolist(), str(e), [name for name in {COMPILER} if name in sys.modules]]))
"""


def said(*words: str, **env: str) -> list[Any]:
    output = subprocess.check_output([sys.executable, *words], env={**os.environ, **env}, timeout=120)
    return list(json.loads(output))


def test_a_kept_kernel_needs_no_compiler() -> None:
    """Numba's implementations, and scipy with them, are half of a start."""
    permute.permute(permute.stream_key(1, 2, 3), np.empty(100, np.int64))  # is kept now
    assert said("-c", FRESH) == [True, []]


@pytest.mark.full
def test_a_kept_kernel_allocates_and_raises(tmp_path: Path) -> None:
    script = tmp_path / "users_kernel.py"
    script.write_text(KERNEL)
    first, second = (said(str(script), PARIO_NUMBA_CACHE=str(tmp_path / "cache")) for _ in range(2))
    assert first[:2] == second[:2] == [[0, 1, 2, 7, 8, 9], "too few values"]
    assert (first[2], second[2]) == ([*COMPILER], [])


class Payload:
    def __reduce__(self):
        return (os.mkdir, ("executed",))


def test_nothing_foreign_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A well-formed entry that somebody else could have written is compiled anew, and replaced where it may be."""
    monkeypatch.chdir(tmp_path)
    kernels = tmp_path / "kernels"
    compiled(kernels)
    (kept,) = kernels.glob("*.nbc")
    pickled = pickle.dumps(Payload())
    kept.write_bytes(cache.hashlib.sha256(pickled).digest() + pickled)
    kept.chmod(0o666)
    assert compiled(kernels) == (42, True)
    assert kept.stat().st_mode & 0o777 == 0o600  # ours now
    assert compiled(kernels) == (42, False)
    kept.write_bytes(cache.hashlib.sha256(pickled).digest() + pickled)
    kernels.chmod(0o777)
    assert compiled(kernels) == (42, True)
    assert not (tmp_path / "executed").exists()
    kernels.chmod(0o700)
    with pytest.raises(TypeError):  # it would have been executed: the payload works
        compiled(kernels)
    assert (tmp_path / "executed").exists()


def test_without_a_safe_place_kernels_compile_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    assert compiled(tmp_path) == (42, True)
    assert os.listdir(tmp_path) == []
    monkeypatch.setattr(jit, "_FOLDER", PrivateDirectory(str(tmp_path)))
    for rank, lines in ((1, 0), (0, 1)):
        monkeypatch.setattr(jit, "_told", False)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "pario"):
            for _ in range(3):
                jit.tell_cache_problem(rank)
            jit.tell_cache_problem()
        assert len(caplog.records) == lines
    assert f"others may write into {tmp_path} (mode 0777)" in caplog.text
    assert "PARIO_NUMBA_CACHE" in caplog.text


def test_the_first_run_of_a_machine_is_told_that_it_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(jit, "_FOLDER", PrivateDirectory(str(tmp_path / "kernels")))
    for rank, kept, lines in ((1, 0, 0), (0, 0, 1), (0, 10, 0)):
        (tmp_path / "kernels").mkdir(exist_ok=True, mode=0o700)
        for k in range(kept):
            (tmp_path / "kernels" / f"{k}.nbc").touch()
        monkeypatch.setattr(jit, "_told", False)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "pario"):
            jit.tell_cache_problem(rank)
            jit.tell_cache_problem(rank)
        assert [record.message for record in caplog.records] == [
            "pario's kernels are compiled, once on this machine: up to a minute"
        ] * lines


@pytest.mark.parametrize("where", ["~/kernels", "kernels"])
def test_a_chosen_directory_is_absolute(where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PARIO_NUMBA_CACHE", where)
    assert os.path.dirname(jit.cache_directory()) == str(tmp_path / "kernels")
