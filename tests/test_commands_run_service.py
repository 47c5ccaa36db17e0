"""Scripts under `pario run` with PARIO_TIERS. The oracle is what was written, a file that is overwritten where the copy
has it, and the processes that the system lists."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest

import pario
import pario.lmdb
from pario.cli import main
from pario.commands import run_service
from pario.errors import OptionError
from pario.kernels.jit import cache_directory
from pario.kernels.private import PrivateDirectory
from pario.lmdb import served
from pario.tiers import asking
from pario.tiers.asking import LOCK, STARTS
from pario.tiers.disk_files import is_used, lock_use, root_of, used_lock

HOUSE = Path(__file__).resolve().parents[1]
N = 200

#: What all scripts here begin with.
BEGIN = """
import os, sys, time
import numpy as np
import lmdb

def value(i):
    return np.random.default_rng(i).bytes(100 + (i * 611) % 20000)

def right(env):
    with env.begin() as txn:
        return all(txn.get(b"%06d" % i) == value(i) for i in range(200))

def say(*words):
    print(*words, flush=True)

env = lmdb.open(sys.argv[1], readonly=True, lock=False)
say(os.environ.get("PARIO_SERVICE"))
"""
#: Waits until the copy is whole, and lets nobody read the file from then on.
COPIED = """
tier = env._store.copy
end = time.monotonic() + 20
while not all(tier.has(chunk) for chunk in range(tier.grid.chunks)):
    assert time.monotonic() < end
    time.sleep(0.01)
file = os.path.join(sys.argv[1], "data.mdb")
with open(file, "r+b") as data:
    data.seek(8192)
    data.write(bytes(os.path.getsize(file) - 8192))
"""


def value(i: int) -> bytes:
    return np.random.default_rng(i).bytes(100 + (i * 611) % 20000)


@pytest.fixture
def path(tmp_path: Path) -> str:
    with lmdb.open(os.fspath(tmp_path / "x.lmdb"), map_size=1 << 26) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%06d" % i, value(i))
    return os.fspath(tmp_path / "x.lmdb")


Started = subprocess.Popen[str]
Start = Callable[..., Started]


@pytest.fixture
def start(tmp_path: Path, path: str) -> Iterator[Start]:
    """Starts a script under `pario run`, with tmp_path for temporary files."""
    started: list[Started] = []

    def begin(text: str, before: str = "", **environment: str) -> Started:
        script = tmp_path / "script.py"
        script.write_text(BEGIN + text)
        variables = {**os.environ, "PYTHONPATH": os.fspath(HOUSE), "TMPDIR": os.fspath(tmp_path)}
        variables.pop("PARIO_SERVICE", None)
        variables["PARIO_NUMBA_CACHE"] = os.path.dirname(cache_directory())
        program = f"{before}\nimport sys\nfrom pario.cli import main\nsys.exit(main())"
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", program, "run", os.fspath(script), path],
                env={**variables, "PARIO_TIERS": "memory:64MiB", **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return started[-1]

    yield begin
    for each in started:
        each.kill()
        each.communicate()
    end = time.monotonic() + 20
    while processes(tmp_path):
        assert time.monotonic() < end, "processes are left"
        time.sleep(0.01)


def processes(folder: Path) -> set[int]:
    """Those that `start` has started with this folder, and their services."""
    found = set()
    for each in Path("/proc").glob("[0-9]*"):
        try:
            if f"{folder}/script.py".encode() in (each / "cmdline").read_bytes().split(b"\0"):
                found.add(int(each.name))
        except OSError:
            pass
    return found


def line(script: Started) -> str:
    assert script.stdout is not None
    return script.stdout.readline().strip()


def wait_for_the_end(lock: int) -> None:
    """Of the service that holds this lock file."""
    over = threading.Thread(target=lock_use, args=(lock,), kwargs={"alone": True, "byte": STARTS, "wait": True})
    over.daemon = True
    over.start()
    over.join(20)
    assert not over.is_alive(), "the service goes on"


def ended(script: subprocess.Popen[str]) -> tuple[str, list[str]]:
    """What it still said, and its complaints."""
    said, errors = script.communicate(timeout=60)
    return said, complaints(errors)


def complaints(errors: str) -> list[str]:
    """Lines of stderr; that kernels are compiled, on the first run, is none."""
    return [line for line in errors.splitlines() if "kernels are compiled" not in line]


def lock_of(folder: str) -> int:
    return PrivateDirectory(root_of(folder)).open_file(LOCK, make=False)


@pytest.mark.full
def test_workers_share_the_copy(start: Start, tmp_path: Path) -> None:
    """Nothing is read from the file any more."""
    fork = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
    say(*pool.map(right, [None] * 2))
"""
    text = "assert right(env)" + COPIED + fork.replace("right, [None]", "by_workers, [None]")
    text = "def by_workers(_):\n    return right(env)\n" + text
    script = start(text)
    said, errors = script.communicate(timeout=60)
    assert script.returncode == 0, errors
    folder, found = said.splitlines()
    assert found == "True True"
    assert folder.startswith(os.fspath(tmp_path / f"pario-run-{os.geteuid()}-"))
    assert complaints(errors) == []
    end = time.monotonic() + 20
    while os.path.exists(folder):  # the service ends after the script
        assert time.monotonic() < end
        time.sleep(0.01)


