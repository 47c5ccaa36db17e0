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

import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from pario.adapters.by_batch import Batches, BatchSampler, as_it_is
from pario.adapters.sampling import prefetching
from pario.checkpoint.checkpointer import Checkpointer as NumpyCheckpointer
from pario.checkpoint.dtypes import FOREIGN, dtype_name, dtype_of
from pario.checkpoint.tree import PAGE, Leaves, Shard
from pario.comm.launcher import own_addresses
from pario.comm.world import get_world
from pario.errors import OptionError
from pario.fetch.resolve import Paths
from pario.loader.loader import Loader as NumpyLoader
from pario.records import Batch

__all__ = ["Checkpointer", "Loader", "prefetching", "use_mpi_ranks"]

Tensors = dict[str, Any]
Form = str | Callable[[Tensors], Any]

_FORMS = ("dict", "tuple")


class Link(Protocol):
    """The way of tensors to a device. `ahead`: how many batches are on their way while the script works on another."""

    ahead: int

    def send(self, tensors: Tensors) -> Any:
        """Begin to copy."""

    def receive(self, sent: Any) -> Tensors:
        """The tensors on the device, ready for the current stream."""


class Loader:
    """`pario.Loader` that gives tensors. Collective where that one is; see there for all other arguments.

    Parameters
    ----------
    path, batch_size, decoder, **options : see `pario.Loader`
    form : "dict": a dict of tensors by name. "tuple": the tensors in the order of the dict. A function: it gets that
        dict (on the device) and returns what the loop is to get
    ids : name under which the record ids, i64[b], come with the other tensors; None leaves them out
    device : where the tensors are to be. None or "cpu": they share memory with the batch, nothing is copied. A CUDA
        device: each batch is copied to pinned memory and from there in a stream of its own, while the script works on
        the batch before it. Any other device: copied when the batch is taken

    A tensor keeps its memory for as long as anything refers to it: batches may be kept. Arrays that torch has no dtype
    for (strings, objects) stay as they are; numbers of foreign byte order are converted.

    `len(loader)` is the number of batches of a whole epoch, also after `load_state_dict`. The loop of an epoch begins
    with its first batch: `iter()` alone does nothing. `set_epoch` keeps the position of a state of that epoch which has
    just been loaded, so that a script may call it before every loop.

    `loader.loader` is the `pario.Loader`, for its report, keys and stats.
    """

    def __init__(
        self,
        path: Paths,
        batch_size: int,
        decoder: Any = None,
        *,
        form: Form = "dict",
        ids: str | None = None,
        device: str | torch.device | None = None,
        **options: Any,
    ) -> None:
        if not callable(form) and form not in _FORMS:
            raise OptionError(f'form must be "dict", "tuple" or a function of a dict of tensors, got {form!r}')
        self.batch_size = batch_size
        self._form = form
        self._ids = ids
        self._device = torch.device("cpu" if device is None else device)
        self._own_comm = options.get("comm") is not None
        self._sequential = not options.get("shuffle") and options.get("weights") is None
        self.loader = NumpyLoader(path, batch_size, decoder, **options)
        self._link = _link(self._device)
        #: state of the last batch that was handed out, while others are on their way to the device
        self._handed_out: dict[str, Any] | None = None
        self._batches: Callable[[], Iterator[Batch] | None] = lambda: None  # those of the loop, while somebody has it
        self._loaded = False  # a state was loaded, and no loop has begun since
        self._foreign_ranks = 0  # number of ranks that saved it, if that is another one
        # For Trainers that make a DataLoader out of this one.
        self.dataset, self.batch_sampler = Batches(self), BatchSampler(self)
        self.collate_fn, self.prefetch_factor = as_it_is, None

    def __len__(self) -> int:
        return self.loader.batches

    @property
    def sampler(self) -> Any:
        """A SequentialSampler if all epochs have the same batches; else what tells the epoch."""
        alike = self._sequential or self.batch_sampler.held is not None
        return torch.utils.data.SequentialSampler(self.dataset) if alike else self.batch_sampler

    @property
    def taken(self) -> int:
        """Batches of the epoch before the next loop's first one: 0, unless a state was loaded. In a loop that began
        there, the same number."""
        return self.loader.batches - len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        """An epoch, or the rest of one. Collective when the first batch is taken."""
        return self._epoch()

    def _epoch(self) -> Iterator[Any]:
        self._check_ranks()
        self._handed_out = None
        self._loaded, self._foreign_ranks = False, 0
        batches = iter(self.loader)
        self._batches = weakref.ref(batches)
        self._handed_out = self.loader.state_dict() if self._link.ahead else None
        for state, tensors in _sent_ahead(self._counted(batches), self._link):
            self._handed_out = state
            yield self._formed(tensors)
        self._handed_out = None

    def _counted(self, batches: Iterator[Batch]) -> Iterator[tuple[dict[str, Any] | None, Tensors]]:
        """(the loader's state after this batch, its tensors)"""
        for batch in batches:
            yield self.loader.state_dict() if self._link.ahead else None, self._tensors(batch)

    def _tensors(self, batch: Batch) -> Tensors:
        tensors = {name: as_tensor(value) for name, value in batch.items()}
        if self._ids is not None:
            if self._ids in tensors:
                raise OptionError(
                    f"ids={self._ids!r} is the name of an array of the decoder ({', '.join(tensors)})",
                    hint="Choose another name for the record ids.",
                )
            tensors[self._ids] = as_tensor(batch.ids)
        return tensors

    def _formed(self, tensors: Tensors) -> Any:
        if callable(self._form):
            return self._form(tensors)
        return tensors if self._form == "dict" else tuple(tensors.values())

    def _check_ranks(self) -> None:
        """Raise if torch trains on more or fewer processes than pario feeds: each record would come several times, or
        not at all."""
        if self._own_comm or not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return
        here, theirs = self.loader.world.size, torch.distributed.get_world_size()
        if here != theirs:
            raise OptionError(
                f"torch.distributed has {theirs} ranks, and this loader {here}",
                hint=f"Start the script by `mpiexec -n {theirs} python ...` or srun, so that pario sees all ranks "
                "(docs/pytorch.md); to feed a part of them, pass its communicator as comm=",
            )

    def peek(self) -> Any:
        """The batch that this rank gets next, without using it up; see `pario.Loader.peek`. Not collective."""
        return self._formed(self._link.receive(self._link.send(self._tensors(self.loader.peek()))))

    # -- its position ----------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that is running, or else the next one."""
        if self._handed_out is None or self._batches() is None:
            return self.loader.epoch
        return int(self._handed_out["epoch"])

    def set_epoch(self, epoch: int, batch: int = 0) -> None:
        """Let the next loop run this epoch: from this batch, or, if that is 0, from where a state of this epoch, loaded
        just before, says. Call it on every rank."""
        if batch or not (self._loaded and self.loader.epoch == epoch):
            self._handed_out = None
            self._loaded, self._foreign_ranks = False, 0
            self.loader.set_epoch(epoch, batch)

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch that the loop has got: that of `pario.Loader`, and `ranks`, the number of
        ranks (or of groups that share a batch) that it was saved on. The same on every rank."""
        state = self.loader.state_dict() if self._handed_out is None else self._handed_out
        return {**state, "ranks": self.loader.groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next loop continue after the batch at which `state` was taken, on any number of ranks. A state of
        `pario.Loader` will do as well. Call it on every rank."""
        position = dict(state)
        ranks = position.pop("ranks", self.loader.groups)
        self.loader.load_state_dict(position)
        self._handed_out = None
        self._loaded, self._foreign_ranks = True, ranks if ranks != self.loader.groups else 0

    # -- its end ---------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """See `pario.Loader.close`. Collective."""
        self.loader.close()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: Any) -> None:
        self.loader.__exit__(*error)

    def __repr__(self) -> str:
        form = self._form if isinstance(self._form, str) else getattr(self._form, "__name__", "function")
        return f"<tensors ({form}) on {self._device} of {self.loader!r}>"


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


