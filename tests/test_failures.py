"""What goes wrong in a running job: killed ranks, signals, files that change. Every case ends soon, with one clear
error on every rank that lives or with the right result, and leaves nothing behind. The measured times are in
measurements/failures.md; what needs root (stores that fail, too little memory) is in
system/test_failures_of_the_machine.py.
"""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from failing import RECORDS, Table, check, make_set, run

pytestmark = pytest.mark.side_by_side

table = Table()


def kill(number: int):
    def harm(_: int, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, number)

    return harm


# -- ranks that die (four ranks, two nodes: ranks 0 and 1 read, 2 and 3 share their nodes) -----------------------------

VICTIMS = {
    "a reading rank": [1],
    "a plain rank": [3],
    "all ranks of a node": [1, 3],
    "all ranks of rank 0's node": [0, 2],
}
PLACES = ["start-up", "mid-epoch", "close"]
KILLED = [(who, place) for who in list(VICTIMS)[:3] for place in PLACES]
KILLED += [("all ranks of rank 0's node", "mid-epoch"), ("a plain rank", "the end of close")]
#: of a job's middle, and of its beginning
QUICK = {("a reading rank", "mid-epoch"), ("all ranks of a node", "start-up")}


@pytest.mark.parametrize(
    ("who", "place"), [pytest.param(*case, marks=() if case in QUICK else pytest.mark.full) for case in KILLED]
)
def test_ranks_are_killed(tmp_path: Path, who: str, place: str) -> None:
    """kill -9, and the launcher does not notice: pario alone finds out."""
    path = make_set(tmp_path / "set")
    victims = VICTIMS[who]
    ended = run(
        path,
        tmp_path,
        place=place,
        victims=victims,
        harm=kill(signal.SIGKILL),
        sheltered=True,
        epochs=1000 if place == "mid-epoch" else 1,
    )
    living = [rank for rank in range(4) if rank not in victims]
    check(ended, dict.fromkeys(living, "DeadRankError|PeerError"), rf"is gone.*\[rank [{victims[0]}{victims[-1]}]\]")
    table.row(f"kill -9 of {who}", place, "the others raise `DeadRankError` or `PeerError`", ended, living)


@pytest.mark.full
def test_the_launcher_sees_a_rank_die(tmp_path: Path) -> None:
    """What users have: whoever is first, the job ends."""
    path = make_set(tmp_path / "set")
    ended = run(path, tmp_path, place="mid-epoch", victims=[3], harm=kill(signal.SIGKILL))
    assert ended.job.status not in (0, None), ended
    assert ended.end_s < ended.promised_s, ended
    assert ended.left == [], ended
    table.row("kill -9, seen by `mpiexec`", "mid-epoch", "`mpiexec` kills the other ranks", ended, [])


# -- signals -----------------------------------------------------------------------------------------------------------


def to_launcher(number: int):
    def harm(pid: int, _: list[int]) -> None:
        os.kill(pid, number)

    return harm


@pytest.mark.parametrize(
    ("number", "who"),
    [
        ("SIGINT", "mpiexec"),
        pytest.param("SIGTERM", "mpiexec", marks=pytest.mark.full),
        pytest.param("SIGTERM", "every rank", marks=pytest.mark.full),
    ],
)
def test_a_signal_to_all(tmp_path: Path, number: str, who: str) -> None:
    """Ctrl-C at the terminal, scancel: the job ends."""
    path = make_set(tmp_path / "set")
    send = to_launcher if who == "mpiexec" else kill
    ended = run(path, tmp_path, place="mid-epoch", victims=range(4), harm=send(getattr(signal, number)))
    assert ended.job.status not in (0, None), ended
    assert ended.end_s < ended.promised_s, ended
    assert ended.left == [], ended
    table.row(f"{number} to {who}", "mid-epoch", "all ranks end", ended, [])


def test_ctrl_c_for_one_process(tmp_path: Path) -> None:
    """KeyboardInterrupt there, and the others say whose it was."""
    path = make_set(tmp_path / "set")
    ended = run(path, tmp_path, place="mid-epoch", victims=[2], harm=kill(signal.SIGINT))
    check(ended, {2: "KeyboardInterrupt", 0: "PeerError", 1: "PeerError", 3: "PeerError"})
    assert all("KeyboardInterrupt" in error["text"] for error in ended.errors([0, 1, 3]).values()), ended
    table.row("SIGINT to one rank", "mid-epoch", "`KeyboardInterrupt` there, `PeerError` elsewhere", ended, range(4))


@pytest.mark.full
def test_ctrl_c_for_one_process_in_start_up(tmp_path: Path) -> None:
    path = make_set(tmp_path / "set")
    ended = run(path, tmp_path, place="start-up", victims=[2], harm=kill(signal.SIGINT))
    check(ended, {2: "KeyboardInterrupt", 0: "PeerError", 1: "PeerError", 3: "PeerError"})
    table.row("SIGINT to one rank", "start-up", "`KeyboardInterrupt` there, `PeerError` elsewhere", ended, range(4))


# -- errors of one rank ------------------------------------------------------------------------------------------------


