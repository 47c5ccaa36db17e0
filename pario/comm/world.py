"""World: the ranks of one communicator, and which of them share a node. Solo: one process, and no MPI library at all.

Both have the same surface, so that nobody above asks which one it holds. mpi4py is imported inside functions only: a
laptop, a login node or a notebook without an MPI library uses Solo and never notices.

Three rules hold for every MPI call of pario:

* It happens on a private duplicate of the user's communicator, in the thread that called pario. A background thread
  never calls MPI, hence any thread level will do.
* It waits politely. MPI libraries poll without pause in a blocking call, and with more ranks than cores that takes the
  processor from the rank that everybody waits for. So a collective is started as a nonblocking one and tested between
  sleeps that grow to 10 ms. Calls that have no nonblocking form (Dup, Split, Allocate_shared, Free) come right after
  a polite barrier, when all ranks are there.
* Counts stay below 2^30 per call, because older MPI libraries count in 32-bit integers.
"""

from __future__ import annotations

import ctypes
import pickle
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from pario.comm import agree as _agree
from pario.comm import memory as _memory
from pario.comm.alive import Lifeline, Watch, myself
from pario.comm.launcher import FIT_HINT, launcher, load_mpi
from pario.errors import ClosedError, DeadRankError, LauncherError, OptionError, ParioError

__all__ = ["AnyWorld", "Solo", "World", "get_world"]

#: Alignment of shared memory in bytes: what O_DIRECT wants, and the page size of most machines.
PAGE = 4096

#: Bytes of one MPI call.
CHUNK = 1 << 30

#: Bytes of the first message of an object's broadcast: below the eager limit of the MPI libraries we know.
HEAD = 1024

#: Waiting: the first pauses yield only, later ones are this part of what was waited so far, up to so many seconds. So
#: a wait costs little more than it takes, and a long one next to no processor time, however many ranks share a core.
PAUSE_PART = 1 / 16
LONGEST_PAUSE_S = 1e-2

#: Seconds that a collective may still take to end after a rank was found dead: it may have done its part before.
GRACE_S = 0.5

_MPI_HINT = "Install one beside mpi4py (pip install 'pario[mpich]'), or load the site's MPI module (docs/mpi.md)"


class Solo:
    """One process that is its own node; the surface of World without MPI.

    Attributes
    ----------
    size, nodes, node_size : 1
    rank, node, node_rank, node_seat, seat : 0
    is_leader : True
    """

    size = nodes = node_size = 1
    rank = node = node_rank = node_seat = seat = 0
    is_leader = True
    node_ranks = (0,)

    def __init__(self) -> None:
        self._freed = False
        self.failed = False
        self.on_wait: Callable[[], None] | None = None  # nobody to wait for
        self.alive_seconds = 1.0
        self.alarm = _agree.Alarm(self)

    def __repr__(self) -> str:
        return "Solo()"

    def __enter__(self) -> Solo:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.free(collective=kind is None)

    def barrier(self) -> None:
        """Nothing to wait for."""
        self._check_open()

    node_barrier = barrier

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """`obj` itself."""
        self._check_open()
        return obj

    node_bcast = bcast

    def allgather(self, obj: Any) -> list[Any]:
        """[obj]"""
        self._check_open()
        return [obj]

    def exscan(self, value: int) -> int:
        """0"""
        self._check_open()
        return 0

    def allreduce_sum(self, value: int) -> int:
        """`value`"""
        self._check_open()
        return int(value)

    allreduce_max = allreduce_min = allreduce_sum

    def gather_array(self, a: np.ndarray, root: int = 0) -> np.ndarray | None:
        """A copy of `a`, 1-d."""
        self._check_open()
        return _checked_1d(a).copy()

    def share_array(self, a: np.ndarray | None) -> np.ndarray:
        """`a` itself as a read-only view."""
        self._check_open()
        if a is None:
            raise OptionError("share_array needs the array on rank 0, got None")
        view = a.view()
        view.flags.writeable = False
        return view

    def shared_bytes(self, nbytes: int) -> np.ndarray:
        """u8[nbytes], zeroed and page-aligned, private to this process."""
        self._check_open()
        return _private_bytes(nbytes)

    def wait(self, request: Any) -> None:
        """Nothing is under way that could be waited for."""
        self._check_open()

    def check_alive(self, left: Callable[[int], bool] | None = None) -> None:
        """Nobody else to miss."""

    def agree(self, error: BaseException | None, doing: str) -> None:
        """Raise `error` if there is one."""
        if error is not None:
            raise error

    def free(self, collective: bool = True) -> None:
        """Idempotent."""
        self._freed = True

    def abandon(self, error: BaseException) -> None:
        """Nobody to tell."""
        self._freed = True

    def _check_open(self) -> None:
        if self._freed:
            raise ClosedError("this Solo was freed")


