"""World: the ranks of one communicator, and which of them share a node; and the choice between World and Solo.

mpi4py is imported inside functions only: a laptop, a login node or a notebook without an MPI library uses Solo and
never notices. How a World calls MPI: messages.py.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from pario.comm import agree as _agree
from pario.comm.alive import roll_call
from pario.comm.base import AnyWorld, array_of_one_dimension, together
from pario.comm.farewell import dropped, spread
from pario.comm.lasting import Comms, Group, group_of
from pario.comm.launcher import FIT_HINT, announced, inherited, launcher, load_mpi, started_by_torch, torch_ranks
from pario.comm.memory import node_memory, park, shared_parts
from pario.comm.messages import LONGEST_PAUSE_S, WORDS, Messages, library_of, wait_politely
from pario.comm.solo import Solo
from pario.errors import DeadRankError, LauncherError, OptionError, ParioError, PeerError, how_to_install

#: Seconds that a collective may still take to end after a rank was found dead: it may have done its part before.
GRACE_S = 0.5

#: What a rank says in the collective by which worlds begin and end: it frees the world; its script is at its end.
_FREES, _GONE = 0, -1

_ALONE_HINT = 'To run it alone pass comm="self"'
_MPI_HINT = f"Install one beside mpi4py ({how_to_install('mpich')}), or load the site's MPI module (docs/clusters.md)"


class World(Messages, AnyWorld):
    """The ranks of a communicator and their nodes. Collective over `comm`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Any intra-communicator; it is duplicated and not used afterwards.
    doing : what the ranks are about to do with it
    """

    def __init__(self, comm: Any, doing: str = "a call of pario") -> None:
        MPI = library_of(comm)
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise OptionError(f"comm must be an mpi4py intra-communicator, got {comm!r}")
        self.on_wait: Callable[[], None] | None = None
        self.on_late: Callable[[], None] | None = None
        self.alive_seconds = 1.0
        self._looked = 0.0
        self._agreed: BaseException | None = None  # the error that all ranks raised together
        self.settled = True  # no message of this rank is under way, as far as it knows
        self.job_ranks = _job_ranks(MPI, comm)
        self._group = group = group_of(comm, MPI)
        self.mpi, self.size, self.last_call = MPI, comm.Get_size(), group.last_call
        self.alarm = _agree.Alarm(self, listens=False)
        with roll_call(self, doing):
            taken = group.take(comm, self._wait_and_look, partial(_dropped, group))
        super().__init__(comm.Dup() if isinstance(taken, int) else taken.everybody, self._wait_and_look)
        # Errors of MPI become exceptions, whatever the user chose for the communicator that we copied.
        self.comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.alarm = _agree.Alarm(self)
        self._comms = comms = self._made(taken) if isinstance(taken, int) else taken
        self._node = Messages(comms.node, self.wait)
        self._leaders = None if self._node.rank else Messages(comms.leaders, self.wait)
        self.node_size, self.node_rank = self._node.size, self._node.rank
        self.is_leader = self.node_rank == 0
        self.nodes, self.node, self.node_seat, self.node_ranks = comms[4:]
        self.seat = self.node_seat + self.node_rank
        group.meet(self, self._node, self._leaders, self.node_ranks)
        self.last_call = group.last_call

    def _made(self, number: int) -> Comms:
        """New ones, beside this World's communicator. Collective."""
        MPI = self.mpi
        node = Messages(self.comm.Split_type(MPI.COMM_TYPE_SHARED, key=self.rank), self.wait)
        first = node.bcast(self.rank)
        firsts = super().say(first)[:, 0]
        found, counts = np.unique(firsts, return_counts=True)
        at = int(np.searchsorted(found, first))
        leaders = self.comm.Split(MPI.UNDEFINED if node.rank else 0, key=self.rank)
        seat, ranks = int(counts[:at].sum()), tuple(int(r) for r in np.flatnonzero(firsts == first))
        return Comms(number, self.comm, node.comm, leaders, len(found), at, seat, ranks)

    def __repr__(self) -> str:
        return f"World(rank {self.rank} of {self.size}, node {self.node} of {self.nodes})"

    # -- what a node shares, and arrays ----------------------------------------------------------------------------

    def node_barrier(self) -> None:
        self._node.barrier()

    def node_bcast(self, obj: Any = None, root: int = 0) -> Any:
        return self._node.bcast(obj, root)

    def shared_bytes(self, nbytes: int) -> np.ndarray:
        return node_memory(self._node, self.rank, nbytes)

    def share_array(self, a: np.ndarray | None) -> np.ndarray:
        what: tuple[tuple[int, ...], np.dtype[Any]] | None = None
        with together(self, "sharing an array"):
            if self.rank == 0:
                if not isinstance(a, np.ndarray) or a.dtype.hasobject:
                    wrong = f"share_array needs a numpy array without objects on rank 0, got {type(a).__name__}"
                    raise OptionError(wrong)
                a = np.ascontiguousarray(a)
                what = a.shape, a.dtype
        shape, dtype = self.bcast(what)
        (memory,) = shared_parts(self, [math.prod(shape) * dtype.itemsize], "sharing an array")
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
        self._group.watch.check(left)

    def agree(self, error: BaseException | None, doing: str) -> None:
        _agree.agree(self, error, doing)

    def raised_by_all(self, error: BaseException) -> BaseException:
        self._agreed = error
        return spread(self, error)

    def goodbye(self) -> Callable[[], bool]:
        said = np.empty((self.size, WORDS), np.int64)
        request = self.comm.Iallgather(np.array([_GONE] + [0] * (WORDS - 1)), said)

        def wait() -> bool:
            try:
                self.wait(request)
            except PeerError:
                if not getattr(request, "is_apart", False):
                    raise
                return False
            return bool((said[:, 0] <= _FREES).all())

        return wait

    def say(self, value: int, small: np.ndarray | None = None) -> np.ndarray:
        everyones = super().say(value, small)
        least = int(everyones[:, 0].min())
        if least < 0 or (least == _FREES and small is not None):  # an object has bytes
            ended = "the script of another rank is at its end (sys.exit, or its last line), without close()"
            what = ended if least else "another rank has closed what this one still uses"
            hint = "Each rank must run the same loops, and end them by close() or by a `with` block."
            error = PeerError(what, rank=int(everyones[:, 0].argmin()), hint=hint)
            raise spread(self, error)  # who is gone takes no part in freeing this world together
        return everyones

    def close(self, collective: bool = True) -> None:
        if self.is_freed:
            return
        if (collective or self.size == 1) and not self.mpi.Is_finalized():
            try:
                said = super().say(_FREES)[:, 0]
            except BaseException as e:
                self._tell(e)
                self._leave()
                raise
            if said.min() >= 0:  # else a script is at its end: it does not come any more
                return self._give_back()
        self._leave()

    def abandon(self, error: BaseException) -> None:
        if not self.is_freed:
            self._tell(error)
            with suppress(Exception):
                self.close(collective=error is self._agreed)

    def _tell(self, error: BaseException) -> None:
        with suppress(Exception):
            self.alarm.raise_all(error)

    def _give_back(self) -> None:
        """All ranks have freed it, or dropped it: the next World of these ranks may use its communicators."""
        if not self.settled:
            return self._leave()
        self.alarm.close()
        for each in (self, self._node, self._leaders):
            if each is not None:
                each._comm = None
        self._group.unused.append(self._comms)

    def _leave(self) -> None:
        """What is freed collectively only stays until the process ends."""
        self.alarm.leave()
        park(self._comm)
        self._comm = None

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _wait_and_look(self, request: Any) -> None:
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
            self.settled = False
            park(request)  # with the memory that MPI may still use
            if isinstance(e, DeadRankError):
                self.alarm.raise_all(e)
            raise

    def _look(self) -> None:
        """While this rank waits for others: are they still there?"""
        self.alarm.check()
        for look in (self.on_wait, self.on_late):
            if look is not None:
                look()
        now = time.monotonic()
        if now - self._looked >= self.alive_seconds:
            self._looked = now
            self.check_alive()


