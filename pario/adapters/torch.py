"""The Loader for PyTorch: tensors over the batch's own memory, or copied to an accelerator one batch ahead.

    from pario.adapters.torch import Loader

    with Loader("train.lmdb", 64, pario.decode.Datum(), shuffle="global", device="cuda") as loader:
        for epoch in range(90):
            for batch in loader:                     # dict of tensors on the device
                step(batch["data"], batch["label"])

The ranks are MPI's, as for `pario.Loader`; `use_mpi_ranks()` tells torch.distributed about them. docs/pytorch.md has
whole scripts for plain DDP, Lightning and Accelerate.
"""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np
import torch

from pario.adapters.by_batch import Batches, BatchSampler, as_it_is, with_ids
from pario.adapters.sampling import prefetching
from pario.adapters.torch_checkpoint import Checkpointer
from pario.comm.launcher import own_addresses
from pario.comm.world import get_world
from pario.errors import OptionError
from pario.fetch.resolve import Paths
from pario.loader.loader import Loader as NumpyLoader
from pario.records import Batch

if TYPE_CHECKING:
    from typing_extensions import TypeVar, Unpack

    from pario.loader.keywords import Keywords
    from pario.plan.budget import Budget

    B = TypeVar("B", default=dict[str, torch.Tensor])

    class _Keywords(Keywords, total=False):
        ids: str | None
        device: str | torch.device | None

else:
    from typing import TypeVar

    B = TypeVar("B")

_log = logging.getLogger("pario")

__all__ = ["Checkpointer", "Loader", "prefetching", "use_mpi_ranks"]

Tensors = dict[str, Any]


