"""Ranks that meet without MPI. The oracles are what was written, read back by py-lmdb, the same script under mpiexec,
and the clock: 10 s.

All that the tests of MPI (test_mpi_*.py) say of World, Loader and the rest is tried without MPI, too: test_mpi.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from launch import Job, left_segments, run_job, segments
from pace import Pace

from pario.comm import star
from pario.comm.hub import Hub, Say
from pario.comm.launcher import announced, job_name, launched_rank, own_addresses, rank_and_size
from pario.comm.messages import wait_politely
from pario.errors import LauncherError, PeerError
from pario.machine import boot
from pario.wire.client import Address, reached
from pario.wire.frames import Link

ROOT, HERE = Path(__file__).parents[1], Path(__file__).parent
PROMISED_S = 10.0
N = 83

#: mpi4py cannot be imported, although a stand-in for it is on the path
WITHOUT = "import sys; sys.modules['mpi4py'] = None\n"

#: Records of 100 bytes to 6 KB through the node's ring, as from a parallel file system; one line per rank.
TRAIN = """
import hashlib, json, os, signal, sys, time
import pario
from pario.comm.world import get_world
path, state, stop, dies = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
options = pario.Options(slot_bytes=64 << 10, slots=3, block_bytes=64 << 10)
seen, left = [], None
def say(**words):
    os.write(1, (json.dumps(words) + "\\n").encode())
world = get_world()
try:
    with pario.Loader(path, 5, recipe="ring", options=options, seed=3, shuffle="global", comm=world) as loader:
        if state:
            loader.load_state_dict(state)
        for batch in loader:
            if world.rank == dies and batch.step == 2:
                say(dies_at=time.monotonic())
                os.kill(os.getpid(), signal.SIGKILL)
            ends = batch["offsets"].tolist()
            data = [hashlib.sha1(batch["data"][a:b]).hexdigest() for a, b in zip(ends, ends[1:])]
            seen.append([batch.step, batch.ids.tolist(), data])
            if batch.step == stop:
                left = loader.state_dict()
                break
except pario.errors.RankError as error:
    say(rank=world.rank, error=f"{type(error).__name__}: {error}", at=time.monotonic())
    raise
say(rank=world.rank, size=world.size, node=world.node, nodes=world.nodes, node_ranks=world.node_ranks, seen=seen,
    left=left, mpi=sys.modules.get("mpi4py") is not None)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = str(tmp_path_factory.mktemp("star") / "x.lmdb")
    with lmdb.open(made, map_size=1 << 24) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%06d" % i, np.random.default_rng(i).bytes(100 + i * 70))
    return made


def train(
    path: str, ranks: int = 3, nodes: int = 2, *, state: Any = None, stop: int = -1, dies: int = -1, mpi: bool = False
) -> tuple[Job, list[dict[str, Any]]]:
    """The job, and what its ranks said, in their order."""
    argv = ["-c", TRAIN if mpi else WITHOUT + TRAIN, path, json.dumps(state), str(stop), str(dies)]
    env = {"PYTHONPATH": str(ROOT), "MPIR_CVAR_NUM_CLIQUES": str(nodes)}
    before = segments()
    done = run_job(ranks, argv, limit_s=90, env=env, launcher=None if mpi else str(HERE / "start_ranks.py"))
    assert left_segments(before) == set(), done.output
    said = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    return done, sorted(said, key=lambda words: words.get("rank", -1))


def check_epoch(path: str, said: list[dict[str, Any]]) -> None:
    """Every record once, with its bytes."""
    with lmdb.open(path, readonly=True, lock=False) as env, env.begin() as txn:
        expected = {i: hashlib.sha1(value).hexdigest() for i, (_, value) in enumerate(txn.cursor())}
    seen = [pair for rank in said for _, ids, data in rank["seen"] for pair in zip(ids, data, strict=True)]
    assert len(seen) == N
    assert dict(seen) == expected


def check_death(done: Job, said: list[dict[str, Any]], dies: int, ranks: int = 3) -> None:
    """All others raised it in time."""
    died = next(words["dies_at"] for words in said if "dies_at" in words)
    errors = [words for words in said if "error" in words]
    assert [words["rank"] for words in errors] == [rank for rank in range(ranks) if rank != dies], done.output
    for words in errors:
        assert "DeadRankError" in words["error"], done.output
        assert f"[rank {dies}]" in words["error"], done.output
        assert words["at"] - died < PROMISED_S * done.slowness
    assert done.status