def _link(device: torch.device) -> Link:
    return CudaLink(device) if device.type == "cuda" else PlainLink(device)


class PlainLink(Link):
    """Copies when the batch is taken; on the CPU there is nothing to copy."""

    ahead = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def send(self, tensors: Tensors) -> Tensors:
        return tensors

    def receive(self, sent: Tensors) -> Tensors:
        return sent if self._device.type == "cpu" else each_tensor(lambda t: t.to(self._device), sent)


class _Sent(NamedTuple):
    """Tensors on the device, and the event after which they are there."""

    tensors: Tensors
    there: Any


class CudaLink(Link):
    """Copies from pinned memory in a stream of its own, one batch ahead.

    torch's allocator of pinned memory uses a block again only when the copies out of it have ended, so the batch's own
    memory is free as soon as `send` returns. On the device `record_stream` does the same for the stream that computes.
    """

    ahead = 1

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def send(self, tensors: Tensors) -> _Sent:
        pinned = each_tensor(lambda t: t.pin_memory(), tensors)
        with torch.cuda.stream(self._stream):
            moved = each_tensor(lambda t: t.to(self._device, non_blocking=True), pinned)
            return _Sent(moved, self._stream.record_event())

    def receive(self, sent: _Sent) -> Tensors:
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(sent.there)
        each_tensor(lambda t: t.record_stream(stream), sent.tensors)
        return sent.tensors