class World:
    """The ranks of a communicator and their nodes. Collective over `comm`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Any intra-communicator; it is duplicated and not used afterwards.

    Attributes
    ----------
    size, rank : ranks of the communicator, this one's number
    nodes, node : nodes, and this rank's node. Nodes are numbered by their lowest rank.
    node_size, node_rank : ranks of this node, this one's number among them (in the order of `rank`)
    node_ranks : tuple of int, `rank` of every rank of this node
    is_leader : node_rank == 0
    seat : this rank's place when ranks are lined up node after node; node_seat: the first seat of this node
    failed : an error was raised on this rank that concerns the others too
    alarm : reaches the other ranks at any time; every wait for them listens to it
    alive_seconds : how often a waiting rank looks whether the others still live
    comm : the private duplicate; mpi : mpi4py.MPI
    """

    def __init__(self, comm: Any) -> None:
        MPI = _mpi()
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise OptionError(f"comm must be an mpi4py intra-communicator, got {comm!r}")
        self.mpi = MPI
        self._freed = False
        self.failed = False
        self.on_wait: Callable[[], None] | None = None
        self._windows: list[tuple[Any, weakref.ref[Any]]] = []
        self.alive_seconds = 1.0
        self._watch: Watch | None = None
        self._looked = 0.0

        _wait(comm.Ibarrier())
        self.comm = comm.Dup()
        # Errors of MPI become exceptions, whatever the user chose for the communicator that we copied.
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.size: int = self.comm.Get_size()
        self.rank: int = self.comm.Get_rank()
        #: for the farewell after an uncaught error
        self.last_call: Any = None
        self.alarm = _agree.Alarm(self)
        self._node = self.comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank)
        self.node_size: int = self._node.Get_size()
        self.node_rank: int = self._node.Get_rank()
        self.is_leader: bool = self.node_rank == 0

        first = np.array([self.rank], dtype=np.int64)
        self._wait(self._node.Ibcast(first, root=0))
        firsts = np.empty(self.size, dtype=np.int64)
        self._wait(self.comm.Iallgather(first, firsts))
        leaders, counts = np.unique(firsts, return_counts=True)
        self.nodes: int = len(leaders)
        self.node: int = int(np.searchsorted(leaders, first[0]))
        self.node_seat: int = int(counts[: self.node].sum())
        self.seat: int = self.node_seat + self.node_rank
        self.node_ranks: tuple[int, ...] = tuple(int(r) for r in np.flatnonzero(firsts == first[0]))
        self._leaders = self.comm.Split(0 if self.is_leader else MPI.UNDEFINED, key=self.rank)
        if self.size > 1:
            self.last_call, self._watch = _lasting(self)

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size}, node {self.node} of {self.nodes})"

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.free(collective=kind is None)

    # -- collectives ---------------------------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        self._check_open()
        self._wait(self.comm.Ibarrier())

    def node_barrier(self) -> None:
        """Wait for the ranks of this node. Collective over the node."""
        self._check_open()
        self._wait(self._node.Ibarrier())

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Any picklable object from rank `root`. Collective."""
        self._check_open()
        return _bcast(self.comm, obj, root, self._wait)

    def node_bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Any picklable object from node rank `root` to its node. Collective over the node."""
        self._check_open()
        return _bcast(self._node, obj, root, self._wait)

    def allgather(self, obj: Any) -> list[Any]:
        """One picklable object per rank, in rank order. Collective."""
        self._check_open()
        mine = np.frombuffer(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), dtype=np.uint8)
        lengths = self._allgather_int(mine.size)
        ends = np.cumsum(lengths)
        whole = np.empty(int(ends[-1]), dtype=np.uint8)
        if whole.size <= CHUNK:
            place = (whole, lengths.tolist(), (ends - lengths).tolist(), self.mpi.BYTE)
            self._wait(self.comm.Iallgatherv([mine, self.mpi.BYTE], place))
        else:
            for rank, (end, length) in enumerate(zip(ends.tolist(), lengths.tolist(), strict=True)):
                part = whole[end - length : end]
                if rank == self.rank:
                    part[:] = mine
                _bcast_bytes(self.comm, part, rank, self._wait)
        return [pickle.loads(whole[e - n : e]) for e, n in zip(ends.tolist(), lengths.tolist(), strict=True)]

    def exscan(self, value: int) -> int:
        """Sum of the values of all lower ranks; 0 on rank 0. Collective."""
        self._check_open()
        out = np.zeros(1, dtype=np.int64)
        self._wait(self.comm.Iexscan(np.array([value], dtype=np.int64), out, op=self.mpi.SUM))
        return int(out[0]) if self.rank else 0  # MPI leaves rank 0's value undefined

    def allreduce_sum(self, value: int) -> int:
        """Collective."""
        return self._allreduce(value, self.mpi.SUM)

    def allreduce_max(self, value: int) -> int:
        """Collective."""
        return self._allreduce(value, self.mpi.MAX)

    def allreduce_min(self, value: int) -> int:
        """Collective."""
        return self._allreduce(value, self.mpi.MIN)

    def gather_array(self, a: np.ndarray, root: int = 0) -> np.ndarray | None:
        """The ranks' 1-d arrays one after another, in rank order, on rank `root`; None elsewhere. Collective.

        Lengths may differ, the dtype may not. An error is raised on all ranks.
        """
        error: BaseException | None = None
        try:
            a = np.ascontiguousarray(_checked_1d(a))
        except ParioError as failure:
            error, a = failure, np.empty(0, dtype=np.uint8)
        dtypes = set(self.allgather(None if error else a.dtype))
        if error is None and len(dtypes - {None}) > 1:
            error = OptionError(f"gather_array needs one dtype on all ranks, got {sorted(map(str, dtypes))}")
        lengths = self._allgather_int(a.nbytes)
        whole: np.ndarray | None = None
        if self.rank == root and error is None:
            try:
                whole = np.empty(int(lengths.sum()) // a.itemsize, dtype=a.dtype)
            except MemoryError as failure:
                error = failure
        self.agree(error, "gathering an array")
        mine = a.view(np.uint8)
        if lengths.sum() <= CHUNK:
            place = None
            if whole is not None:
                starts = np.cumsum(lengths) - lengths
                place = (whole.view(np.uint8), lengths.tolist(), starts.tolist(), self.mpi.BYTE)
            self._wait(self.comm.Igatherv([mine, self.mpi.BYTE], place, root=root))
            return whole
        tag = 1
        if whole is None:
            for start in range(0, mine.size, CHUNK):
                self._wait(self.comm.Isend([mine[start : start + CHUNK], self.mpi.BYTE], dest=root, tag=tag))
            return None
        out, end = whole.view(np.uint8), 0
        for rank, length in enumerate(lengths.tolist()):
            part = out[end : end + length]
            end += length
            if rank == root:
                part[:] = mine
                continue
            for start in range(0, length, CHUNK):
                self._wait(self.comm.Irecv([part[start : start + CHUNK], self.mpi.BYTE], source=rank, tag=tag))
        return whole

    def share_array(self, a: np.ndarray | None) -> np.ndarray:
        """Rank 0's array as a read-only array on all ranks, one copy per node. Collective; an error is raised on all.

        `a` is ignored on the other ranks. Any shape; any dtype without Python objects.
        """
        self._check_open()
        error: BaseException | None = None
        what: tuple[tuple[int, ...], np.dtype[Any]] | None = None
        if self.rank == 0:
            if not isinstance(a, np.ndarray) or a.dtype.hasobject:
                error = OptionError(
                    f"share_array needs a numpy array without objects on rank 0, got {type(a).__name__}"
                )
            else:
                a = np.ascontiguousarray(a)
                what = a.shape, a.dtype
        self.agree(error, "sharing an array")
        shape, dtype = self.bcast(what)
        count = 1
        for n in shape:
            count *= n
        memory: np.ndarray | None = None
        try:
            memory = self._allocate(count * dtype.itemsize)
        except ParioError as failure:
            error = failure
        self.agree(error, "sharing an array")
        assert memory is not None
        if self.rank == 0:
            assert a is not None
            memory[:] = a.reshape(-1).view(np.uint8)
        if self.is_leader:
            _bcast_bytes(self._leaders, memory, 0, self._wait)
        self.node_barrier()  # MPI's own messages order the memory
        shared = memory.view(dtype).reshape(shape)
        shared.flags.writeable = False
        return shared

    def shared_bytes(self, nbytes: int) -> np.ndarray:
        """u8[nbytes], zeroed and page-aligned, the same memory on all ranks of the node. Collective over the node.

        Raises on all ranks of the node when its shared memory is too small; other nodes do not hear of it (agree
        afterwards).
        """
        self._check_open()
        return self._allocate(nbytes)

    def check_alive(self, left: Callable[[int], bool] | None = None) -> None:
        """Raises DeadRankError if a rank of this node, or another node's leader, is known to be gone. Any thread.

        left : left(node rank) is true for those that are not missed any more
        """
        if self._watch is not None:
            self._watch.check(left)

    def agree(self, error: BaseException | None, doing: str) -> None:
        """Go on together or raise together. Collective.

        A rank with an error raises it; when others have one, a rank without raises PeerError, which names the first
        failing rank, what it was `doing`, and its error.
        """
        _agree.agree(self, error, doing)

    def free(self, collective: bool = True) -> None:
        """Give back windows and communicators; idempotent. Collective, unless `collective` is False.

        With collective=False (an error is on its way on this rank and the others may be anywhere) nothing is waited
        for: windows and communicators stay until the process ends, when the system takes them back.
        A window to which some rank still has a view is not unmapped either: a dangling array would end in a crash.
        """
        if self._freed:
            return
        self._freed = True
        MPI = self.mpi
        if MPI.Is_finalized():
            return
        if not collective:
            _parked.append(self._windows)
            self.alarm.leave()
            return
        try:
            self._wait(self.comm.Ibarrier())
        except BaseException as e:
            self._freed = False
            self.abandon(e)
            raise
        self.alarm.close()
        for window, view in self._windows:
            held = np.array([view() is not None], dtype=np.int64)
            any_held = np.empty(1, dtype=np.int64)
            self._wait(self._node.Iallreduce(held, any_held, op=MPI.MAX))
            if any_held[0]:
                _parked.append(window)
            else:
                window.Free()
        self._windows = []
        if self._leaders != MPI.COMM_NULL:
            self._leaders.Free()
        self._node.Free()
        self.comm.Free()

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks about `error`, which ends the work on this one, and free what is this rank's alone."""
        if not self._freed:
            with suppress(Exception):
                self.alarm.raise_all(error)
        self.free(collective=False)

    def wait(self, request: Any) -> None:
        """Wait politely for a nonblocking call on `comm`. Raises PeerError, DeadRankError."""
        self._check_open()
        self._wait(request)

    # -- inside --------------------------------------------------------------------------------------------------

    def _wait(self, request: Any) -> None:
        try:
            try:
                _wait(request, self._look)
            except DeadRankError:
                end = time.monotonic() + GRACE_S
                while not request.Test():
                    if time.monotonic() > end:
                        raise
                    time.sleep(LONGEST_PAUSE_S)
        except BaseException as e:
            _parked.append(request)  # with the memory that MPI may still use
            if isinstance(e, DeadRankError):
                self.alarm.raise_all(e)
            raise

    def _look(self) -> None:
        """While this rank waits for others: are they still there?"""
        self.alarm.check()
        if self.on_wait is not None:
            self.on_wait()
        now = time.monotonic()
        if now - self._looked >= self.alive_seconds:
            self._looked = now
            self.check_alive()

    def _check_open(self) -> None:
        if self._freed:
            raise ClosedError("this World was freed", rank=self.rank)

    def _allreduce(self, value: int, op: Any) -> int:
        self._check_open()
        out = np.empty(1, dtype=np.int64)
        self._wait(self.comm.Iallreduce(np.array([value], dtype=np.int64), out, op=op))
        return int(out[0])

    def _allgather_int(self, value: int) -> np.ndarray:
        out = np.empty(self.size, dtype=np.int64)
        self._wait(self.comm.Iallgather(np.array([value], dtype=np.int64), out))
        return out

    def _allocate(self, nbytes: int) -> np.ndarray:
        """u8[nbytes], page-aligned, zeroed, shared by the node. Collective over the node."""
        if self.node_size == 1:
            return _private_bytes(nbytes)
        MPI = self.mpi
        self._node_agree(_memory.refusal(nbytes + PAGE, shared=True) if self.is_leader else None)
        refused: ParioError | None = None
        memory = np.empty(0, dtype=np.uint8)
        try:
            window = MPI.Win.Allocate_shared(nbytes + PAGE if self.is_leader else 0, 1, comm=self._node)
        except MPI.Exception as e:  # on this rank, and perhaps on no other
            why = " ".join(e.Get_error_string().split())
            refused = ParioError(
                f"the MPI library found no memory for {nbytes:,} bytes that the node shares: {why}", hint=_memory.HINT
            )
        else:
            base, _ = window.Shared_query(0)
            # Mappings start at a page on every rank, so the distance to the next page is the same everywhere.
            start = base.address + (-base.address) % PAGE
            owner = (ctypes.c_uint8 * nbytes).from_address(start)
            self._windows.append((window, weakref.ref(owner)))
            if nbytes:
                memory = np.frombuffer(owner, dtype=np.uint8)
            # The kernel zeroes some 2 GB/s on one core: each rank takes a part.
            first, end = (nbytes * k // self.node_size // PAGE * PAGE for k in (self.node_rank, self.node_rank + 1))
            refused = _memory.reserve(memory[first:] if self.node_rank + 1 == self.node_size else memory[first:end])
        self._node_agree(refused)
        return memory

    def _node_agree(self, refused: ParioError | None) -> None:
        """All ranks of the node go on, or all raise the first one's error. Collective over the node."""
        mine = np.array([self.node_size if refused is None else self.node_rank], dtype=np.int64)
        first = np.empty_like(mine)
        self._wait(self._node.Iallreduce(mine, first, op=self.mpi.MIN))
        if first[0] < self.node_size:
            raise _bcast(self._node, refused, int(first[0]), self._wait).at(rank=self.rank)


AnyWorld = World | Solo

#: what must outlive its World: windows with views, windows of a rank that left in a hurry
_parked: list[Any] = []


#: What a group of ranks keeps, made with its first World and never freed: a communicator, because an error may leave
#: the script uncaught long after its World is gone, and then all ranks of the group meet there a last time (agree.py);
#: and the watch over its processes.
_kept: dict[tuple[int, ...], tuple[Any, Watch]] = {}


def _lasting(world: World) -> tuple[Any, Watch]:
    MPI = world.mpi
    group, everybody = world.comm.Get_group(), MPI.COMM_WORLD.Get_group()
    # Worlds are made collectively, so all ranks of a group find it known or unknown alike.
    ranks = tuple(MPI.Group.Translate_ranks(group, list(range(world.size)), everybody))
    group.Free()
    everybody.Free()
    if ranks not in _kept:
        people = np.empty((world.node_size, 3), dtype=np.int64)
        world._wait(world._node.Iallgather(np.array(myself(), dtype=np.int64), people))
        lifeline = None
        if world.is_leader and world.nodes > 1:
            lifeline = Lifeline()
            place = lifeline.listen(world.nodes - 1) if world.rank == 0 else None
            place = _bcast(world._leaders, place, 0, world._wait)
            if world.rank:
                lifeline.connect(place, world.rank)
            lifeline.settle()
        watch = Watch(people.tolist(), world.node_ranks, world.node_rank, lifeline)
        _kept[ranks] = world.comm.Dup(), watch
    return _kept[ranks]


def get_world(comm: Any = None) -> AnyWorld:
    """The World of `comm`, or Solo. Collective over `comm`.

    comm : mpi4py communicator, optional
        None: COMM_WORLD if a launcher (mpiexec, srun) started this process or MPI is in use already, else Solo.

    Raises LauncherError if the launcher started several processes and MPI sees each of them alone.
    """
    found = launcher()
    if comm is None:
        loaded = sys.modules.get("mpi4py.MPI")
        in_use = loaded is not None and loaded.Is_initialized() and not loaded.Is_finalized()
        if not in_use and not found.where:
            return Solo()
    try:
        MPI = load_mpi()
    except (ImportError, RuntimeError) as failure:
        if comm is None and found.size <= 1:  # `srun --pty python` on a machine without MPI
            return Solo()
        by = f"A launcher started this process ({found.where}), but" if found.where else "A communicator was given, but"
        why = "; ".join(str(failure).splitlines())
        raise LauncherError(f"{by} mpi4py cannot load an MPI library: {why}", hint=_MPI_HINT) from failure
    if not MPI.Is_initialized() or MPI.Is_finalized():
        state = "finalized already" if MPI.Is_finalized() else "not initialized (mpi4py.rc.initialize is False?)"
        raise LauncherError(f"MPI is {state}", hint="Create the loader between MPI.Init() and MPI.Finalize()")
    alone_on_purpose = comm is not None and comm == MPI.COMM_SELF
    if found.size > 1 and MPI.COMM_WORLD.Get_size() == 1 and not alone_on_purpose:
        name, version = MPI.get_vendor()
        raise LauncherError(
            f"{found.name} started {found.size} processes ({found.where}), but every one of them is alone: "
            f"MPI_COMM_WORLD has size 1. mpi4py loaded {name} {'.'.join(map(str, version))}, and the launcher belongs "
            "to another MPI",
            hint=f"{FIT_HINT}; to run every process for itself pass comm=MPI.COMM_SELF",
        )
    return World(MPI.COMM_WORLD if comm is None else comm)


def _mpi() -> Any:
    from mpi4py import MPI

    return MPI


def _wait(request: Any, on_wait: Callable[[], None] | None = None) -> None:
    """Wait for a nonblocking MPI call without keeping the processor; `on_wait` may raise to give up."""
    pause = 0.0
    tries = 0
    begin = time.monotonic()
    while not request.Test():
        tries += 1
        if tries > 20:  # the others are there already in most calls: some yields first
            pause = min(max(2e-5, (time.monotonic() - begin) * PAUSE_PART), LONGEST_PAUSE_S)
            if on_wait is not None:
                on_wait()
        time.sleep(pause)


def _bcast(comm: Any, obj: Any, root: int, wait: Callable[[Any], None]) -> Any:
    is_root = comm.Get_rank() == root
    # The length and what fits beside it go first: for most objects that is all, and one wait instead of two.
    head = np.zeros(HEAD, dtype=np.uint8)
    payload = np.empty(0, dtype=np.uint8)
    if is_root:
        payload = np.frombuffer(pickle.dumps(obj, protocol=pickle.HIGHEST_PROTOCOL), dtype=np.uint8)
        head[:8] = np.array([payload.size], dtype=np.int64).view(np.uint8)
        head[8 : 8 + payload.size] = payload[: HEAD - 8]
    wait(comm.Ibcast([head, _mpi().BYTE], root=root))
    length = int(head[:8].view(np.int64)[0])
    first = head[8 : 8 + length]
    if not is_root:
        payload = np.empty(length, dtype=np.uint8)
        payload[: first.size] = first
    _bcast_bytes(comm, payload[first.size :], root, wait)
    return obj if is_root else pickle.loads(payload)


def _bcast_bytes(comm: Any, data: np.ndarray, root: int, wait: Callable[[Any], None]) -> None:
    """u8[n] of any length from `root` into the others' `data`."""
    MPI = _mpi()
    for start in range(0, data.size, CHUNK):
        wait(comm.Ibcast([data[start : start + CHUNK], MPI.BYTE], root=root))


def _private_bytes(nbytes: int) -> np.ndarray:
    refused = _memory.refusal(nbytes, shared=False)
    if refused is not None:
        raise refused
    try:
        raw = np.zeros(nbytes + PAGE, dtype=np.uint8)
    except (MemoryError, ValueError) as e:  # the address space is limited
        raise ParioError(f"no memory for {nbytes:,} bytes of data in flight", hint=_memory.HINT) from e
    start = -raw.ctypes.data % PAGE
    return raw[start : start + nbytes]


def _checked_1d(a: np.ndarray) -> np.ndarray:
    if not isinstance(a, np.ndarray) or a.ndim != 1 or a.dtype.hasobject:
        raise OptionError(f"gather_array needs a 1-d numpy array without objects, got {getattr(a, 'dtype', type(a))}")
    return a
