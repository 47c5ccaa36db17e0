"""An error on one rank only: all raise, nobody hangs. (Ranks that die, and errors that stay uncaught, end their whole
job; test_comm_jobs.py starts such jobs and looks at how they end.)"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

mpi4py_MPI = pytest.importorskip("mpi4py.MPI")

from pario.comm import memory  # noqa: E402
from pario.comm.agree import Alarm  # noqa: E402
from pario.comm.slots import Slots  # noqa: E402
from pario.comm.window import Ring  # noqa: E402
from pario.comm.world import get_world  # noqa: E402
from pario.errors import CorruptedError, OptionError, ParioError, PeerError  # noqa: E402

MPI = mpi4py_MPI
pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("through_the_ring")]


@pytest.fixture(params=[pytest.param("self", marks=pytest.mark.full), "world"])
def world(request):
    made = get_world(MPI.COMM_SELF if request.param == "self" else MPI.COMM_WORLD)
    yield made
    made.close()


def listen(alarm: Alarm) -> None:
    """What a training loop does: a look now and then, for 20 s at most."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        alarm.check()
        time.sleep(1e-3)


def test_agree(world) -> None:
    world.agree(None, "opening")
    for failing in range(world.size):
        if world.rank == failing:
            error = CorruptedError("bad page", page=7, path="x.mdb")
            with pytest.raises(CorruptedError, match="bad page") as caught:
                world.agree(error, "opening")
            assert caught.value is error
        else:
            with pytest.raises(PeerError, match=r"while opening: CorruptedError: bad page.*page 7") as caught:
                world.agree(None, "opening")
            assert caught.value.rank == failing
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert world.allreduce_sum(1) == world.size


def test_agree_when_all_fail(world) -> None:
    with pytest.raises(ValueError, match=f"rank {world.rank} has its own"):
        world.agree(ValueError(f"rank {world.rank} has its own"), "opening")


def test_agree_with_an_error_that_cannot_be_printed(world) -> None:
    class Strange(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    with pytest.raises(Strange if world.rank == 0 else PeerError):
        world.agree(Strange() if world.rank == 0 else None, "opening")


def test_alarm(world) -> None:
    """Every rank hears of it, on every node, without a collective; also of a text that is much too long."""
    for failing in range(world.size):
        if failing:
            world.alarm = Alarm(world)  # an alarm is heard once
        alarm = world.alarm
        alarm.check()
        world.comm.Barrier()  # World's own would listen, too
        if world.rank == failing:
            alarm.raise_all(OptionError(f"rank {failing} went wrong: " + "ü" * 5000))
            alarm.check()  # one's own alarm does not come back
        else:
            with pytest.raises(PeerError, match=f"OptionError: rank {failing} went wrong: üü") as caught:
                listen(alarm)
            assert caught.value.rank == failing
            alarm.check()  # heard once
        alarm.close()
        alarm.close()
        world.comm.Barrier()


def test_two_alarms_at_once(world) -> None:
    alarm = world.alarm
    world.comm.Barrier()
    if world.rank < 2:
        alarm.raise_all(ValueError("me too"))
    if world.size > 1:
        with pytest.raises(PeerError, match="me too"):
            listen(alarm)
    world.comm.Barrier()
    # As after every error: the note that nobody received belongs to no later communicator.
    world.close(collective=False)


def test_closed_alarm_is_quiet(world) -> None:
    alarm = world.alarm
    alarm.close()
    alarm.raise_all(ValueError("too late"))
    alarm.check()
    world.barrier()


def test_ring_error_reaches_who_waits(world) -> None:
    """The note wakes ranks that sleep in wait_group and in wait_done, long before they would look around."""
    ring = Ring(world, 2, alive_seconds=20)
    failing = world.node_size - 1
    begin = time.monotonic()
    if world.node_rank == failing:
        time.sleep(0.3)
        ring.fail(world.rank, "ReadError: disk is gone " + "ö" * 5000)
        ring.fail(world.rank, "ValueError: a later one")
        ring.check()  # its own error: it raises that itself
    else:
        wait = ring.wait_done if world.node_rank % 2 else ring.wait_group
        with pytest.raises(PeerError, match="ReadError: disk is gone ö") as caught:
            wait(5)
        assert caught.value.rank == world.node_ranks[failing]
        with pytest.raises(PeerError):
            ring.check()
    assert time.monotonic() - begin < 10
    world.node_barrier()
    if world.is_leader:
        ring.reset()
    world.node_barrier()
    ring.check()
    world.node_barrier()
    ring.close()


def test_the_first_of_two_ring_errors_counts(world) -> None:
    ring = Ring(world, 2)
    if world.node_rank == world.node_size - 1:
        ring.fail(world.rank, "first")
    world.node_barrier()
    if world.node_size > 2 and world.is_leader:
        ring.fail(world.rank, "second")
    world.node_barrier()
    if world.node_size > 2 and world.node_rank == 1:
        with pytest.raises(PeerError, match="first"):
            ring.check()
    world.node_barrier()
    ring.close()


def test_a_rank_that_left_is_not_missed(world) -> None:
    ring, end = Ring(world, 2, alive_seconds=0.05), time.monotonic() + 0.3

    def enough() -> None:
        if time.monotonic() > end:
            raise TimeoutError

    if world.node_rank == world.node_size - 1 and world.node_size > 1:
        ring.close()
    elif world.node_size > 1:
        assert ring.wait_done(0)
        with pytest.raises(TimeoutError):
            ring.wait_group(0, enough)
    world.node_barrier()
    ring.close()


def test_a_ring_that_does_not_fit_fails_everywhere(world) -> None:
    if world.size == 1:
        pytest.skip("one rank per node has private memory")
    with pytest.raises(Exception, match=r"memory is too small|MemoryError|Unable to allocate"):
        Slots(world, 2, 1 << 48, 4, 4).allocate()
    assert world.allreduce_sum(1) == world.size


@pytest.mark.parametrize("what", ["memfd_create", "mmap"])
def test_memory_that_one_rank_is_refused_fails_everywhere(world, monkeypatch, what) -> None:
    if world.node_size == 1:
        pytest.skip("one rank per node has private memory")

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOMEM, "no map is left")

    if world.node_rank == (0 if what == "memfd_create" else 1):
        monkeypatch.setattr(*((os, what) if what == "memfd_create" else (memory.mmap, what)), refuse)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ParioError, match=r"no memory for 8,192 bytes.*no map is left"):
        world.shared_bytes(8192)
    assert len(os.listdir("/proc/self/fd")) <= before
    monkeypatch.undo()
    assert not world.shared_bytes(8192).any()  # of the node alone: another one may have a single rank, and skip this