def _sent_ahead(batches: Iterable[tuple[Any, Tensors]], link: Link) -> Iterator[tuple[Any, Tensors]]:
    """The same pairs, the tensors on the device: while the script works on one batch, `link.ahead` others travel."""
    under_way: list[tuple[Any, Any]] = []
    for state, tensors in batches:
        under_way.append((state, link.send(tensors)))
        if len(under_way) > link.ahead:
            first, sent = under_way.pop(0)
            yield first, link.receive(sent)
    for state, sent in under_way:
        yield state, link.receive(sent)


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
        world.free()


def _meeting(nodes: int) -> tuple[str, str]:
    """Address and free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    if nodes == 1:
        return "127.0.0.1", port
    return next(iter(own_addresses()), socket.gethostname()), port


# -- tensors in checkpoints --------------------------------------------------------------------------------------------


class _Tensors(Leaves):
    """Tensors of any device; what was saved as a tensor or as an array is restored as a tensor. A DTensor is the Shard
    that its mesh gives this rank."""

    def opened(self, node: Any) -> tuple[Any, Callable[[Any], Any]] | None:
        if not isinstance(node, torch.Tensor) or not _is_dtensor(node):
            return None
        if any(each.is_partial() for each in node.placements):
            raise OptionError(f"a DTensor of placements {node.placements} holds sums that are not added up yet")
        shape, mesh = tuple(node.shape), node.device_mesh
        if mesh.get_coordinate() is None:  # this rank has nothing of it
            if not shape:
                raise OptionError("a DTensor without axes cannot be saved where not all ranks hold it")
            return Shard(torch.empty([0] * len(shape), dtype=node.dtype), shape, (0,) * len(shape)), lambda _: node
        local, chunks = node.detach().to_local(), node.__create_chunk_list__()
        if len(chunks) != 1 or chunks[0].sizes != local.shape:
            raise OptionError(f"a DTensor of placements {node.placements} gives this rank no part that is one box")

        def closed(made: torch.Tensor) -> torch.Tensor:
            shapes = {"shape": node.shape, "stride": node.stride()}
            return type(node).from_local(made, mesh, node.placements, run_check=False, **shapes)

        return Shard(local, shape, chunks[0].offsets), closed

    def wanted(self, leaf: Any) -> tuple[str, tuple[int, ...]] | None:
        if isinstance(leaf, torch.Tensor) and leaf.is_meta and not _is_wrapped(leaf):
            return _type_name(leaf.dtype), tuple(leaf.shape)
        return self.describe(leaf)

    def describe(self, leaf: Any) -> tuple[str, tuple[int, ...]] | None:
        if not isinstance(leaf, torch.Tensor):
            return super().describe(leaf)
        if _is_wrapped(leaf):
            what = f"a {type(leaf).__qualname__} is no plain tensor, and nothing says how to read it back"
            raise OptionError(what, hint="Save the tensors that it is made of; a DTensor not in a Shard")
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_nested or leaf.is_meta:
            raise OptionError(f"a tensor of layout {leaf.layout} on {leaf.device} cannot be saved")
        return _type_name(leaf.dtype), tuple(leaf.shape)

    def copy(self, leaf: Any, target: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            _tensor_over(target, leaf.dtype).copy_(leaf.detach())
        else:
            super().copy(leaf, target)

    def copy_run(self, leaf: Any, start: int, stop: int, target: Any) -> None:
        if isinstance(leaf, torch.Tensor):
            _tensor_over(target, leaf.dtype).copy_(leaf.detach().reshape(-1)[start:stop])
        else:
            super().copy_run(leaf, start, stop, target)

    def held(self, leaf: Any, begin: int, step: int) -> tuple[np.ndarray, np.ndarray]:
        if not isinstance(leaf, torch.Tensor):
            return super().held(leaf, begin, step)
        flat = leaf.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
        whole = flat.numel() // PAGE * PAGE
        # Pages are picked on the device: the others do not cross the bus.
        return flat[:whole].reshape(-1, PAGE)[begin::step].cpu().numpy(), flat[whole:].cpu().numpy()

    def build(self, memory: np.ndarray, dtype: str, shape: tuple[int, ...], like: Any) -> Any:
        if isinstance(like, np.ndarray | np.generic) or dtype not in _TORCH:
            return super().build(memory, dtype, shape, like)
        array = memory.view(dtype_of(dtype)).reshape(shape)
        tensor = _tensor_over(array, _TORCH[dtype])
        return tensor.to(like.device) if isinstance(like, torch.Tensor) and not like.is_meta else tensor


class Checkpointer(NumpyCheckpointer):
    """`pario.Checkpointer` for trees with tensors: `model.state_dict()`, `optimizer.state_dict()`, Shard(tensor, ...).

    Tensors come back on the CPU, or on the device of the tensor in `like`; NumPy arrays come back as tensors, unless
    `like` has an array there. Tensors of an accelerator are copied when `save` returns.

    Of a DTensor (FSDP2, tensor parallel) each rank saves its part. It comes back as a DTensor of the mesh and the
    placements that `like` has there, whatever those were that saved it, and without `like` as a whole tensor. The ranks
    of its mesh are those of the Checkpointer.
    """

    leaves = _Tensors()


def _is_dtensor(tensor: torch.Tensor) -> bool:
    """There is none while nobody has loaded the class."""
    module = sys.modules.get("torch.distributed.tensor") or sys.modules.get("torch.distributed._tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _is_wrapped(tensor: torch.Tensor) -> bool:
    """Whether it is no memory of its own: its class answers for what is done with it."""
    return type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def _torch_types() -> dict[str, torch.dtype]:
    names = ("float16", "float32", "float64", "complex64", "complex128", "uint8", "int8", "int16", "int32", "int64")
    known = {dtype_name(np.dtype(name)): getattr(torch, name) for name in names} | {"|b1": torch.bool}
    unsigned = {f"<u{n}": getattr(torch, f"uint{8 * n}") for n in (2, 4, 8) if hasattr(torch, f"uint{8 * n}")}
    foreign = {name: getattr(torch, name) for name in FOREIGN if hasattr(torch, name) and "int" not in name}
    return known | unsigned | foreign


_TORCH = {name: dtype for name, dtype in _torch_types().items() if type(dtype) is torch.dtype}
_NAMES = {dtype: name for name, dtype in _TORCH.items()}


def _type_name(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise OptionError(f"tensors of {dtype} cannot be saved")
    return _NAMES[dtype]


def _tensor_over(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over that memory."""
    flat = torch.from_numpy(array.reshape(-1).view(np.uint8)) if array.size else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(array.shape)