class Loader(NumpyLoader[B]):
    """A `pario.Loader` that gives tensors. Collective where that one is; see there for all other arguments, methods and
    properties.

    Parameters
    ----------
    path, batch_size, decoder, **options : see `pario.Loader`
    form : "dict": a dict of tensors by name. "tuple": the tensors in the order of the dict, for `x, y = batch`. A
        function: it gets that dict (on the device) and returns what the loop is to get
    ids : name under which the record ids, i64[b], come with the other tensors; None leaves them out
    device : where the tensors are to be. None or "cpu": they share memory with the batch, nothing is copied. A CUDA
        device: each batch is decoded into pinned memory and copied from there in a stream of its own, while the script
        works on the batch before it. Any other device: copied when the batch is taken

    A tensor keeps its memory for as long as anything refers to it: batches may be kept. Arrays that torch has no dtype
    for (strings, objects) stay as they are; numbers of foreign byte order are converted.

    `len(loader)` is the number of batches of a whole epoch, also after `load_state_dict`. The loop of an epoch begins
    with its first batch: `iter()` alone does nothing. `set_epoch` keeps the position of a state of that epoch which has
    just been loaded, so that a script may call it before every loop.
    """

    # What the loop gets is the parameter of the loader's type.
    @overload
    def __init__(
        self: Loader[dict[str, torch.Tensor]], path: Paths, batch_size: int | Budget, decoder: Any = None, *,
        form: Literal["dict"] = "dict", **options: Unpack[_Keywords],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: Loader[tuple[torch.Tensor, ...]], path: Paths, batch_size: int | Budget, decoder: Any = None, *,
        form: Literal["tuple"], **options: Unpack[_Keywords],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self, path: Paths, batch_size: int | Budget, decoder: Any = None, *,
        form: Callable[[dict[str, torch.Tensor]], B], **options: Unpack[_Keywords],
    ) -> None: ...  # fmt: skip
    def __init__(
        self,
        path: Paths,
        batch_size: int | Budget,
        decoder: Any = None,
        *,
        form: str | Callable[[Tensors], Any] = "dict",
        ids: str | None = None,
        device: str | torch.device | None = None,
        **options: Unpack[Keywords],
    ) -> None:
        if not callable(form) and form not in ("dict", "tuple"):
            raise OptionError(f'form must be "dict", "tuple" or a function of a dict of tensors, got {form!r}')
        self.batch_size = batch_size
        self._form = form
        self._ids = ids
        self._device = torch.device("cpu" if device is None else device)
        self._own_comm = options.get("comm") is not None
        self._sequential = not options.get("shuffle") and options.get("weights") is None
        super().__init__(path, batch_size, decoder, **options)
        self._link = (CudaLink if self._device.type == "cuda" else Link)(self._device)
        self._supply.context.decode.held.allocate = self._link.memory  # before the first batch
        #: state of the last batch that was handed out, while others are on their way to the device
        self._handed_out: dict[str, Any] | None = None
        self._batches: Callable[[], Iterator[Batch] | None] = lambda: None  # those of the loop, while somebody has it
        self._loaded = False  # a state was loaded, and no loop has begun since
        self._foreign_ranks = 0  # number of ranks that saved it, if that is another one
        # For Trainers that make a DataLoader out of this one.
        self.dataset, self.batch_sampler = Batches(self), BatchSampler(self)
        self.collate_fn, self.prefetch_factor = as_it_is, None

    def __len__(self) -> int:
        return self.batches

    @property
    def sampler(self) -> Any:
        """A SequentialSampler if all epochs have the same batches; else what tells the epoch."""
        alike = self._sequential or self.batch_sampler.held is not None
        return torch.utils.data.SequentialSampler(self.dataset) if alike else self.batch_sampler

    @property
    def taken(self) -> int:
        """Batches of the epoch before the next loop's first one: 0, unless a state was loaded. In a loop that began
        there, the same number."""
        return self.batches - super().__len__()

    def __iter__(self) -> Iterator[B]:
        """An epoch, or the rest of one. Collective when the first batch is taken."""
        self._check_ranks()
        self._handed_out = None
        self._loaded, self._foreign_ranks = False, 0
        batches: Iterator[Any] = super().__iter__()
        self._batches = weakref.ref(batches)
        self._handed_out = super().state_dict() if self._link.ahead else None
        for state, tensors in _sent_ahead(self._counted(batches), self._link):
            self._handed_out = state
            yield self._formed(tensors)
        self._handed_out = None

    def _counted(self, batches: Iterator[Batch]) -> Iterator[tuple[dict[str, Any] | None, Tensors]]:
        """(the loader's state after this batch, its tensors)"""
        for batch in batches:
            yield super().state_dict() if self._link.ahead else None, self._tensors(batch)

    def _tensors(self, batch: Batch) -> Tensors:
        return {name: as_tensor(value) for name, value in with_ids(batch, self._ids).items()}

    def _formed(self, tensors: Tensors) -> Any:  # B
        if callable(self._form):
            return self._form(tensors)
        return tensors if self._form == "dict" else tuple(tensors.values())

    def _check_ranks(self) -> None:
        """Raise if torch trains on more or fewer processes than pario feeds: each record would come several times, or
        not at all."""
        if self._own_comm or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        here, theirs = self.world.size, torch.distributed.get_world_size()
        if here != theirs:
            raise OptionError(
                f"torch.distributed has {theirs} ranks, and this loader {here}",
                hint=f"Start the script by `mpiexec -n {theirs} python ...` or srun, so that pario sees all ranks "
                "(docs/pytorch.md); to feed a part of them, pass its communicator as comm=",
            )

    def peek(self) -> B:
        """The batch that this rank gets next, without using it up; see `pario.Loader.peek`. Not collective. In a loop
        that copies to a device, where one batch is on its way already: the one after that."""
        _, tensors = next(_sent_ahead([(None, self._tensors(self._progress.peek()))], self._link))
        return self._formed(tensors)

    # -- its position ----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that is running, or else the next one."""
        if self._handed_out is None or self._batches() is None:
            return super().epoch
        return int(self._handed_out["epoch"])

    def set_epoch(self, epoch: int, batch: int = 0) -> None:
        """Let the next loop run this epoch: from this batch, or, if that is 0, from where a state of this epoch, loaded
        just before, says. Call it on every rank."""
        if batch or not (self._loaded and super().epoch == epoch):
            self._handed_out = None
            self._loaded, self._foreign_ranks = False, 0
            super().set_epoch(epoch, batch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that the loop has got: that of `pario.Loader`, and `ranks`, the number of
        ranks (or of groups that share a batch) that it was saved on. The same on every rank."""
        state = super().state_dict() if self._handed_out is None else self._handed_out
        return {**state, "ranks": self.groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop continue after the batch at which `state` was taken, on any number of ranks. A state of
        `pario.Loader` will do as well. Call it on every rank."""
        position = dict(state)
        ranks = position.pop("ranks", self.groups)
        super().load_state_dict(position)
        self._handed_out = None
        self._loaded, self._foreign_ranks = True, ranks if ranks != self.groups else 0

    def __repr__(self) -> str:
        form = self._form if isinstance(self._form, str) else getattr(self._form, "__name__", "function")
        return f"<tensors ({form}) on {self._device} of {super().__repr__()}>"


# -- tensors -------------------------------------------------------------------------------------------------------


def as_tensor(value: Any) -> Any:
    """A tensor over the memory of a numpy array; arrays inside dicts, lists and tuples likewise. What torch has no
    dtype for stays as it is."""
    if not isinstance(value, np.ndarray):
        return _mapped(as_tensor, value)
    if value.dtype.kind not in "biufc" or value.dtype.itemsize > 16 or value.dtype == np.longdouble:
        return value
    return torch.from_numpy(value if value.dtype.isnative else value.astype(value.dtype.newbyteorder("=")))


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The function's results for what a dict, list or tuple holds; anything else as it is."""
    if isinstance(value, dict):
        return {name: function(one) for name, one in value.items()}
    if isinstance(value, tuple):
        made = [function(one) for one in value]
        return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
    return [function(one) for one in value] if isinstance(value, list) else value


def each_tensor(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same structure with each tensor t replaced by function(t)."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return _mapped(lambda one: each_tensor(function, one), value)


# -- to the device -------------------------------------------------------------------------------------------------


class Link:
    """The way of tensors to a device: copies when the batch is taken; on the CPU there is nothing to copy. `ahead`: how
    many batches are on their way while the script works on another."""

    ahead = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def memory(self, nbytes: int) -> np.ndarray:
        """u8[nbytes] for batches, uninitialised."""
        return np.empty(nbytes, np.uint8)

    def send(self, tensors: Tensors) -> Any:
        """Begin to copy."""
        return tensors

    def receive(self, sent: Any) -> Tensors:
        """The tensors on the device, ready for the current stream."""
        return sent if self._device.type == "cpu" else each_tensor(lambda t: t.to(self._device), sent)

    def finish(self, most: int = 0) -> None:
        """Let go of what has been copied, and wait for the oldest copy while more than `most` are under way."""


#: Batches that are copied to a device at the same time, at most: each keeps its memory on this side until it is there.
_COPIES = 2


class CudaLink(Link):
    """Copies from pinned memory in a stream of its own, one batch ahead.

    Batches are decoded into pinned memory (`memory`), and what does not lie there is copied to some. torch does not
    know of copies out of arrays in such memory: their tensors are kept until the copies have ended, because a block
    that nobody refers to gets the next batch. On the device `record_stream` does the same for the stream that computes.
    """

    ahead = 1

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)
        self._under_way: deque[tuple[Tensors, torch.cuda.Event]] = deque()  # what is copied, and when it has been
        self._pins = True  # until the system refuses

    def memory(self, nbytes: int) -> np.ndarray:
        """Pinned."""
        return self._pinned(torch.empty(nbytes, dtype=torch.uint8, device="cpu")).numpy()

    def send(self, tensors: Tensors) -> tuple[Tensors, torch.cuda.Event]:
        """(the tensors on the device, the event after which they are there)"""
        self.finish(_COPIES - 1)
        pinned = each_tensor(self._pinned, tensors)
        with torch.cuda.stream(self._stream):
            try:
                moved = each_tensor(lambda t: t.to(self._device, non_blocking=True), pinned)
            finally:  # if the device has no memory for one tensor, the others are under way
                there = self._stream.record_event()
                self._under_way.append((pinned, there))
        return moved, there

    def receive(self, sent: tuple[Tensors, torch.cuda.Event]) -> Tensors:
        tensors, there = sent
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(there)
        each_tensor(lambda t: t.record_stream(stream), tensors)
        return tensors

    def finish(self, most: int = 0) -> None:
        while self._under_way and (len(self._under_way) > most or self._under_way[0][1].query()):
            self._under_way[0][1].synchronize()
            self._under_way.popleft()

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if it is pinned and its elements lie in memory without gaps, in any order; else a copy that
        is and does: others torch would copy through memory that is not pinned."""
        if not tensor.is_contiguous() and tensor.stride() != torch.empty_like(tensor, device="meta").stride():
            tensor = tensor.clone()
        try:
            return tensor.pin_memory() if self._pins else tensor
        except RuntimeError as e:
            self._pins = False
            _log.warning("copies to %s go out of ordinary memory, which takes longer: %s", self._device, e)
            return tensor


def _sent_ahead(batches: Iterable[tuple[Any, Tensors]], link: Link) -> Iterator[tuple[Any, Tensors]]:
    """The same pairs, the tensors on the device: while the script works on one batch, `link.ahead` others travel."""
    under_way: list[tuple[Any, Any]] = []
    try:
        for state, tensors in batches:
            under_way.append((state, link.send(tensors)))
            if len(under_way) > link.ahead:
                first, sent = under_way.pop(0)
                yield first, link.receive(sent)
                link.finish(link.ahead)  # the next batch may get the memory of those that are there
        for state, sent in under_way:
            yield state, link.receive(sent)
    finally:
        link.finish()


# -- ranks ---------------------------------------------------------------------------------------------------------


def use_mpi_ranks(comm: Any = None) -> tuple[int, int]:
    """Tell torch which rank this process is: (rank, number of ranks). Collective over `comm`.

    comm : an mpi4py communicator; None: COMM_WORLD under a launcher, else this process alone

    Sets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, NODE_RANK, MASTER_ADDR and MASTER_PORT, as torchrun would. Call
    it before `torch.distributed.init_process_group()` or `accelerate.Accelerator()`. If MASTER_ADDR and MASTER_PORT are
    set on rank 0, they stay; else all ranks meet at a free port of rank 0's machine.
    """
    world = get_world(comm)
    try:
        given = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
        meeting = world.bcast(given if all(given) else _meeting(world.nodes) if world.rank == 0 else None)
        os.environ.update(
            RANK=str(world.rank),
            WORLD_SIZE=str(world.size),
            LOCAL_RANK=str(world.node_rank),
            LOCAL_WORLD_SIZE=str(world.node_size),
            NODE_RANK=str(world.node),
            MASTER_ADDR=meeting[0],
            MASTER_PORT=meeting[1],
        )
        return world.rank, world.size
    finally:
        world.close()


def _meeting(nodes: int) -> tuple[str, str]:
    """Address and free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    if nodes == 1:
        return "127.0.0.1", port
    return next(iter(own_addresses()), socket.gethostname()), port