def test_a_decoder_that_fails(tmp_path: Path) -> None:
    path = make_set(tmp_path / "set")
    code = """
def decode(value):
    decode.calls += 1
    if comm.rank == 3 and decode.calls == 100:
        note("harm")
        raise RuntimeError("no such picture")
    return {"n": len(value)}
decode.calls = 0
def check(batch):
    assert (batch["n"] == 5000).all()
"""
    ended = run(path, tmp_path, code=code)
    check(ended, {3: "DecodeError", 0: "PeerError", 1: "PeerError", 2: "PeerError"}, "no such picture.*record ")
    table.row(
        "exception in one rank's decoder", "mid-epoch", "`DecodeError` there, `PeerError` elsewhere", ended, range(4)
    )


# -- the file changes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["ring", "auto"])
def test_the_file_is_truncated(tmp_path: Path, recipe: str) -> None:
    path = make_set(tmp_path / "set")

    def harm(*_) -> None:
        os.truncate(f"{path}/data.mdb", 1 << 20)

    ended = run(path, tmp_path, place="mid-epoch", victims=range(4), harm=harm, recipe=recipe)
    # Whose turn it is at the storage first: one node's reading rank, or both; without the ring, any rank.
    readers = range(4) if recipe == "auto" else [0, 1]
    others = dict.fromkeys(range(4), "PeerError")
    check(ended, {**others, **dict.fromkeys(readers, "ReadError|PeerError")}, "ended early.*offset")
    assert "ReadError" in {error["kind"] for error in ended.errors(readers).values()}
    if recipe == "ring":
        what = "`ReadError` on a reading rank, `PeerError` elsewhere"
        table.row("the file is truncated", "mid-epoch", what, ended, range(4))


def test_the_file_is_replaced(tmp_path: Path) -> None:
    """Renamed over: what is open stays readable, every record is right, and rank 0 says so."""
    path = make_set(tmp_path / "set")
    other = make_set(tmp_path / "other", 10)

    def harm(*_) -> None:
        os.replace(f"{other}/data.mdb", f"{path}/data.mdb")

    ended = run(path, tmp_path, place="mid-epoch", victims=range(4), harm=harm, epochs=3, pause_s=0.01)
    assert ended.job.status == 0, ended
    assert sum(ended.of(rank, "end")[0]["records"] for rank in range(4)) == 3 * RECORDS
    assert "was replaced by another file" in ended.job.output, ended
    assert ended.left == [], ended
    table.row(
        "the file is replaced (renamed over)", "mid-epoch", "every record right, from the old file; a warning", ended
    )


def test_the_file_is_written_over(tmp_path: Path) -> None:
    """cp over it, while it is read: another LMDB, of a transaction that is none of the two that a reader allows."""
    path = make_set(tmp_path / "set")
    other = make_set(tmp_path / "other", RECORDS, commits=4)

    def harm(*_) -> None:
        shutil.copyfile(f"{other}/data.mdb", f"{path}/data.mdb")

    ended = run(path, tmp_path, place="mid-epoch", victims=range(4), harm=harm)
    kinds = "SnapshotError|ReadError|CorruptedError"
    check(ended, {**dict.fromkeys([0, 1], f"{kinds}|PeerError"), 2: "PeerError", 3: "PeerError"}, "x.lmdb/data.mdb")
    table.row(
        "the file is written over (`cp`)",
        "mid-epoch",
        "`ReadError`, `SnapshotError` or `CorruptedError` on a reading rank, `PeerError` elsewhere",
        ended,
        range(4),
    )


# -- memory ------------------------------------------------------------------------------------------------------------


def test_too_little_address_space(tmp_path: Path) -> None:
    """RLIMIT_AS, as batch systems set it: the ring is refused on all ranks."""
    path = make_set(tmp_path / "set")
    code = """
import resource
def limited(*args, **options):
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))
    note("harm")
    return Slots(*args, **options)
import pario.loader.build
Slots, pario.loader.build.Slots = pario.loader.build.Slots, limited
"""
    ended = run(path, tmp_path, code=code, batch=500, options={"slots": 60, "slot_bytes": 8 << 20})
    check(ended, dict.fromkeys(range(4), "ParioError|PeerError"), "memory")
    table.row(
        "an address space limit (RLIMIT_AS) too small for the ring",
        "start-up",
        "`ParioError` on all ranks",
        ended,
        range(4),
    )


# -- levels of thread support ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["funneled", pytest.param("serialized", marks=pytest.mark.full)])
def test_thread_levels(tmp_path: Path, level: str) -> None:
    """MPI_THREAD_MULTIPLE is not needed: with the level that the library grants, every record arrives."""
    path = make_set(tmp_path / "set")
    code = f"""
import threading
import pario.comm.agree, pario.comm.world
provided = MPI.Query_thread()
assert provided == MPI.THREAD_{level.upper()}, provided
def in_main(call):
    def called(*args, **options):
        assert threading.current_thread() is threading.main_thread(), call
        return call(*args, **options)
    return called
pario.comm.world.wait_politely = in_main(pario.comm.world.wait_politely)
for name in ("check", "raise_all", "close"):
    setattr(pario.comm.agree.Alarm, name, in_main(getattr(pario.comm.agree.Alarm, name)))
def decode(value):  # in threads of its own
    return {{"first": value[0], "n": len(value)}}
def check(batch):
    assert (batch["first"] == batch.ids % 251).all() and (batch["n"] == 5000).all()
"""
    ended = run(path, tmp_path, code=code, epochs=2, pause_s=0, rc=f'thread_level = "{level}"')
    assert ended.job.status == 0, ended
    assert sum(ended.of(rank, "end")[0]["records"] for rank in range(4)) == 2 * RECORDS
    assert ended.left == [], ended