def _dropped(group: Group) -> dict[int, Callable[[], None]]:
    worlds = (world for world in dropped() if world._group is group and world.settled)
    return {world._comms.number: world._give_back for world in worlds}


def get_world(comm: Any = None, doing: str = "a call of pario") -> AnyWorld:
    """The World of `comm`, or Solo. Collective over `comm`.

    comm : mpi4py communicator, "self" or a world, optional
        None: COMM_WORLD if a launcher (mpiexec, srun) started this process or MPI is in use already; all processes that
        torchrun started, or srun without MPI, or that PARIO_RENDEZVOUS brings together (star.py); else Solo.
        A world is returned as it is.
        "self": this process alone, whatever started it; Solo.
    doing : "making a Loader", for the message of a rank that waits for the others

    Raises LauncherError if the launcher started several processes and MPI sees each of them alone, and in a process
    that is no rank, but was started or forked by one of several.
    """
    if isinstance(comm, AnyWorld):
        return comm
    if isinstance(comm, str):
        if comm != "self":
            raise OptionError(f'comm must be an mpi4py intra-communicator, "self" or None, got {comm!r}')
        return Solo()
    if hasattr(comm, "library"):  # of ranks without MPI
        return World(comm, doing)
    found = launcher()
    job = announced() if comm is None else None
    running = _running_mpi()
    if job is not None and (running is None or running.COMM_WORLD.Get_size() == 1):
        if why := "it was forked from one that is" if any(_parents) else inherited():
            raise LauncherError(f"this process ({job.where}) is no rank: {why}", hint=_ALONE_HINT)
        if job.names[0] == "RANK" or not _sees_others():
            from pario.comm.star import join

            return World(join(job, doing).COMM_WORLD, doing)
    torch = torch_ranks() if comm is None else ""
    if torch and (started_by_torch() or not found.where) and "mpi4py.MPI" not in sys.modules:
        raise _torch_error(torch)
    if comm is None and running is None and not found.where:
        return Solo()
    if why := "it was forked from a process that uses MPI" if any(_parents) else "" if running else inherited():
        if comm is None and (found.size == 1 or not found.where):
            return Solo()
        what = f"this process ({found.where or 'without a launcher'}) is no rank of MPI: {why}"
        raise LauncherError(what, hint=_ALONE_HINT)
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
        unset = " ".join(f"-u {part.partition('=')[0]}" for part in found.where.split(", "))
        alone = f'To run every process for itself pass comm="self", or start it by `env {unset} python ...`'
        raise LauncherError(
            f"{found.name} started {found.size} processes ({found.where}), but every one of them is alone: "
            f"MPI_COMM_WORLD has size 1. mpi4py loaded {name} {'.'.join(map(str, version))}, and the launcher belongs "
            "to another MPI",
            hint=f"{FIT_HINT}. {alone}",
        )
    if torch and MPI.COMM_WORLD.Get_size() == 1:
        raise _torch_error(torch)
    return World(MPI.COMM_WORLD if comm is None else comm, doing)