def test_a_loader_where_no_mpi4py_can_be_imported(path: str) -> None:
    done, said = train(path)
    assert done.status == 0, done.output
    assert [(words["rank"], words["size"], words["node"], words["node_ranks"]) for words in said] == [
        (0, 3, 0, [0, 2]),
        (1, 3, 1, [1]),
        (2, 3, 0, [0, 2]),
    ]
    assert not any(words["mpi"] for words in said)
    check_epoch(path, said)


@pytest.mark.full
@pytest.mark.parametrize("dies", [0, 1, 2])
def test_a_killed_rank(path: str, dies: int) -> None:
    check_death(*train(path, dies=dies), dies)


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "nodes"), [(2, 1), (3, 2), (5, 3)])
def test_order_and_bytes_are_those_of_a_job_of_mpi(path: str, ranks: int, nodes: int) -> None:
    """Also after a state that the other one has left in mid-epoch."""
    seen = {}
    for mpi in (False, True):
        done, whole = train(path, ranks, nodes, mpi=mpi)
        assert done.status == 0, done.output
        check_epoch(path, whole)
        done, first = train(path, ranks, nodes, stop=1, mpi=mpi)
        assert done.status == 0, done.output
        done, rest = train(path, ranks, nodes, state=first[0]["left"], mpi=not mpi)
        assert done.status == 0, done.output
        seen[mpi] = [[step[1:] for step in words["seen"]] for words in whole]
        parts = zip(first, rest, strict=True)
        assert [[step[1:] for part in both for step in part["seen"]] for both in parts] == seen[mpi]
    assert seen[False] == seen[True]


# -- how the ranks find each other -----------------------------------------------------------------------------------

LAUNCHED = ("PMI_", "PMIX_", "OMPI_", "PALS_", "SLURM", "JSM_", "MV2_", "HYDI_", "TORCHELASTIC")
TORCH = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node7", "MASTER_PORT": "29500", "LOCAL_WORLD_SIZE": "2"}
SLURM = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "12"} | {
    "SLURM_STEP_ID": "3", "SLURM_STEP_NODELIST": "gpu[07-09],login", "SLURM_STEP_NUM_NODES": "2",
}  # fmt: skip


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """env(variables): these, and none of a launcher."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (*os.environ, *TORCH, "PARIO_RENDEZVOUS", "PARIO_SECRET_FILE", "PARIO_JOB", "PARIO_NODE"):
        if name.startswith(LAUNCHED) or name in TORCH or name.startswith("PARIO_"):
            monkeypatch.delenv(name, raising=False)

    def put(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, None),
        (TORCH, (1, 4, False, "", 0)),
        (TORCH | {"LOCAL_WORLD_SIZE": "4"}, (1, 4, True, "", 0)),
        (TORCH | {"MASTER_ADDR": "localhost"}, (1, 4, True, "", 0)),
        (TORCH | {"PARIO_RENDEZVOUS": "node8:777"}, (1, 4, False, "node8", 777)),
        (TORCH | {"PARIO_RENDEZVOUS": "/shared/folder"}, (1, 4, False, "", 0)),
        ({"RANK": "1", "WORLD_SIZE": "4"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4", "PARIO_RENDEZVOUS": "h:1"}, (1, 4, False, "h", 1)),
        (TORCH | {"WORLD_SIZE": "1", "RANK": "0"}, None),
        (TORCH | {"PMI_SIZE": "4", "PMI_RANK": "1"}, None),
        (TORCH | {"PMI_SIZE": "4", "PMI_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, (1, 4, False, "", 0)),
        (SLURM, (1, 4, False, "", 0)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, (1, 4, True, "", 0)),
        (SLURM | {"PMI_SIZE": "4", "PMI_RANK": "1"}, None),
        (SLURM | {"PMIX_RANK": "1"}, None),
        ({name: SLURM[name] for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID")}, None),  # a batch script
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "PARIO_RENDEZVOUS": "h:1"}, (1, 4, False, "h", 1)),
    ],
)
def test_what_the_environment_announces(env: Any, variables: dict[str, str], found: Any) -> None:
    env(variables)
    job = announced()
    if found is None:
        assert job is None
        return
    assert job is not None
    assert (job.rank, job.size, job.near, job.host, job.port) == found
    assert bool(job.folder)
    assert launched_rank() == 1
    assert rank_and_size() == (1, 4)


def test_the_first_machine_of_those_that_have_a_secret(env: Any, tmp_path: Path) -> None:
    env(SLURM | {"PARIO_SECRET_FILE": "/secret"})
    job = announced()
    assert job is not None
    assert (job.host, job.secret, job.folder) == ("gpu07", "/secret", "")
    assert 20_000 <= job.port < 30_000
    env({"SLURM_STEP_ID": "4"})
    other = announced()
    assert other is not None
    assert (other.name, other.port) != (job.name, job.port)


def test_ranks_have_one_name_for_their_job(env: Any) -> None:
    names = set()
    for rank in range(4):
        env(TORCH | {"RANK": str(rank)})
        names.add(job_name()[0])
    assert len(names) == 1
    env({"MASTER_PORT": "29501"})
    assert job_name()[0] not in names


def test_a_meeting_place_that_is_none(env: Any) -> None:
    for wrong in ("node8", "node8:", ":7", "node8:x", "node8:70000"):
        env(TORCH | {"PARIO_RENDEZVOUS": wrong})
        with pytest.raises(LauncherError, match="neither HOST:PORT nor the path of a folder"):
            announced()


MEETS = """
import os, sys
import pario.comm.star as star, pario.errors
if sys.argv[1] == "far":
    star.boot = lambda: f"another machine {os.environ['RANK']}"  # no rank is on that of rank 0
