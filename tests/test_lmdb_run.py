"""Scripts as they are, with `import lmdb`, that pario reads for: install() and `python -m pario run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest
from launch import run_job

from pario.cli import main

HOUSE = Path(__file__).resolve().parents[1]

#: A Dataset as users write it, read in this process and by workers of every kind. No word of pario in it.
SCRIPT = '''
import multiprocessing, os, sys
import lmdb

class Records:
    """Opens late, as all the advice says."""
    def __init__(self, path):
        self.path, self.env = path, None
    def __getitem__(self, i):
        if self.env is None:
            self.env = lmdb.open(self.path, readonly=True, lock=False, readahead=False, meminit=False)
        with self.env.begin(write=False) as txn:
            return bytes(txn.get(b"%d" % i)), type(self.env).__module__

def work(job):
    records, i = job
    return records[i]

if __name__ == "__main__":
    path = sys.argv[1]
    assert __file__ == os.path.abspath(sys.argv[0]) or sys.argv[0] == __file__, (__file__, sys.argv)
    writer = lmdb.open(path, map_size=1 << 24)
    with writer.begin(write=True) as txn:
        for i in range(20):
            txn.put(b"%d" % i, b"value %d" % i)
    assert isinstance(writer, lmdb.Environment)
    writer.close()
    records = Records(path)
    here = [records[i] for i in range(20)]
    assert [v for v, _ in here] == [b"value %d" % i for i in range(20)]
    print("here", here[0][1])
    assert isinstance(records.env, lmdb.Environment)
    try:
        lmdb.open(path + "-none", readonly=True, lock=False)
    except lmdb.Error as e:
        print("error", type(e).__module__)
    for kind in sys.argv[2:]:
        with multiprocessing.get_context(kind).Pool(2) as pool:
            there = pool.map(work, [(Records(path), i) for i in range(20)])
        assert [v for v, _ in there] == [v for v, _ in here]
        print(kind, there[0][1])
'''


def run(*words: str, cwd: Path, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.fspath(HOUSE)},
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    return tmp_path


def test_run_a_script(folder: Path) -> None:
    said = run("-m", "pario", "run", "script.py", "data", "fork", "spawn", "forkserver", cwd=folder)
    assert said.split() == [
        "here", "pario.lmdb.env", "error", "pario.lmdb.errors", "fork", "pario.lmdb.env", "spawn", "pario.lmdb.env",
        "forkserver", "pario.lmdb.env",
    ]  # fmt: skip
    said = run("script.py", "data", cwd=folder)
    assert "pario" not in said


def test_run_a_module(folder: Path) -> None:
    said = run("-m", "pario", "run", "-m", "package.train", "data", "spawn", cwd=folder)
    assert said.split()[:2] == ["here", "pario.lmdb.env"]
    assert said.split()[-2:] == ["spawn", "pario.lmdb.env"]


def test_exit_status_and_errors_are_the_scripts(folder: Path) -> None:
    (folder / "fails.py").write_text("import sys\nprint(sys.argv, __name__)\nsys.exit(7)\n")
    assert "['fails.py', '-n', '3', '--help'] __main__" in run(
        "-m", "pario", "run", "fails.py", "-n", "3", "--help", cwd=folder, status=7
    )
    (folder / "raises.py").write_text("raise ValueError('mine')\n")
    said = run("-m", "pario", "run", "raises.py", cwd=folder, status=1)
    assert "ValueError: mine" in said
    assert "raises.py" in said


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["none.py"], "there is no script 'none.py'"),
        (["package"], "there is no script 'package'"),
        (["-m", "none"], "there is no module 'none' in the working directory or in this Python"),
        (["-m", "package.none"], "there is no module 'package.none'"),
        (["-m", "script.none"], "there is no module 'script.none'"),
        (["-m", "package"], "there is no module 'package.__main__'"),
    ],
)
def test_what_is_not_there_is_one_line_before_anything_starts(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    why: str,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", ["/nowhere", *sys.path[1:]])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    assert main(["run", *words]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: {why}")
    assert said.err.count("\n") == 1


@pytest.mark.full
def test_run_on_ranks(folder: Path) -> None:
    (folder / "ranks.py").write_text(
        "import sys, lmdb\nfrom mpi4py import MPI\n"
        "env = lmdb.open(sys.argv[1], readonly=True, lock=False)\n"
        "with env.begin() as txn: assert txn.get(b'7') == b'value 7'\n"
        "names = MPI.COMM_WORLD.gather(type(env).__module__)\n"
        "if names: print(len(names), set(names))\n"
    )
    with lmdb.open(os.fspath(folder / "data"), map_size=1 << 24) as env, env.begin(write=True) as txn:
        txn.put(b"7", b"value 7")
    words = [os.fspath(folder / "ranks.py"), os.fspath(folder / "data")]
    job = run_job(2, ["-m", "pario", "run", *words], limit_s=120)
    assert job.status == 0, job.output
    assert "2 {'pario.lmdb.env'}" in job.output


def test_install_serves_earlier_imports(folder: Path) -> None:
    code = (
        "import lmdb, lmdb.tool\n"
        "import pario.lmdb\n"
        "theirs = lmdb.Environment\n"
        "pario.lmdb.install(); pario.lmdb.install()\n"
        "w = lmdb.open('data', map_size=1 << 20)\n"
        "assert type(w) is theirs and not isinstance(w, pario.lmdb.Environment)\n"
        "with lmdb.Transaction(w, write=True) as t: t.put(b'a', b'b')\n"
        "r = lmdb.Environment('data', 1 << 20, True, True, lock=False)\n"
        "assert type(r) is pario.lmdb.Environment\n"
        "t = lmdb.Transaction(r); assert lmdb.Cursor(r.open_db(), t).first()\n"
        "assert isinstance(t, lmdb.Transaction) and t.get(b'a') == b'b'\n"
    )
    run("-c", code, cwd=folder)