def _sees_others() -> bool:
    """Whether MPI sees the other processes of srun, although this has set no variables of a PMI."""
    try:
        return bool(load_mpi().COMM_WORLD.Get_size() > 1)
    except (ImportError, RuntimeError, LauncherError):
        return False


def same_ranks(world: AnyWorld) -> AnyWorld:
    """Another world of the same ranks and nodes, whose memory goes back when it is freed. Collective over `world`."""
    return World(world.comm) if isinstance(world, World) else Solo()


def bcast_to_nodes(world: AnyWorld, memory: np.ndarray, node: int) -> None:
    """`memory`, u8[n] that the ranks of a node share, from `node` into that of all others, of the same length.

    Collective; the ranks of a node must meet before it, when `node` has written, and after it, before they read.
    """
    if isinstance(world, World) and world.nodes > 1 and world._leaders is not None:
        world._leaders.bcast_bytes(memory, node)


def ranks_in(world: AnyWorld, comm: Any, name: str) -> tuple[int, ...]:
    """The ranks in `world` of the processes of `comm`, in the order of `comm`. Not collective.

    comm : an mpi4py intra-communicator, or these ranks; `name` is that of the argument, for errors
    Raises OptionError, also if one of the processes does not belong to the world.
    """
    if isinstance(comm, (list, tuple)) and all(each in range(world.size) for each in comm):
        return tuple(map(int, comm))
    MPI = getattr(comm, "library", None) or _running_mpi()
    if MPI is None or not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise OptionError(f"{name} must be an mpi4py intra-communicator, or a list of ranks of comm, got {comm!r}")
    if world.mpi is None:
        if comm.Get_size() > 1:
            raise OptionError(f"{name} has {comm.Get_size()} ranks, comm this process alone")
        return (0,)
    theirs = _job_ranks(MPI, comm)
    for one, rank in enumerate(theirs):
        if rank not in world.job_ranks:
            raise OptionError(f"rank {one} of {name} is no rank of comm")
    return tuple(map(world.job_ranks.index, theirs))


def _job_ranks(MPI: Any, comm: Any) -> tuple[int, ...]:
    """The ranks in COMM_WORLD of those of `comm`."""
    group, job = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    try:
        return tuple(MPI.Group.Translate_ranks(group, list(range(comm.Get_size())), job))
    finally:
        group.Free()
        job.Free()


def leave_mpi() -> None:
    """Finalize MPI, if it runs: this process needs it no more, and nobody is to wait for it later. Collective over all
    processes of MPI."""
    running = _running_mpi()
    if running is not None:
        running.Finalize()


def _running_mpi() -> Any:
    """mpi4py.MPI between MPI_Init and MPI_Finalize, else None."""
    loaded = sys.modules.get("mpi4py.MPI")
    return loaded if loaded is not None and loaded.Is_initialized() and not loaded.Is_finalized() else None


#: After a fork: MPI, if it ran in the parent, or what stood for it. The child must not call it: it would speak in the
#: parent's name.
_parents: list[Any] = []


def _forked() -> None:
    star = sys.modules.get("pario.comm.star")
    _parents.append(_running_mpi() or (star and star.running()))


os.register_at_fork(after_in_child=_forked)


def _torch_error(ranks: str) -> LauncherError:
    """Every process would read all records, and train on them, without a word."""
    return LauncherError(
        f"a launcher of torch started several processes ({ranks}), and RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
        "do not all say how they find each other: every one would read all records",
        hint="Set them, or start the script by torchrun, mpiexec or srun (docs/clusters.md#without-mpi); if each "
        'process is to read everything, or WORLD_SIZE is left over from another program, pass comm="self"',
    )