star._COME_S = float(sys.argv[2])
from pario.comm.world import get_world
try:
    world = get_world()
    print("met", world.rank, world.nodes, world.allreduce_sum(world.rank), flush=True)
    world.close()
except pario.errors.RankError as error:
    print("refused", error, flush=True)
"""


def meet(tmp_path: Path, where: str, come_s: float, *ranks: dict[str, str], program: str = MEETS) -> list[str]:
    """What each rank of a job of its own says. The first one's is rank 0."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}
    base |= TORCH | {"WORLD_SIZE": str(len(ranks)), "LOCAL_WORLD_SIZE": "1", "MASTER_PORT": str(os.getpid())}
    base |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WITHOUT + program, where, str(come_s)],
            env=base | {"RANK": str(rank)} | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, more in enumerate(ranks)
    ]
    try:
        return [process.communicate(timeout=60)[0] for process in started]
    finally:
        for process in started:
            process.kill()


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_machines_that_share_a_folder(tmp_path: Path) -> None:
    """It holds the address and the secret while the ranks come, for this user alone."""
    said = meet(tmp_path, "far", 60, {}, {})
    assert [re.findall(r"met (\d) (\d) (\d)", text) for text in said] == [[("0", "2", "1")], [("1", "2", "1")]], said
    assert os.listdir(tmp_path / "cache" / "pario") == []
    assert os.stat(tmp_path / "cache" / "pario").st_mode & 0o077 == 0


@pytest.mark.full
def test_machines_that_share_nothing(tmp_path: Path) -> None:
    """But a secret that was brought to each of them; one with another secret stays outside."""
    for number in range(3):
        file = tmp_path / f"secret{number}"
        file.write_bytes(b"a secret of the job" if number < 2 else b"a secret of another job")
        file.chmod(0o600)
    (address,) = own_addresses() or pytest.skip("there is no network")
    for place in ({"PARIO_RENDEZVOUS": f"{address}:{port()}"}, {"MASTER_ADDR": address}):
        for last in (1, 2):
            secrets = [place | {"PARIO_SECRET_FILE": str(tmp_path / f"secret{number}")} for number in (0, last)]
            said = meet(tmp_path, "far", 60 if last == 1 else 3, *secrets)
            assert all("met" in text for text in said) == (last == 1), said
            assert last == 1 or "it does not know the secret" in said[0], said
    assert not (tmp_path / "cache" / "pario").exists()


@pytest.mark.full
def test_a_rank_that_does_not_come_is_waited_for_but_not_for_ever(tmp_path: Path) -> None:
    said = meet(tmp_path, "near", 2, {"WORLD_SIZE": "3"}, {"WORLD_SIZE": "3"})
    assert any("not all of the 3 ranks have come in 2 s" in text for text in said), said
    assert all("refused" in text for text in said), said
    (said,) = [meet(tmp_path, "near", 2, {"WORLD_SIZE": "3", "RANK": "2"})]
    assert "rank 2 of 3 has not reached rank 0" in said[0]
    assert "PARIO_SECRET_FILE" in said[0]


