"""`pario files view --output`: written once, merged at the end, whole files only."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from required import skip_or_fail

from benchmarks.files_programs import write_lmdb
from pario.errors import OptionError, ParioError
from pario.files.notify import check_kernel
from pario.files.outputs import Outputs

LIMIT_S = 120

#: a rank: writes its share of 1,000 files in pieces, and one name that all ranks want
RANK = """
import sys
rank, folder = int(sys.argv[1]), sys.argv[2]
for k in range(rank, 1000, 4):
    with open(f"{folder}/{k:04d}", "wb", buffering=0) as file:
        for _ in range(4):
            file.write(b"%04d" % k * 500)
    if k == rank:
        try:
            open(f"{folder}/wanted", "x").close()
        except FileExistsError:
            pass
    if k == 402:
        print("kill me", flush=True)
        with open(f"{folder}/torn", "wb", buffering=0) as file:
            file.write(b"half")
            while True:
                pass
"""

JOB = """
import os, signal, subprocess, sys, time
words = [sys.executable, "-c", sys.argv[1]]
ranks = [subprocess.Popen([*words, str(r), sys.argv[2]], stdout=subprocess.PIPE) for r in range(4)]
ranks[2].stdout.readline()
while not (os.path.exists(sys.argv[2] + "/torn") and os.path.getsize(sys.argv[2] + "/torn") == 4):
    time.sleep(0.01)
ranks[2].send_signal(signal.SIGKILL)
assert [rank.wait(60) for rank in ranks] == [0, 0, -9, 0]
"""


@pytest.fixture(scope="module", autouse=True)
def kernel() -> None:
    try:
        check_kernel()
    except ParioError as e:
        skip_or_fail(str(e))


def under(top: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (top / "local").mkdir(exist_ok=True)
    if not (top / "set.lmdb").exists():
        write_lmdb(top / "set.lmdb", {"one": b"one\n"})
    words = [sys.executable, "-m", "pario", "files", "view", f"{top}/set.lmdb={top}/data"]
    words += ["--output", f"{top}/out", "--local", f"{top}/local", "--", *command]
    return subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)


def test_a_name_is_written_once(tmp_path: Path) -> None:
    top = tmp_path.resolve()
    (top / "out").mkdir()
    (top / "out" / "old").write_text("old\n")
    script = f"""
        cd {top}/out && pwd; echo a > x; cat x; mkdir d; echo y > d/tmp; mv d/tmp d/y; cat {top}/out/d/y old
        ls -R; cp ../data/one one; ls {top}/out/x"""
    done = under(top, "sh", "-c", script)
    out = f"{top}/out"
    assert done.stdout.split() == [out, "a", "y", "old", ".:", "d", "x", "./d:", "y", f"{out}/x"], done.stderr
    assert done.returncode == 0
    found = {str(path.relative_to(out)): path.read_text() for path in Path(out).rglob("*") if path.is_file()}
    assert found == {"old": "old\n", "x": "a\n", "d/y": "y\n", "one": "one\n"}
    assert os.listdir(top / "local") == []
    again = under(top, "sh", "-c", f"echo b > {out}/x; echo c >> {out}/old; echo new > {out}/new; : > {out}/new")
    assert again.returncode
    assert (Path(out) / "x").read_text() == "a\n"
    assert (Path(out) / "old").read_text() == "old\n"
    assert (Path(out) / "new").read_text() == "new\n"
    for name in ("x", "old", "new"):
        assert f"the name was taken: {name}" in again.stderr


@pytest.mark.full
def test_four_ranks_and_one_is_killed(tmp_path: Path) -> None:
    top = tmp_path.resolve()
    (top / "out").mkdir()
    done = under(top, sys.executable, "-c", JOB, RANK, f"{top}/out")
    assert done.returncode == 1, done.stderr
    merged = {path.name: path.read_bytes() for path in (top / "out").iterdir()}
    whole = {f"{k:04d}": b"%04d" % k * 2000 for k in range(1000) if k % 4 != 2 or k <= 402}
    assert merged == {**whole, "wanted": b""}
    assert "not merged, because the process that wrote it was killed: torn" in done.stderr
    assert "not merged, because the name was taken: wanted" in done.stderr
    (kept,) = (top / "local").iterdir()
    assert f"what was not merged lies in {kept}" in done.stderr
    assert (kept / "torn").read_bytes() == b"half"


def test_a_name_that_was_removed_says_nothing_of_the_next_file(tmp_path: Path) -> None:
    """The first one was whole; the second one's writer is killed."""
    outputs = Outputs(str(tmp_path / "there"), str(tmp_path))
    for way in ("anew", "renamed"):
        path = Path(outputs.here(way))
        outputs.begin(way, 1)
        path.write_bytes(b"whole")
        outputs.look(1, ends=True)
        path.unlink()
        made = way if way == "anew" else "draft"
        outputs.begin(made, 2)
        Path(outputs.here(made)).write_bytes(b"ha")
        if made != way:
            outputs.rename(made, way)
    found = outputs.merge()
    assert (found.merged, sorted(found.broken)) == ([], ["anew", "renamed"])


def test_what_nobody_has_got_is_not_there(tmp_path: Path) -> None:
    outputs = Outputs(str(tmp_path / "there"), str(tmp_path))
    outputs.begin("x", 1)
    Path(outputs.here("x")).touch()
    outputs.forget("x")
    assert not outputs.exists("x")
    assert outputs.merge().broken == []


def test_two_nodes_want_one_name(tmp_path: Path) -> None:
    """The first one that merges has it; the other one's stays where it was written."""
    (tmp_path / "out").mkdir()
    nodes = [Outputs(str(tmp_path / "out"), str(tmp_path)) for _ in range(2)]
    for k, node in enumerate(nodes):
        for name in ("same", f"own{k}"):
            Path(node.here(name)).write_text(str(k))
            node.begin(name, 7)
    with open(nodes[1].here("open"), "w") as file:
        nodes[1].begin("open", 7)
        for node in nodes:
            node.look(7)
        first, second = (node.merge() for node in nodes)
        assert file
    assert (sorted(first.merged), first.conflicts, first.broken, first.kept) == (["own0", "same"], [], [], "")
    assert (second.merged, second.conflicts, second.broken) == (["own1"], ["same"], ["open"])
    assert Path(second.kept, "same").read_text() == "1"
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {
        "same": "0",
        "own0": "0",
        "own1": "1",
    }
    with pytest.raises(OptionError, match="cannot be the folder of the outputs"):
        Outputs(str(tmp_path / "no" / "such"))
    with pytest.raises(OptionError, match=r"no outputs can be kept in .*none': No such file.*--local"):
        Outputs(str(tmp_path / "out"), str(tmp_path / "none"))