def test_scripts_at_the_same_time_have_one_service(start: Start, tmp_path: Path) -> None:
    """It ends with the last of them, whoever has started it."""
    scripts = [start("sys.stdin.read()\nsay(right(env))") for _ in range(2)]
    folders = {line(script) for script in scripts}
    assert len(folders) == 1
    (folder,) = folders
    (service,) = processes(tmp_path) - {script.pid for script in scripts}
    lock = lock_of(folder)
    for script in scripts:
        assert is_used(lock, byte=STARTS)
        assert processes(tmp_path) >= {service}
        assert ended(script) == ("True\n", [])
        assert script.returncode == 0
    wait_for_the_end(lock)
    os.close(lock)
    assert not os.path.exists(folder)


@pytest.mark.full
def test_a_script_that_is_killed_takes_its_service_with_it(start: Start) -> None:
    """Also if it leaves a process behind, which has forgotten the service but reads on."""
    script = start("if os.fork():\n    time.sleep(60)\nsay('forked')\nsys.stdin.read()\nsay(right(env))")
    folder = line(script)
    assert line(script) == "forked"
    lock = lock_of(folder)
    assert is_used(lock, byte=0)
    script.kill()
    script.wait()
    wait_for_the_end(lock)
    os.close(lock)
    assert not os.path.exists(folder)
    assert ended(script) == ("True\n", [])


@pytest.mark.full
def test_a_service_that_is_killed(start: Start, tmp_path: Path) -> None:
    """The script goes on, and the next one starts another in the same folder."""
    script = start("sys.stdin.readline()\nsay(right(env))\nsys.stdin.read()")
    folder = line(script)
    (service,) = processes(tmp_path) - {script.pid}
    lock = lock_of(folder)
    os.kill(service, signal.SIGKILL)
    wait_for_the_end(lock)
    os.close(lock)
    assert script.stdin is not None
    script.stdin.write("\n")
    script.stdin.flush()
    assert line(script) == "True"
    second = start("say(env._store._copy is not None)")
    assert ended(second) == (f"{folder}\nTrue\n", [])
    assert script.communicate(timeout=60)[1] == ""


def test_a_service_that_does_not_start_is_not_waited_for(start: Start) -> None:
    before = """
from pario.dataset.host import Host
def refuse(*_):
    raise OSError(28, "no room")
Host._start = refuse
from pario.tiers import asking
asking.START_S = 300.0
"""
    script = start("say(right(env))", before)
    said, errors = script.communicate(timeout=60)
    assert script.returncode == 0
    assert said.split()[1] == "True"
    assert "error: the service of the node does not start: [Errno 28] no room" in errors
    assert "the service did not start" in errors


