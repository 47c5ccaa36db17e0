"""World against numpy and against what MPI itself says, on SELF, on WORLD and on a part of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from leftovers import communicators_left

mpi4py_MPI = pytest.importorskip("mpi4py.MPI")

from pario.comm import messages  # noqa: E402
from pario.comm.farewell import guard  # noqa: E402
from pario.comm.world import World, get_world  # noqa: E402
from pario.errors import ClosedError, LauncherError, OptionError, ParioError, PeerError  # noqa: E402

MPI = mpi4py_MPI
pytestmark = pytest.mark.mpi

KINDS = ["self", "world", "reversed", "part"]


@pytest.fixture(params=KINDS)
def world(request):
    """World over COMM_SELF, COMM_WORLD, the ranks in reverse order, and the even and the odd ranks by themselves."""
    everybody = MPI.COMM_WORLD
    if request.param == "self":
        comm = MPI.COMM_SELF
    elif request.param == "world":
        comm = everybody
    elif request.param == "reversed":
        comm = everybody.Split(0, key=-everybody.rank)
    else:
        comm = everybody.Split(everybody.rank % 2, key=everybody.rank)
    made = get_world(comm)
    assert isinstance(made, World)
    assert (made.rank, made.size) == (comm.rank, comm.size)
    yield made
    made.close()
    if comm not in (everybody, MPI.COMM_SELF):
        comm.Free()


def test_ranks_and_nodes(world) -> None:
    comm, node = world.comm, world.comm.Split_type(MPI.COMM_TYPE_SHARED, key=world.rank)
    assert (world.node_size, world.node_rank) == (node.size, node.rank)
    assert world.is_leader == (node.rank == 0)
    table = comm.allgather(
        (node.bcast(world.rank), world.rank, world.node, world.node_rank, world.seat, world.node_seat)
    )
    node.Free()
    leaders = sorted({row[0] for row in table})
    assert world.nodes == len(leaders)
    seats = sorted(table)  # by node leader, then rank: the definition of a seat
    for seat, (leader, rank, its_node, node_rank, its_seat, node_seat) in enumerate(seats):
        assert its_node == leaders.index(leader)
        assert its_seat == seat
        assert node_seat == min(s for s, row in enumerate(seats) if row[0] == leader)
        assert seat == node_seat + node_rank
        if rank == world.rank:
            assert world.node_ranks == tuple(row[1] for row in seats if row[0] == leader)


def test_two_nodes_are_seen() -> None:
    if os.environ.get("MPIR_CVAR_NUM_CLIQUES") != "2" or MPI.get_vendor()[0] != "MPICH":
        pytest.skip("runs with MPICH and MPIR_CVAR_NUM_CLIQUES=2 (test_mpi.py does)")
    with get_world(MPI.COMM_WORLD) as world:
        assert world.nodes == min(2, world.size)
        assert world.node == world.rank % 2


def test_objects(world) -> None:
    root = world.size - 1
    assert world.bcast({"rank": world.rank, "big": b"x" * 300_000}, root=root) == {"rank": root, "big": b"x" * 300_000}
    mine = [world.rank, "ä" * (1000 * world.rank)]
    assert world.allgather(mine) == [[rank, "ä" * (1000 * rank)] for rank in range(world.size)]
    for nbytes in range(90, 120):  # where one message just holds the object, and where it does not
        assert world.allgather(bytes(nbytes - (world.rank == 0))) == [
            bytes(nbytes - (rank == 0)) for rank in range(world.size)
        ]
    assert world.node_bcast(world.rank) == world.node_ranks[0]
    world.barrier()
    world.node_barrier()


def test_integers(world) -> None:
    values = np.random.default_rng(1).integers(-(2**50), 2**50, world.size)
    mine = int(values[world.rank])
    assert world.exscan(mine) == values[: world.rank].sum()
    assert world.allreduce_sum(mine) == values.sum()
    assert world.allreduce_max(mine) == values.max()
    assert world.allreduce_min(mine) == values.min()


@pytest.mark.parametrize("dtype", ["u1", "<f8", [("offset", "<i8"), ("nbytes", "<i8")]])
@pytest.mark.parametrize("chunk", [messages.CHUNK, 1000])
def test_gather_array(world, dtype, chunk, monkeypatch) -> None:
    """With a small chunk the way of arrays beyond one MPI call is walked; that one array is above 2 GiB is another
    test, run by hand (PARIO_TEST_HUGE=1)."""
    monkeypatch.setattr(messages, "CHUNK", chunk)

    def part(rank: int) -> np.ndarray:
        raw = np.random.default_rng(rank).integers(0, 255, 997 * rank * np.dtype(dtype).itemsize, dtype=np.uint8)
        return raw.view(dtype)

    root = world.size // 2
    whole = world.gather_array(part(world.rank), root=root)
    if world.rank != root:
        assert whole is None
        return
    assert whole.dtype == np.dtype(dtype)
    assert whole.tobytes() == b"".join(part(rank).tobytes() for rank in range(world.size))


def test_gather_array_refuses_on_all_ranks(world) -> None:
    right = world.rank == 0 and world.size > 1
    with pytest.raises(PeerError if right else OptionError, match="1-d numpy array"):
        world.gather_array(np.zeros(3) if right else np.zeros((2, 2)))
    if world.size > 1:
        with pytest.raises(OptionError, match="one dtype on all ranks"):
            world.gather_array(np.zeros(3, dtype="i4" if world.rank else "f8"))
    assert world.allreduce_sum(1) == world.size  # still in step


@pytest.mark.parametrize("chunk", [messages.CHUNK, 4096])
@pytest.mark.parametrize("shape", [(0,), (7,), (123, 45), ()])
def test_share_array(world, shape, chunk, monkeypatch) -> None:
    monkeypatch.setattr(messages, "CHUNK", chunk)
    expected = np.random.default_rng(7).random(shape)
    shared = world.share_array(np.asarray(expected) if world.rank == 0 else None)
    assert shared.dtype == np.float64
    np.testing.assert_array_equal(shared, expected)
    with pytest.raises(ValueError, match="read-only"):
        shared[...] = 0
    world.barrier()


def test_share_array_is_one_copy_per_node(world) -> None:
    shared = world.share_array(np.zeros(1000) if world.rank == 0 else None)
    shared.flags.writeable = True
    if world.is_leader:
        shared[0] = 41 + world.node
    world.node_barrier()
    assert shared[0] == 41 + world.node
    world.node_barrier()


def test_share_array_refuses_on_all_ranks(world) -> None:
    with pytest.raises(OptionError if world.rank == 0 else PeerError, match="numpy array"):
        world.share_array("no array")
    assert world.allreduce_sum(1) == world.size


@pytest.mark.skipif(os.environ.get("PARIO_TEST_HUGE") != "1", reason="needs 2.2 GB per node: PARIO_TEST_HUGE=1")
def test_share_array_beyond_two_gib() -> None:
    with get_world(MPI.COMM_WORLD) as world:
        n = (1 << 31) + 12345
        a = None
        if world.rank == 0:
            a = np.zeros(n, dtype=np.uint8)
            a[:: 1 << 20] = np.arange(len(a[:: 1 << 20]), dtype=np.uint8)
            a[-1] = 77
        shared = world.share_array(a)
        assert shared.size == n
        assert shared[-1] == 77
        np.testing.assert_array_equal(
            shared[:: 1 << 20][:-1], np.arange(2048, dtype=np.uint8)[: len(shared[:: 1 << 20]) - 1]
        )
        del shared
        world.barrier()


def test_shared_bytes(world) -> None:
    memory = world.shared_bytes(10_001)
    assert (memory.dtype, memory.size) == (np.dtype(np.uint8), 10_001)
    assert memory.ctypes.data % 4096 == 0
    assert not memory.any()
    world.node_barrier()
    memory[world.node_rank] = 1 + world.node_rank
    world.node_barrier()
    assert memory[: world.node_size].tolist() == list(range(1, world.node_size + 1))
    world.node_barrier()


def test_too_little_shared_memory_is_an_error_not_a_crash(world) -> None:
    if world.node_size > 1:  # a rank alone on its node has private memory
        with pytest.raises(ParioError, match="memory is too small"):
            world.shared_bytes(1 << 50)
    world.barrier()


def test_a_view_outlives_its_world() -> None:
    """Whoever still holds an array at the end finds its bytes, not a crash."""
    world = get_world(MPI.COMM_WORLD)
    shared = world.share_array(np.arange(100) if world.rank == 0 else None)
    part = shared[10:20] if world.rank == world.size - 1 else None
    del shared
    world.close()
    world.close()
    if part is not None:
        assert part.tolist() == list(range(10, 20))
    with pytest.raises(ClosedError):
        world.barrier()


def test_many_worlds_leak_nothing() -> None:
    """MPICH has some 2000 communicators; every World takes several."""
    for _ in range(300 if MPI.COMM_WORLD.size <= 2 else 100):
        with get_world(MPI.COMM_WORLD) as world:
            world.shared_bytes(100)


def test_waiting_is_polite() -> None:
    """A rank that waits a second for another one uses next to no processor time (a blocking barrier: all of it)."""
    with get_world(MPI.COMM_WORLD) as world:
        world.barrier()
        if world.rank == 0:
            time.sleep(1)
        begin = time.process_time()
        world.barrier()
        assert time.process_time() - begin < 0.3


@pytest.mark.skipif(MPI.get_vendor()[0] == "no MPI", reason="asks mpi4py what a communicator is")
def test_what_is_no_communicator() -> None:
    for wrong in (3, "world", MPI.COMM_NULL):
        with pytest.raises(OptionError, match="communicator"):
            get_world(wrong)


def test_ranks_that_are_alone_hear_why(monkeypatch) -> None:
    if MPI.COMM_WORLD.size > 1:
        pytest.skip("needs a COMM_WORLD of one rank")
    monkeypatch.setenv("PMI_SIZE", "4")
    with pytest.raises(LauncherError, match=r"4 processes.*PMI_SIZE=4.*size 1.*" + MPI.get_vendor()[0]):
        get_world()
    with pytest.raises(LauncherError):
        get_world(MPI.COMM_WORLD)
    get_world(MPI.COMM_SELF).close()  # on purpose


def test_a_rank_alone_leaves_no_communicators_after_errors() -> None:
    World(MPI.COMM_SELF).close()
    left = communicators_left()
    for number in range(5):
        world = World(MPI.COMM_SELF)
        if number % 2:
            world.abandon(ValueError("of this rank"))
        else:
            world.close(collective=False)
    assert communicators_left() == left


class User:
    """What guards a world, and drops it without a word."""

    def __init__(self, comm) -> None:
        self.world = World(comm)
        guard(self.world, self)

    def _abandon(self, error) -> None: ...

    def _part(self) -> None: ...


def test_worlds_that_nobody_freed_have_the_communicators_of_one() -> None:
    comm = MPI.COMM_WORLD
    World(comm).close()
    left = communicators_left()
    for number in range(10):
        user = User(comm)
        assert user.world.allreduce_sum(number) == number * comm.size
        assert user.world.node_bcast(user.world.node_rank + 5) == 5
        last, user = user.world, None
    with World(comm):
        with pytest.raises(ClosedError):
            last.barrier()  # another one has its communicators
        assert communicators_left() >= left - 3


def test_two_worlds_of_the_same_ranks_have_messages_of_their_own() -> None:
    """A rank begins in one, its neighbour in the other: each hears its own."""
    comm = MPI.COMM_WORLD
    again = comm.Dup()
    with World(comm) as one, World(again) as two:
        sums = {one: np.array([1]), two: np.array([1000])}
        order = [one, two] if comm.rank % 2 else [two, one]
        begun = [(world, world.comm.Iallreduce(MPI.IN_PLACE, sums[world])) for world in order]
        for world, request in begun:
            world.wait(request)
        assert [int(said[0]) for said in sums.values()] == [comm.size, 1000 * comm.size]
    again.Free()


def test_a_world_that_one_rank_still_uses_is_left_alone() -> None:
    """It was dropped everywhere else. And after an error of one rank its communicators are out of step."""
    comm = MPI.COMM_WORLD
    user: User | None = User(comm)
    kept = user.world
    mine = user if comm.rank == 0 else None
    user = None
    with World(comm) as other:
        assert other.allreduce_sum(1) == comm.size
        assert comm.size == 1 or not kept.is_freed
    del mine
    failed = World(comm)
    if comm.rank == 0:
        failed.abandon(ValueError("of rank 0 alone"))
    else:
        failed.close(collective=False)
    with World(comm) as after:
        assert after.allgather(comm.rank) == list(range(comm.size))


def test_who_waits_for_others_hears_its_own_background() -> None:
    comm = MPI.COMM_WORLD
    with get_world(comm) as world:
        assert isinstance(world, World)
        if world.rank == 0:
            said: list[int] = []

            def hear() -> None:
                if not said:
                    said.append(1)
                    comm.Isend(np.zeros(1, np.uint8), dest=comm.size - 1, tag=77).Wait()

            world.on_wait = hear
            world.barrier()
            world.on_wait = None
            assert said or comm.size == 1
        else:
            end = time.monotonic() + 60
            while world.rank == comm.size - 1 and not comm.Iprobe(source=0, tag=77):
                assert time.monotonic() < end, "rank 0 waits, and nothing was called"
                time.sleep(0.001)
            if world.rank == comm.size - 1:
                comm.Recv(np.zeros(1, np.uint8), source=0, tag=77)
            world.barrier()


def test_whose_world_is_closed_says_nothing() -> None:
    comm = MPI.COMM_WORLD
    world = get_world(comm)
    assert isinstance(world, World)
    if world.rank == world.size - 1:
        world.close()
    else:
        with pytest.raises(PeerError, match="closed what this one still uses") as caught:
            world.allgather("five")
        assert caught.value.rank == world.size - 1
        world.close(collective=False)
    comm.Barrier()
    with get_world(comm) as after:
        assert after.allgather(after.rank) == list(range(after.size))


@pytest.mark.parametrize("call", [lambda world: world.allgather_int(5), lambda world: world.allgather("five")])
def test_whose_script_has_ended_is_no_value(call: Callable[[World], Any]) -> None:
    """It announces that in the place of its next collective call, where the others must not take it for a value."""
    comm = MPI.COMM_WORLD
    world = get_world(comm)
    assert isinstance(world, World)
    if world.size == 1:
        world.close()
        return
    if world.rank == world.size - 1:
        assert not world.goodbye()()
    else:
        with pytest.raises(PeerError, match="at its end") as caught:
            call(world)
        assert caught.value.rank == world.size - 1
    world.close(collective=False)
    comm.Barrier()