@pytest.mark.parametrize("way", ["a stranger's message comes first", "nothing can be sent"])
def test_memory_is_that_of_the_first_rank(world, monkeypatch, way) -> None:
    """Whatever else arrives at the socket; and also where the ranks have networks of their own."""
    if world.node_size == 1:
        pytest.skip("one rank per node has private memory")
    send = socket.send_fds

    def sent(line, words, fds, flags, name):
        if way == "nothing can be sent":
            raise ConnectionRefusedError
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger, open("/dev/zero", "rb") as other:
            send(stranger, [b"memory"], [other.fileno()], 0, name)
            stranger.sendto(b"memory", name)
        return send(line, words, fds, flags, name)

    monkeypatch.setattr(socket, "send_fds", sent)
    before = len(os.listdir("/proc/self/fd"))
    shared = world.shared_bytes(10_000)
    shared[world.node_rank] = 5 + world.node_rank
    world.node_barrier()
    assert shared[: world.node_size].tolist() == list(range(5, 5 + world.node_size))
    world.node_barrier()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:pario-ring" in line]
    assert mapped
    del shared
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_alarm_outlives_a_send_that_fails(world, monkeypatch) -> None:
    """To a rank that is gone: what is raised stays the error that is told."""
    sent = []

    class Failing:
        def __init__(self, request) -> None:
            self.request = request

        def Test(self):
            sent.append(self.request)
            raise world.mpi.Exception(1)

    comm = world.comm
    failing = SimpleNamespace(Isend=lambda *args, **more: Failing(comm.Isend(*args, **more)))
    monkeypatch.setattr(world.alarm, "_comm", failing, raising=False)
    if world.rank == 0:
        world.alarm.raise_all(ValueError("told anyway"))
        assert len(sent) == world.size - 1
    monkeypatch.undo()
    comm.Barrier()
    if world.rank:
        with pytest.raises(PeerError, match="told anyway"):
            listen(world.alarm)
    comm.Barrier()
    world.close(collective=False)


def test_a_note_that_never_arrives_keeps_nobody(world, monkeypatch) -> None:
    """A large note is announced first; a sender inside of MPI_Finalize does not bring the rest."""
    if world.size == 1:
        pytest.skip("nobody sends notes")
    monkeypatch.setattr("pario.comm.agree.SEND_S", 0.2)
    asked = []

    class Announced:
        def Test(self) -> bool:
            asked.append(None)
            return False

    alarm = world.alarm
    real, alarm._comm = alarm._comm, SimpleNamespace(Iprobe=lambda **_: True, Irecv=lambda *_, **__: Announced())
    begin = time.monotonic()
    alarm.close()
    assert 0.2 <= time.monotonic() - begin < 5
    assert asked
    alarm._comm = real
    world.barrier()
