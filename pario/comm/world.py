"""World: the ranks of one communicator, and which of them share a node; and the choice between World and Solo.

mpi4py is imported inside functions only: a laptop, a login node or a notebook without an MPI library uses Solo and
never notices. How a World calls MPI: messages.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np

from pario.comm import agree as _agree
from pario.comm.alive import Watch
from pario.comm.base import AnyWorld, array_of_one_dimension
from pario.comm.farewell import goes_on, spread
from pario.comm.lasting import lasting
from pario.comm.launcher import FIT_HINT, launcher, load_mpi, started_by_torch, torch_ranks
from pario.comm.memory import Windows, park, shared_parts
from pario.comm.messages import LONGEST_PAUSE_S, Messages, wait_politely
from pario.comm.solo import Solo
from pario.errors import DeadRankError, LauncherError, OptionError, ParioError, PeerError

__all__ = ["World", "bcast_to_nodes", "get_world", "same_ranks"]

#: Seconds that a collective may still take to end after a rank was found dead: it may have done its part before.
GRACE_S = 0.5

#: What a rank says in the collective by which worlds begin and end: it frees the world; its script is at its end.
_FREES, _GONE = 0, -1

_MPI_HINT = "Install one beside mpi4py (pip install 'pario[mpich]'), or load the site's MPI module (docs/mpi.md)"


class World(Messages, AnyWorld):
    """The ranks of a communicator and their nodes. Collective over `comm`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Any intra-communicator; it is duplicated and not used afterwards.
    """

    def __init__(self, comm: Any) -> None:
        from mpi4py import MPI

        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise OptionError(f"comm must be an mpi4py intra-communicator, got {comm!r}")
        self.on_wait: Callable[[], None] | None = None
        self.alive_seconds = 1.0
        self._watch: Watch | None = None
        self._looked = 0.0
        self._agreed: BaseException | None = None  # the error that all ranks raised together

        wait_politely(comm.Ibarrier())
        super().__init__(comm.Dup(), self._wait_and_look)
        # Errors of MPI become exceptions, whatever the user chose for the communicator that we copied.
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        #: for the farewell after an uncaught error
        self.last_call: Any = None
        self.alarm = _agree.Alarm(self)
        self._node = Messages(self.comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank), self.wait)
        self._windows = Windows(self._node, self.rank)
        self.node_size = self._node.size
        self.node_rank = self._node.rank
        self.is_leader = self.node_rank == 0

        first = np.array([self.rank], dtype=np.int64)
        self.wait(self._node.comm.Ibcast(first, root=0))
        firsts = super().allgather_int(int(first[0]))
        leaders, counts = np.unique(firsts, return_counts=True)
        self.nodes = len(leaders)
        self.node = int(np.searchsorted(leaders, first[0]))
        self.node_seat = int(counts[: self.node].sum())
        self.seat = self.node_seat + self.node_rank
        self.node_ranks = tuple(int(r) for r in np.flatnonzero(firsts == first[0]))
        only_leaders = self.comm.Split(0 if self.is_leader else MPI.UNDEFINED, key=self.rank)
        self._leaders = Messages(only_leaders, self.wait) if self.is_leader else None
        if self.size > 1:
            self.last_call, self._watch = lasting(self, self._node, self._leaders, self.node_ranks)

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size}, node {self.node} of {self.nodes})"

    # -- what a node shares, and arrays ----------------------------------------------------------------------------

    def node_barrier(self) -> None:
        self._node.barrier()

    def node_bcast(self, obj: Any = None, root: int = 0) -> Any:
        return self._node.bcast(obj, root)

    def shared_bytes(self, nbytes: int) -> np.ndarray:
        return self._windows.allocate(nbytes)

    def share_array(self, a: np.ndarray | None) -> np.ndarray:
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
        (memory,) = shared_parts(self, [count * dtype.itemsize], "sharing an array")
        if self.rank == 0:
            assert a is not None
            memory[:] = a.reshape(-1).view(np.uint8)
        if self._leaders is not None:
            self._leaders.bcast_bytes(memory)
        self.node_barrier()  # MPI's own messages order the memory
        shared = memory.view(dtype).reshape(shape)
        shared.flags.writeable = False
        return shared

    def gather_array(self, a: np.ndarray, root: int = 0) -> np.ndarray | None:
        error: BaseException | None = None
        try:
            a = np.ascontiguousarray(array_of_one_dimension(a))
        except ParioError as failure:
            error, a = failure, np.empty(0, dtype=np.uint8)
        dtypes = set(self.allgather(None if error else a.dtype))
        if error is None and len(dtypes - {None}) > 1:
            error = OptionError(f"gather_array needs one dtype on all ranks, got {sorted(map(str, dtypes))}")
        lengths = self.allgather_int(a.nbytes)
        whole: np.ndarray | None = None
        if self.rank == root and error is None:
            try:
                whole = np.empty(int(lengths.sum()) // a.itemsize, dtype=a.dtype)
            except MemoryError as failure:
                error = failure
        self.agree(error, "gathering an array")
        self.gather_bytes(a.view(np.uint8), lengths, root, None if whole is None else whole.view(np.uint8))
        return whole

    # -- errors, and the end ---------------------------------------------------------------------------------------

    def check_alive(self, left: Callable[[int], bool] | None = None) -> None:
        if self._watch is not None:
            self._watch.check(left)

    def agree(self, error: BaseException | None, doing: str) -> None:
        _agree.agree(self, error, doing)

    def raised_by_all(self, error: BaseException) -> BaseException:
        self._agreed = error
        return spread(self, error)

    def goodbye(self) -> Callable[[], bool]:
        said = np.empty(self.size, dtype=np.int64)
        request = self.comm.Iallgather(np.array([_GONE], dtype=np.int64), said)

        def wait() -> bool:
            self.wait(request)
            return bool((said <= _FREES).all())

        return wait

    def allgather_int(self, value: int) -> np.ndarray:
        values = super().allgather_int(value)
        if values.min() < 0:
            gone = int(values.argmin())
            error = PeerError(
                "the script of another rank is at its end (sys.exit, or its last line), without close()",
                rank=gone,
                hint="Each rank must run the same loops, and end them by close() or by a `with` block.",
            )
            raise spread(self, error)  # who is gone takes no part in freeing this world together
        return values

    def free(self, collective: bool = True) -> None:
        if self.is_freed:
            return
        if collective and not self.mpi.Is_finalized():
            try:
                self._free_together()
            except BaseException as e:
                self._tell(e)
                self._leave()
                raise
        else:
            self._leave()

    def abandon(self, error: BaseException) -> None:
        if not self.is_freed:
            self._tell(error)
            with suppress(Exception):
                self.free(collective=error is self._agreed)

    def _tell(self, error: BaseException) -> None:
        with suppress(Exception):
            self.alarm.raise_all(error)

    def _free_together(self) -> None:
        said = super().allgather_int(_FREES)
        if said.min() < 0:  # a rank whose script is at its end: it does not come any more
            self._leave()
            return
        self.alarm.close()
        self._windows.free()
        if self._leaders is not None:
            self._leaders.free_comm()
        self._node.free_comm()
        self.free_comm()

    def _leave(self) -> None:
        """What is freed collectively only stays until the process ends."""
        self._windows.park()
        self.alarm.leave()
        park(self._comm)
        self._comm = None

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _wait_and_look(self, request: Any) -> None:
        goes_on()
        try:
            try:
                wait_politely(request, self._look)
            except DeadRankError:
                end = time.monotonic() + GRACE_S
                while not request.Test():
                    if time.monotonic() > end:
                        raise
                    time.sleep(LONGEST_PAUSE_S)
        except BaseException as e:
            park(request)  # with the memory that MPI may still use
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


def get_world(comm: Any = None, *, each_alone: bool = False) -> AnyWorld:
    """The World of `comm`, or Solo. Collective over `comm`.

    comm : mpi4py communicator, "self" or a world, optional
        None: COMM_WORLD if a launcher (mpiexec, srun) started this process or MPI is in use already, else Solo.
        A world is returned as it is.
        "self": this process alone, whatever started it; Solo.
    each_alone : processes that torchrun started may each do the same; without it they are refused, unless they are
        MPI's ranks, too

    Raises LauncherError if the launcher started several processes and MPI sees each of them alone.
    """
    if isinstance(comm, AnyWorld):
        return comm
    if isinstance(comm, str):
        if comm != "self":
            raise OptionError(f'comm must be an mpi4py intra-communicator, "self" or None, got {comm!r}')
        return Solo()
    found = launcher()
    torch = torch_ranks() if comm is None and not each_alone else ""
    if torch and (started_by_torch() or not found.where) and "mpi4py.MPI" not in sys.modules:
        raise _torch_error(torch)
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
            hint=f'{FIT_HINT}; to run every process for itself pass comm="self"',
        )
    if torch and MPI.COMM_WORLD.Get_size() == 1:
        raise _torch_error(torch)
    return World(MPI.COMM_WORLD if comm is None else comm)


def same_ranks(world: AnyWorld) -> AnyWorld:
    """Another world of the same ranks and nodes, whose memory goes back when it is freed. Collective over `world`."""
    return World(world.comm) if isinstance(world, World) else Solo()


def bcast_to_nodes(world: AnyWorld, memory: np.ndarray, node: int) -> None:
    """`memory`, u8[n] that the ranks of a node share, from `node` into that of all others, of the same length.

    Collective; the ranks of a node must meet before it, when `node` has written, and after it, before they read.
    """
    if isinstance(world, World) and world.nodes > 1 and world._leaders is not None:
        world._leaders.bcast_bytes(memory, node)


def leave_mpi() -> None:
    """Finalize MPI, if it runs: this process needs it no more, and nobody is to wait for it later. Collective over all
    processes of MPI."""
    loaded = sys.modules.get("mpi4py.MPI")
    if loaded is not None and loaded.Is_initialized() and not loaded.Is_finalized():
        loaded.Finalize()


def _torch_error(ranks: str) -> LauncherError:
    """Every process would read all records, and train on them, without a word."""
    count, script = ranks.partition("=")[2].partition(",")[0], sys.argv[0] or "script.py"
    return LauncherError(
        f"torchrun or another launcher of torch started several processes ({ranks}), and MPI sees each of them alone: "
        "every one would read all records",
        hint=f"Start the script by mpiexec or srun: `mpiexec -n {count} python {script}` (docs/mpi.md#torchrun); if "
        'every process is to read everything, or WORLD_SIZE is left over from another program, pass comm="self"',
    )
