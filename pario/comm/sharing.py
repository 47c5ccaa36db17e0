"""The ranks of a second communicator, as ranks of a world."""

from __future__ import annotations

from typing import Any

from pario.comm.base import AnyWorld
from pario.errors import OptionError

__all__ = ["ranks_in"]


def ranks_in(world: AnyWorld, comm: Any, name: str) -> tuple[int, ...]:
    """The ranks in `world` of the processes of `comm`, in the order of `comm`. Not collective.

    comm : an mpi4py intra-communicator; `name` is that of the argument, for errors
    Raises OptionError, also if one of the processes does not belong to the world.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        raise OptionError(f"{name} must be an mpi4py intra-communicator, got {comm!r}") from None
    if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
        raise OptionError(f"{name} must be an mpi4py intra-communicator, got {comm!r}")
    if world.mpi is None:
        if comm.Get_size() > 1:
            raise OptionError(f"{name} has {comm.Get_size()} ranks, comm this process alone")
        return (0,)
    theirs, mine = comm.Get_group(), world.comm.Get_group()  # type: ignore[attr-defined]
    try:
        found = MPI.Group.Translate_ranks(theirs, list(range(theirs.Get_size())), mine)
    finally:
        theirs.Free()
        mine.Free()
    missing = [one for one, rank in enumerate(found) if rank == MPI.UNDEFINED]
    if missing:
        raise OptionError(f"rank {missing[0]} of {name} is no rank of comm")
    return tuple(found)
