"""What World and Solo have in common: the ranks of one communicator, and their nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from pario.errors import ClosedError, OptionError

if TYPE_CHECKING:
    from pario.comm.agree import Alarm

T = TypeVar("T")


class AnyWorld:
    """Ranks that work together. What stands here is one process that is its own node, without other ranks: `Solo`.
    `World` has several. Higher rooms do not ask which of the two they have.

    "Collective" means that every rank of the world calls the method, in the same order. Every collective may raise
    PeerError (another rank failed, or its script has ended) and DeadRankError (another rank's process is gone).

    Attributes
    ----------
    size, rank : number of ranks of the communicator, and this rank
    nodes, node : number of nodes, and this rank's node; nodes are ordered by their lowest rank
    node_size, node_rank : number of ranks of this node, and this rank among them (in the order of `rank`)
    node_ranks : tuple of int, `rank` of every rank of this node
    is_leader : node_rank == 0
    job_ranks : tuple of int, the rank in its job of every rank
    seat : this rank's position if ranks are ordered node by node; node_seat: the first seat of this node
    alarm : reaches the other ranks at any time; every wait for them listens to it
    alive_seconds : how often a waiting rank checks whether the others still live
    on_wait, on_late : called now and then while this rank waits for others; may raise. on_late: in a roll call
    mpi : mpi4py.MPI, or what stands for it (star.py); None for one process alone, which has no `comm`, the private
        duplicate of the communicator
    """

    size = nodes = node_size = 1
    rank = node = node_rank = node_seat = seat = 0
    is_leader = True
    node_ranks: tuple[int, ...] = (0,)
    job_ranks: tuple[int, ...] = (0,)
    alarm: Alarm
    alive_seconds = 1.0
    on_wait: Callable[[], None] | None = None
    on_late: Callable[[], None] | None = None
    mpi: Any = None
    _freed = False

    def __enter__(self) -> AnyWorld:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(collective=kind is None)

    def barrier(self) -> None:
        """Wait for all ranks. Collective."""
        check_open(self)

    def node_barrier(self) -> None:
        """Wait for the ranks of this node. Collective over the node."""
        check_open(self)

    def bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Any picklable object from rank `root`. Collective."""
        check_open(self)
        return obj

    def node_bcast(self, obj: Any = None, root: int = 0) -> Any:
        """Any picklable object from node rank `root` to its node. Collective over the node."""
        return self.bcast(obj)

    def allgather(self, obj: Any) -> list[Any]:
        """One picklable object per rank, in rank order. Collective."""
        check_open(self)
        return [obj]

    def exscan(self, value: int) -> int:
        """Sum of the values of all lower ranks; 0 on rank 0. Collective."""
        check_open(self)
        return 0

    def allreduce_sum(self, value: int) -> int:
        """The sum of every rank's `value`. Collective."""
        check_open(self)
        return int(value)

    def allreduce_max(self, value: int) -> int:
        """The largest of every rank's `value`. Collective."""
        check_open(self)
        return int(value)

    def allreduce_min(self, value: int) -> int:
        """The smallest of every rank's `value`. Collective."""
        check_open(self)
        return int(value)

    def gather_array(self, a: np.ndarray, root: int = 0) -> np.ndarray | None:
        """The ranks' 1-d arrays one after another, in rank order, on rank `root`; None elsewhere. Collective.

        Lengths may differ, the dtype may not. An error is raised on all ranks.
        """
        check_open(self)
        return array_of_one_dimension(a).copy()

    def share_array(self, a: np.ndarray | None) -> np.ndarray:
        """Rank 0's array as a read-only array on all ranks, one copy per node. Collective; an error is raised on all.

        `a` is ignored on the other ranks. Any shape; any dtype without Python objects.
        """
        check_open(self)
        if a is None:
            raise OptionError("share_array needs the array on rank 0, got None")
        view = a.view()
        view.flags.writeable = False
        return view

    def shared_bytes(self, nbytes: int) -> np.ndarray:
        """u8[nbytes], zeroed and page-aligned, the same memory on all ranks of the node. Collective over the node.

        Raises ParioError on all ranks of the node if its shared memory is too small. Other nodes do not learn of it:
        agree afterwards.
        """
        raise NotImplementedError

    def check_alive(self, left: Callable[[int], bool] | None = None) -> None:
        """Raises DeadRankError if a rank of this node, or another node's leader, is known to be gone. Any thread.

        left : left(node rank) is true for ranks that have left on purpose
        """

    def agree(self, error: BaseException | None, doing: str) -> None:
        """Continue together or raise together. Collective.

        A rank with an error raises it. A rank without one raises PeerError if others have one; it names the first
        failing rank, what that rank was `doing`, and its error.
        """
        if error is not None:
            raise error

    def raised_by_all(self, error: BaseException) -> BaseException:
        """Returns `error`, for `raise`, when every rank raises its own error for a reason that all of them see. No MPI
        call."""
        return error

    def goodbye(self) -> Callable[[], bool]:
        """This rank's script has ended: announce it in place of its next collective, whichever that is. Does not wait.

        The returned function waits until all ranks have said goodbye or freed this world, and then returns True; it
        returns False if some ranks have called another collective, where they now raise PeerError.
        """
        return lambda: True

    def close(self, collective: bool = True) -> None:
        """The next World of these ranks may have its communicators; idempotent. Collective, unless `collective` is
        False.

        With collective=False (this rank is about to raise, and the others may be anywhere) it does not wait: the
        communicators stay until the process ends. Shared memory goes back with its last view, sooner or later.
        """
        self._freed = True

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks about `error`, which ends the work on this one, and free this rank's own resources.

        After an error that all ranks raised together, free everything, collectively.
        """
        self._freed = True


def check_open(world: AnyWorld) -> None:
    if world._freed:
        raise ClosedError(f"this {type(world).__name__} was freed")


@contextmanager
def together(world: AnyWorld, doing: str) -> Iterator[None]:
    """`with together(world, "reading the keys"):` runs its block on every rank; then all continue or all raise, as
    `AnyWorld.agree` says. Collective."""
    error: BaseException | None = None
    try:
        yield
    except BaseException as e:
        error = e
    world.agree(error, doing)


@contextmanager
def abandoning(ends: Any) -> Iterator[None]:
    """An error of the block ends this world, or what works on it: `ends.abandon(error)` tells the other ranks."""
    try:
        yield
    except BaseException as e:
        ends.abandon(e)
        raise


def on_root(world: AnyWorld, doing: str, work: Callable[[], T]) -> T:
    """What `work` returns on rank 0, for all ranks; if it fails, all raise as `together` says. Collective."""
    found: T | None = None
    with together(world, doing):
        if world.rank == 0:
            found = work()
    return cast(T, world.bcast(found))


def array_of_one_dimension(a: Any) -> np.ndarray:
    """`a`, if it is a 1-d array of plain values; otherwise raises OptionError."""
    if not isinstance(a, np.ndarray) or a.ndim != 1 or a.dtype.hasobject:
        raise OptionError(f"gather_array needs a 1-d numpy array without objects, got {getattr(a, 'dtype', type(a))}")
    return a