def test_an_unsafe_folder_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else could have made it."""
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))
    monkeypatch.delenv("PARIO_SERVICE", raising=False)
    monkeypatch.setattr(run_service, "_start", lambda *_: pytest.fail("a service is started"))
    folder = Path(run_service._folder([pario.Tier("memory")]))
    assert folder.parent == tmp_path
    folder.mkdir()
    folder.chmod(0o777)
    run_service.use_own_service([pario.Tier("memory")])
    assert "the script has no service of its node" in caplog.text
    assert "others may write" in caplog.text
    assert "PARIO_SERVICE" not in os.environ


def test_another_user_has_taken_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All scripts agree on another folder, which he cannot foretell."""
    monkeypatch.setattr(tempfile, "tempdir", os.fspath(tmp_path))
    taken = run_service._folder([pario.Tier("memory")])
    os.mkdir(taken)
    if os.geteuid():
        monkeypatch.setattr("pario.commands.run_service.os.lstat", lambda path: os.stat("/"))
    else:
        os.chown(taken, 12345, 12345)
        os.mkdir(taken + "-")
        os.chown(taken + "-", 12345, 12345)
    folder = run_service._folder([pario.Tier("memory")])
    assert os.path.dirname(folder) == os.path.dirname(taken)
    assert folder not in (taken, taken + "-")
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert run_service._folder([pario.Tier("memory")]) == folder


def test_tiers_that_mean_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "script.py").write_text("raise ValueError('it has started')")
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.delenv("PARIO_SERVICE", raising=False)
    monkeypatch.setenv("PARIO_TIERS", "memory:lots")
    with pytest.raises(OptionError, match="PARIO_TIERS='memory:lots': the quota of tier 'memory' is no size"):
        main(["run", os.fspath(tmp_path / "script.py")])


def test_who_needs_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARIO_SERVICE", raising=False)
    monkeypatch.delenv("PARIO_TIERS", raising=False)
    assert run_service.script_tiers() == ()
    monkeypatch.setenv("PARIO_TIERS", "")
    assert run_service.script_tiers() == ()
    monkeypatch.setenv("PARIO_TIERS", "memory:64MiB")
    assert run_service.script_tiers() == (pario.Tier("memory", "64MiB"),)
    for service in ("/anywhere", ""):
        monkeypatch.setenv("PARIO_SERVICE", service)
        assert run_service.script_tiers() == ()


def test_a_folder_for_each_set_of_tiers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HERE", os.fspath(tmp_path))
    tier = pario.Tier("memory", "64 MiB")
    disk, same = pario.Tier(os.fspath(tmp_path), "1 GiB"), pario.Tier("$HERE", 1 << 30)
    folders = [run_service._folder(tiers) for tiers in ([tier], [tier, disk], [tier, same], [disk])]
    assert folders[1] == folders[2]
    assert len(set(folders)) == 3


def test_who_imports_the_drop_in_is_told_of_services(
    path: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PARIO_TIERS", "memory:64MiB")
    served._tell_how.cache_clear()
    caplog.set_level("INFO", "pario")
    for service in ("", None, None):
        if service is None:
            monkeypatch.delenv("PARIO_SERVICE", raising=False)
        else:
            monkeypatch.setenv("PARIO_SERVICE", service)
        pario.lmdb.open(path, readonly=True, lock=False).close()
        assert len(caplog.records) == (service is None)
    assert "python -m pario run" in caplog.text
    assert caplog.records[0].levelname == "INFO"


def test_the_wait_for_a_service_that_its_users_start(tmp_path: Path) -> None:
    directory = PrivateDirectory(os.fspath(tmp_path / "new"))
    with pytest.raises(FileNotFoundError, match="no service runs there"):
        asking.find_servers(directory, 0.0)
    assert not (tmp_path / "new").exists()
    lock = used_lock(directory, LOCK)
    with pytest.raises(FileNotFoundError, match="did not start, or has died"):
        asking.find_servers(directory, 300.0)
    start = directory.open_file(LOCK)
    assert lock_use(start, alone=True, byte=STARTS)
    with pytest.raises(FileNotFoundError, match=r"waited 0.2 s"):
        asking.find_servers(directory, 0.2)
    os.close(start)
    os.close(lock)