@pytest.mark.full
def test_a_process_of_another_rank_is_no_rank(tmp_path: Path) -> None:
    """What a rank starts, or forks, does not take its place."""
    program = """
import multiprocessing, os, subprocess, sys
from pario.comm.world import get_world
import pario.errors
def alone():
    try:
        get_world()
    except pario.errors.LauncherError as error:
        os.write(1, f"child {error}\\n".encode())
if sys.argv[1] == "child":
    alone()
    sys.exit()
with get_world() as world:
    if world.rank:
        subprocess.run([sys.executable, "-c", sys.argv[3], "child", "1", ""], check=True)
        child = multiprocessing.get_context("fork").Process(target=alone)
        child.start()
        child.join()
    world.barrier()
os.write(1, b"ends\\n")
"""
    said = meet(tmp_path, "near", 60, {}, {}, program=f"import sys; sys.argv.append({program!r})\n{program}")
    assert [text.count("ends") for text in said] == [1, 1], said
    assert re.search(r"child .*\(RANK=1, WORLD_SIZE=2\) is no rank: a rank, process \d+, started it", said[1])
    assert "is no rank: it was forked from one that is" in said[1]


@pytest.mark.parametrize("wrong", ["readable", "short"])
def test_a_secret_that_others_can_read_is_none(tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"x" * (5 if wrong == "short" else 50))
    file.chmod(0o600 if wrong == "short" else 0o644)
    with pytest.raises(LauncherError, match=r"chmod 600.*16 bytes"):
        star._private(str(file))


def ask(link: Link, kind: int, body: bytes) -> None:
    """Say it, and hear what comes."""
    link.put(kind, body)
    link.flush()
    while link.next() is None:
        link.receive()
        time.sleep(0.001)


def come(link: Link, rank: int, node: bytes) -> star.Star:
    made = star.Star(link, rank, 2, None)
    made.say(Say.HERE, star.SEAT.pack(rank, 2) + node)
    return made


def in_time(until: float) -> None:
    assert time.monotonic() < until


def test_what_no_rank_says_is_refused() -> None:
    """By whom the system or the secret lets in: each connection ends, and the ranks meet."""
    name, pace, began = f"pario-test-{os.getpid()}", Pace(), time.monotonic()
    hub = Hub(name, 2, b"s" * 32)
    try:
        here = Address(boot(), name, (), 0)
        there = Address("", name, ("127.0.0.1",), hub.port)
        with pytest.raises(OSError, match="secret"):
            reached(there, b"t" * 32, 5.0)
        wrong = [
            (Say.MEET, b"x" * 40),
            (Say.HERE, b"x"),
            (Say.HERE, b"\5\0\0\0\2\0\0\0node"),
            (Say.HERE, b"\1\0\0\0\3\0\0\0node"),
            (99, b""),
        ]
        for kind, body in wrong:
            with pytest.raises(OSError, match=r"no rank says|is a job of 2 ranks|closed"):
                ask(reached(here, None, 5.0, trusts_system=True), kind, body)
        links = [reached(here, None, 5.0, trusts_system=True), reached(there, b"s" * 32, 5.0)]
        ranks = [come(link, rank, b"node %d" % rank) for rank, link in enumerate(links)]
        while not all(rank.Test() for rank in ranks):
            in_time(began + PROMISED_S * pace.slowness)
        assert ranks[0].nodes == ranks[1].nodes == [b"node 0", b"node 1"]
        with pytest.raises(OSError):  # nobody can come any more
            reached(here, None, 5.0, trusts_system=True)
        for rank in reversed(ranks):
            rank.leave()
    finally:
        hub.cancel()


def test_ranks_at_different_places_hear_of_it() -> None:
    name, pace, began = f"pario-test-apart-{os.getpid()}", Pace(), time.monotonic()
    hub = Hub(name, 2, None)
    try:
        here = Address(boot(), name, (), 0)
        ranks = [come(reached(here, None, 5.0, trusts_system=True), rank, b"node") for rank in (0, 1)]
        one = ranks[0].COMM_WORLD.Ibarrier()
        other = ranks[1].COMM_WORLD.Ibcast(np.zeros(3), root=0)
        for request in (one, other):
            with pytest.raises(PeerError, match="different places of their scripts"):
                wait_politely(request, lambda: in_time(began + PROMISED_S * pace.slowness))
        for rank in reversed(ranks):
            rank.leave()
    finally:
        hub.cancel()
