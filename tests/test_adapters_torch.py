"""The Loader for PyTorch in one process, its way to a device, and the scripts of docs/pytorch.md.

Needs torch, and runs by `-m frameworks`. What it does on several ranks: test_frameworks.py.
"""

from __future__ import annotations

import collections
import gc
import inspect
import os
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from launch import run_job
from required import framework

import pario
from pario.buffers import BatchBuffers
from pario.demo.train_digits import datum
from pario.errors import OptionError, StateError

pytestmark = pytest.mark.frameworks

N, BATCH = 53, 8
ROOT = Path(__file__).parents[1]
SCRIPTS = ["pytorch_ddp", "lightning_trainer", "accelerate_script", "jax_script", "tensorflow_script"]


@pytest.fixture(scope="module", autouse=True)
def torch() -> Any:
    framework("torch")
    import torch

    return torch


@pytest.fixture(scope="module")
def adapter(torch: Any) -> Any:
    import pario.adapters.torch

    return pario.adapters.torch


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = str(tmp_path_factory.mktemp("set") / "set.lmdb")
    with lmdb.open(place, map_size=1 << 22) as env, env.begin(write=True) as txn:
        for i in range(N):
            txn.put(b"%04d" % i, np.full(300, i, np.float32).tobytes())
    return place


def both(value: bytes) -> dict[str, Any]:
    row = np.frombuffer(value, np.float32)
    return {"x": row, "y": np.int64(row[0])}


def order(path: str, epoch: int) -> list[list[int]]:
    with pario.Loader(path, BATCH, both, shuffle="global", seed=1) as loader:
        loader.set_epoch(epoch)
        return [batch.ids.tolist() for batch in loader]


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_tensors_are_the_memory_of_the_batch_and_stay(adapter: Any, torch: Any, path: str) -> None:
    array = np.arange(6.0)
    assert adapter.as_tensor(array).data_ptr() == array.ctypes.data
    kept = []
    with adapter.Loader(path, BATCH, both, shuffle="global", ids="i") as loader:
        for _ in range(3):
            kept += list(loader)
    for batch in kept:
        assert (batch["x"].dtype, batch["y"].dtype, tuple(batch["x"].shape[1:])) == (torch.float32, torch.int64, (300,))
        assert (batch["x"] == batch["i"][:, None]).all()
        assert (batch["y"] == batch["i"]).all()
    assert sorted(i for batch in kept for i in batch["i"].tolist()) == sorted([*range(N)] * 3)


def test_forms(adapter: Any, path: str) -> None:
    with adapter.Loader(path, BATCH, both, form="tuple") as loader:
        for x, y in loader:
            assert (x[:, 0] == y).all()
        x, y = loader.peek()
        assert y.tolist() == list(range(BATCH))
    with adapter.Loader(path, BATCH, both, form=lambda t: [*t], ids="record") as loader:
        assert list(loader) == [["x", "y", "record"]] * len(loader)
        assert loader.peek() == ["x", "y", "record"]
    for wrong in ("list", 3):
        with pytest.raises(OptionError, match='"dict", "tuple" or a function'):
            adapter.Loader(path, BATCH, form=wrong)
    with adapter.Loader(path, BATCH, both, ids="y") as loader, pytest.raises(OptionError, match="x, y"):
        next(iter(loader))


def test_what_torch_has_no_dtype_for_stays(adapter: Any, torch: Any) -> None:
    pair = collections.namedtuple("pair", "a b")
    given = {
        "foreign": np.array([1, 2], ">i4"),
        "words": np.array(["a", "b"]),
        "long": np.array([1.5], np.longdouble),
        "list": [np.ones(2), np.zeros(3)],
        "pair": pair(np.ones(1), "text"),
        "nested": {"inner": np.ones(2, np.uint16)},
        "number": 7,
    }
    found = adapter.as_tensor(given)
    assert found["foreign"].tolist() == [1, 2]
    assert found["foreign"].dtype == torch.int32
    assert found["words"] is given["words"]
    assert found["long"] is given["long"]
    assert [type(t) for t in found["list"]] == [torch.Tensor] * 2
    assert type(found["pair"]) is pair
    assert (type(found["pair"].a), found["pair"].b) == (torch.Tensor, "text")
    assert found["nested"]["inner"].dtype == torch.uint16
    assert found["number"] == 7
    doubled = adapter.each_tensor(lambda t: t * 2, found)
    assert doubled["pair"].a.tolist() == [2]
    assert doubled["nested"]["inner"].tolist() == [2, 2]
    assert doubled["words"] is given["words"]


def test_what_only_some_records_have(adapter: Any, torch: Any, path: str) -> None:
    def some(value: bytes) -> dict[str, Any]:
        number = int(np.frombuffer(value, np.float32)[0])
        return {"i": number, **({"x": number / 2} if number % 3 == 1 else {})}

    with adapter.Loader(path, BATCH, pario.decode.Function(some, optional=["x"]), shuffle="global") as loader:
        for batch in loader:
            assert (batch["x_there"].dtype, batch["x"].dtype) == (torch.bool, torch.float64)
            assert (batch["x_there"] == (batch["i"] % 3 == 1)).all()
            assert (batch["x"] == torch.where(batch["x_there"], batch["i"] / 2, 0)).all()


def test_it_is_a_loader(adapter: Any, path: str) -> None:
    """All that a `pario.Loader` has, once: also in what is made for one."""
    with adapter.Loader(path, pario.Budget(bytes=5000), both, select=range(3, 40), seed=2) as loader:
        assert isinstance(loader, pario.Loader)
        assert (loader.records, len(loader.selection.ids(range(37)))) == (37, 37)
        assert loader.keys([3]) == [b"0003"]
        assert loader.index.n == N
        got = sum(len(batch["y"]) for batch in loader)
        assert (got, loader.report().total["records"], loader.stats()["records"]) == (37, 37, 37)
        assert (loader.skipped, loader.groups) == (0, 1)
        assert repr(loader).startswith("<tensors (dict) on cpu of Loader(")
    with pytest.raises(TypeError, match="shufle"):
        adapter.Loader(path, BATCH, both, shufle=True)


def test_a_data_loader_around_it_says_why_not(torch: Any, adapter: Any, path: str) -> None:
    with adapter.Loader(path, BATCH, both) as loader, pario.Loader(path, BATCH, both) as plain:
        for each in (loader, plain):
            with pytest.raises(OptionError, match="without a DataLoader around it"):
                next(iter(torch.utils.data.DataLoader(each, batch_size=None)))
        with pytest.raises(OptionError, match=r"device=\"cuda\""):
            adapter.Loader(path, BATCH, both, pin_memory=True)


def test_the_keywords_of_a_data_loader_have_answers(torch: Any) -> None:
    """All of the DataLoader that is installed, but for those that both have."""
    known = set(inspect.signature(torch.utils.data.DataLoader.__init__).parameters) - {"self"}
    ours = set(inspect.signature(pario.Loader.__init__).parameters)
    for name in known - ours - {"shuffle"}:
        with pytest.raises(OptionError, match=f"^{name}= is an argument of a DataLoader"):
            pario.Loader("nowhere", 8, **{name: None})


def test_another_device_gets_copies(adapter: Any, path: str) -> None:
    with adapter.Loader(path, BATCH, both, device="meta") as loader:
        batch = next(iter(loader))
        assert batch["x"].device.type == "meta"
        assert loader.peek()["y"].device.type == "meta"


# -- its position ------------------------------------------------------------------------------------------------------


def test_len_epoch_and_state(adapter: Any, path: str) -> None:
    made = {"shuffle": "global", "seed": 1, "ids": "i"}
    steps = -(-N // BATCH)
    with adapter.Loader(path, BATCH, both, **made) as loader:
        assert (len(loader), loader.taken, loader.epoch, loader.batch_size) == (steps, 0, 0, BATCH)
        for _ in range(3):
            iter(loader)  # uses up nothing
        assert [batch["i"].tolist() for batch in loader] == order(path, 0)
        batches = iter(loader)
        seen = [next(batches)["i"].tolist() for _ in range(3)]
        state = loader.state_dict()
        assert (state["epoch"], state["position"], state["ranks"]) == (1, 3 * BATCH, 1)
    assert seen == order(path, 1)[:3]
    plain = {name: value for name, value in state.items() if name != "ranks"}
    for given in (state, plain):
        with adapter.Loader(path, BATCH, both, **made) as loader:
            loader.load_state_dict(given)
            assert (len(loader), loader.taken, loader.epoch) == (steps, 3, 1)
            loader.set_epoch(1)  # of the state: keeps its position
            assert loader.peek()["i"].tolist() == order(path, 1)[3]
            assert [batch["i"].tolist() for batch in loader] == order(path, 1)[3:]
            assert (len(loader), loader.taken, loader.epoch) == (steps, 0, 2)
            loader.set_epoch(1)  # nothing was loaded since: from the beginning
            assert next(iter(loader))["i"].tolist() == order(path, 1)[0]
            loader.load_state_dict(given)
            loader.set_epoch(4)  # another epoch: from its beginning
            assert next(iter(loader))["i"].tolist() == order(path, 4)[0]
    with adapter.Loader(path, BATCH, both, shuffle="global", seed=2) as other, pytest.raises(StateError, match="seed"):
        other.load_state_dict(state)


def test_a_loop_left_early_is_over(adapter: Any, path: str) -> None:
    with adapter.Loader(path, BATCH, both, shuffle="global", seed=1, ids="i") as loader:
        for _ in loader:
            break
        state = loader.state_dict()
        assert (state["epoch"], state["position"], loader.epoch) == (0, BATCH, 1)
        assert [batch["i"].tolist() for batch in loader] == order(path, 1)


def test_lightning_finds_what_it_looks_for(adapter: Any, path: str) -> None:
    """`batch_sampler.sampler.set_epoch` and the state; and nothing that makes it or Accelerate wrap the loader."""
    from torch.utils.data import DataLoader, SequentialSampler

    with adapter.Loader(path, BATCH, both) as loader:
        loader.batch_sampler.sampler.set_epoch(3)
        assert loader.epoch == 3
        assert not isinstance(loader, DataLoader)
        assert isinstance(loader.sampler, SequentialSampler)  # all epochs have the same batches
        with adapter.Loader(path, BATCH, both, shuffle="global") as shuffled:
            assert shuffled.sampler is shuffled.batch_sampler
        state = {**loader.state_dict(), "position": 2 * BATCH, "ranks": 5}
        loader.load_state_dict(state)
        with pytest.raises(OptionError, match=r"of 5 ranks .* on 1: .*Resume"):
            loader.batch_sampler.sampler.set_epoch(3)
        loader.load_state_dict({**state, "position": 0})
        loader.batch_sampler.sampler.set_epoch(3)  # at an epoch's beginning the numbers agree


def test_a_data_loader_without_the_first_batches(adapter: Any, path: str) -> None:
    """What Hugging Face's Trainer makes of a loader when it resumes."""
    framework("accelerate")
    from accelerate import Accelerator, skip_first_batches

    Accelerator(cpu=True)
    with adapter.Loader(path, BATCH, both, shuffle="global", seed=1, ids="i") as loader:
        assert len(loader.dataset) == N
        for epoch, skipped in ((0, 2), (1, 0), (3, 6), (2, 1)):
            rest = skip_first_batches(loader, skipped)
            rest.batch_sampler.batch_sampler.set_epoch(epoch)
            for _ in range(2):  # one loop that is left, and a whole one
                assert next(iter(rest))["i"].tolist() == order(path, epoch)[skipped]
                loader.set_epoch(epoch)
            assert [batch["i"].tolist() for batch in rest] == order(path, epoch)[skipped:]
            assert loader.epoch == epoch + 1
        indices = iter(loader.batch_sampler)
        loader.dataset.__getitems__(next(indices))
        with pytest.raises(OptionError, match="batch 4 was asked for after batch 0"):
            loader.dataset.__getitems__([4])


def test_as_many_ranks_as_torch_has(adapter: Any, torch: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with adapter.Loader(path, BATCH, both) as loader, pytest.raises(OptionError, match="mpiexec -n 2"):
        next(iter(loader))
    with adapter.Loader(path, BATCH, both, comm="self") as loader:
        assert len(list(loader)) == len(loader)


def test_ranks_for_torch(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"]
    for name in names:
        monkeypatch.setenv(name, "")  # restored at the end
        monkeypatch.delenv(name)
    assert adapter.use_mpi_ranks("self") == (0, 1)
    assert [os.environ[name] for name in names[:6]] == ["0", "1", "0", "1", "0", "127.0.0.1"]
    assert 0 < int(os.environ["MASTER_PORT"]) < 1 << 16
    os.environ.update(MASTER_ADDR="node7", MASTER_PORT="29500")
    adapter.use_mpi_ranks("self")
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("node7", "29500")


# -- to a device -------------------------------------------------------------------------------------------------------


class Noting:
    """A way to a device that notes what happens on it; the tensors stay where they are."""

    ahead = 1

    def __init__(self) -> None:
        self.notes: list[tuple[str, int]] = []

    def send(self, tensors: Any) -> Any:
        self.notes.append(("send", int(tensors["i"][0])))
        return tensors

    def receive(self, sent: Any) -> Any:
        self.notes.append(("receive", int(sent["i"][0])))
        return sent

    def finish(self, most: int = 0) -> None:
        if not most:
            self.notes.append(("finish", 0))

    def memory(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)


@pytest.fixture
def far(adapter: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Noting]]:
    """A loader of a device that takes batches one ahead."""
    link = Noting()
    monkeypatch.setattr(adapter, "Link", lambda device: link)
    with adapter.Loader(path, BATCH, both, ids="i") as loader:
        yield loader, link


def test_the_next_batch_travels_while_the_script_works(far: tuple[Any, Noting]) -> None:
    loader, link = far
    firsts = list(range(0, N, BATCH))
    for batch in loader:
        at = firsts.index(int(batch["i"][0]))
        assert link.notes[-1] == ("receive", firsts[at])
        assert [first for what, first in link.notes if what == "send"] == firsts[: at + 2]
        link.notes.append(("work", firsts[at]))
    assert [first for what, first in link.notes if what == "work"] == firsts


def test_the_state_counts_what_the_loop_got(far: tuple[Any, Noting]) -> None:
    loader, _ = far
    assert loader.state_dict()["position"] == 0
    for epoch in range(2):
        for k, _ in enumerate(loader):
            position, at = loader.state_dict()["position"], loader.epoch
            assert (at, position) == (epoch, min(N, (k + 1) * BATCH))
        assert (loader.epoch, loader.state_dict()["position"]) == (epoch + 1, 0)
    for _ in loader:
        break
    state = loader.state_dict()
    assert (state["epoch"], state["position"], loader.epoch) == (2, BATCH, 3)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert next(iter(loader))["i"].tolist() == list(range(BATCH, 2 * BATCH))
    loader.set_epoch(7)
    assert (loader.epoch, loader.state_dict()["position"]) == (7, 0)


class Cuda:
    """What torch.cuda does, noted; the tensors stay where they are. Copies end when `ended` says so, or when somebody
    waits for them. Pinned is what `pin_memory` returns, and what lies in it."""

    def __init__(self, torch: Any, patch: pytest.MonkeyPatch) -> None:
        self.notes: list[Any] = []
        self.ended = 0
        self.begun = 0
        self.pinned: list[Any] = []  # tensors, kept so that nothing else gets their addresses
        self.most = 1000  # of them, before the system refuses
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(self, "copies"))
        patch.setattr(torch.cuda, "stream", lambda stream: stream)
        patch.setattr(torch.cuda, "current_stream", lambda device: Stream(self, "computes"))
        patch.setattr(torch.Tensor, "pin_memory", lambda t: self.pin(t))
        patch.setattr(torch.Tensor, "record_stream", lambda t, stream: self.notes.append(("record", stream.name)))

    def is_pinned(self, tensor: Any) -> bool:
        return any(0 <= tensor.data_ptr() - one.data_ptr() < one.nbytes for one in self.pinned)

    def pin(self, tensor: Any) -> Any:
        if self.is_pinned(tensor):
            return tensor
        if len(self.pinned) >= self.most:
            raise RuntimeError("CUDA error: out of memory")
        self.notes.append("pin")
        self.pinned.append(tensor.clone())
        return self.pinned[-1]


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self.cuda, self.name = cuda, name

    def __enter__(self) -> None:
        self.cuda.notes.append(("in", self.name))

    def __exit__(self, *error: Any) -> None:
        self.cuda.notes.append(("out", self.name))

    def record_event(self) -> Event:
        self.cuda.begun += 1
        return Event(self.cuda, self.cuda.begun)

    def wait_event(self, event: Event) -> None:
        self.cuda.notes.append((self.name, "waits for", event.number))


class Event:
    def __init__(self, cuda: Cuda, number: int) -> None:
        self.cuda, self.number = cuda, number

    def query(self) -> bool:
        return self.number <= self.cuda.ended

    def synchronize(self) -> None:
        self.cuda.ended = max(self.cuda.ended, self.number)


@pytest.fixture
def cuda(torch: Any, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(torch, monkeypatch)


def test_the_calls_to_cuda(adapter: Any, torch: Any, cuda: Cuda) -> None:
    """Pinned, copied in the stream of its own, waited for and recorded in the one that computes."""
    link = adapter.CudaLink(torch.device("cpu"))
    found = link.receive(link.send({"x": torch.ones(2), "words": ["a"]}))
    assert found["x"].tolist() == [1, 1]
    assert found["words"] == ["a"]
    expected = ["pin", ("in", "copies"), ("out", "copies"), ("computes", "waits for", 1)]
    assert cuda.notes == [*expected, ("record", "computes")]
    cuda.notes.clear()
    memory = link.memory(1000)
    assert (memory.shape, memory.dtype, memory.flags.writeable) == ((1000,), np.uint8, True)
    assert cuda.is_pinned(torch.from_numpy(memory[7:]))
    cuda.notes.clear()
    link.send({"x": torch.from_numpy(memory[100:200].view(np.float32)), "y": torch.ones(3)})
    assert cuda.notes == ["pin", ("in", "copies"), ("out", "copies")]  # y alone


def test_what_has_gaps_is_copied_without_them(adapter: Any, torch: Any, cuda: Cuda) -> None:
    """torch would copy it through memory that is not pinned. What is dense in another order stays as it is."""
    link = adapter.CudaLink(torch.device("cpu"))
    memory = torch.from_numpy(link.memory(24).reshape(2, 3, 4))
    cuda.notes.clear()
    (found, _), (turned, _) = link.send({"x": memory[:, :, ::2]}), link.send({"x": memory.permute(0, 2, 1)})
    assert (found["x"].stride(), found["x"].tolist()) == ((6, 2, 1), memory[:, :, ::2].tolist())
    assert cuda.is_pinned(found["x"])
    assert (turned["x"].stride(), turned["x"].data_ptr()) == ((12, 1, 4), memory.data_ptr())
    assert cuda.notes.count("pin") == 1


def test_memory_is_kept_until_its_copy_has_ended(adapter: Any, torch: Any, cuda: Cuda) -> None:
    buffers = BatchBuffers(1 << 20)
    link = adapter.CudaLink(torch.device("cpu"))
    buffers.allocate = link.memory

    def sent() -> int:
        """Send a batch that nobody else keeps; where it lay."""
        array = buffers.take({"x": ((1000,), np.dtype(np.uint8))})["x"]
        place = array.ctypes.data
        link.send({"x": torch.from_numpy(array)})[0].clear()
        return place

    first, second = sent(), sent()
    assert (first != second, cuda.ended) == (True, 0)
    third = sent()  # waits for the first
    assert (cuda.ended, first in (second, third)) == (1, False)
    assert sent() == first
    assert cuda.ended == 2
    cuda.ended = cuda.begun
    places = {sent() for _ in range(2)}
    assert places <= {first, second, third}
    assert buffers.allocated_bytes == 3 * 4096
    link.finish()
    assert cuda.ended == cuda.begun


def test_a_copy_that_failed_half_way_keeps_its_memory(adapter: Any, torch: Any, cuda: Cuda) -> None:
    link = adapter.CudaLink(torch.device("cpu"))
    array = torch.from_numpy(link.memory(10))
    alive = weakref.ref(array)
    full = torch.ones(1).to("meta")  # cannot be copied to a CPU
    with pytest.raises(NotImplementedError):
        link.send({"x": array, "y": full})
    del array
    gc.collect()
    assert (alive() is not None, cuda.ended) == (True, 0)
    link.finish()
    assert (alive(), cuda.ended) == (None, 1)


def test_without_pinned_memory_copies_go_on(
    adapter: Any, torch: Any, cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.most = 1
    link = adapter.CudaLink(torch.device("cpu"))
    assert [len(link.memory(10)) for _ in range(3)] == [10] * 3
    assert link.send({"x": torch.ones(3)})[0]["x"].tolist() == [1, 1, 1]
    assert [record.message for record in caplog.records] == [
        "copies to cpu go out of ordinary memory, which takes longer: CUDA error: out of memory"
    ]


@pytest.mark.parametrize("left", ["at the end", "early", "peek"])
def test_batches_are_decoded_into_pinned_memory(
    adapter: Any, torch: Any, cuda: Cuda, path: str, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """A loop, or a look, copies no tensor to pinned memory, and leaves no copy that is under way."""

    class OnCpu(adapter.CudaLink):
        def __init__(self, device: Any) -> None:
            assert device.type == "cuda"
            super().__init__(torch.device("cpu"))

    monkeypatch.setattr(adapter, "CudaLink", OnCpu)
    decoder = pario.decode.Struct({"y": "<f4", "x": ("<f4", (299,))})
    with adapter.Loader(path, BATCH, decoder, shuffle="global", seed=1, ids="i", device="cuda") as loader:
        seen = []
        for batch in [loader.peek()] if left == "peek" else loader:
            assert (batch["x"] == batch["i"][:, None]).all()
            assert all(cuda.is_pinned(tensor) for tensor in batch.values())
            seen.append(batch["i"].tolist())
            if left == "early":
                break
        assert seen == order(path, 0)[: len(loader) if left == "at the end" else 1]
        assert cuda.ended == cuda.begun == {"at the end": len(loader), "early": 2, "peek": 1}[left]
        assert {one.dtype for one in cuda.pinned} == {torch.uint8}  # blocks, no tensor of a batch


# -- a batch of the plain loader in frameworks -------------------------------------------------------------------------


def test_frameworks_rebuild_a_batch(torch: Any, path: str) -> None:
    framework("accelerate")
    framework("lightning")
    from accelerate.utils import find_batch_size, send_to_device
    from lightning.fabric.utilities.apply_func import move_data_to_device
    from torch.utils import _pytree

    with pario.Loader(path, BATCH, both) as loader:
        batch = loader.peek()
        tensors = pario.Batch({name: torch.from_numpy(array) for name, array in batch.items()})
        for moved in (send_to_device(tensors, "meta"), move_data_to_device(tensors, torch.device("meta"))):
            assert type(moved) is pario.Batch
            assert [t.device.type for t in moved] == ["meta", "meta"]
        assert find_batch_size(tensors) == BATCH
        assert _pytree.tree_map(lambda leaf: leaf is batch, batch) is True  # a leaf: nothing takes it apart


def test_lightning_logs_batches_of_a_plain_loader_by_their_size(torch: Any, path: str) -> None:
    framework("lightning")
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def validation_step(self, batch: Any, index: int) -> None:
            sizes = {} if index == 3 and not said else {"batch_size": len(batch["x"])}
            self.log("y", float(batch["y"].sum()) / len(batch["x"]), **sizes)

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", enable_checkpointing=False, **quiet)
    with pario.Loader(path, BATCH, both, comm="self") as loader:
        said = True
        (found,) = trainer.validate(Model(), loader, verbose=False)
        assert found["y"] == pytest.approx(np.arange(N).mean())
        said = False
        with pytest.raises(Exception, match=r"self\.log\(\.\.\., batch_size=batch_size\)"):
            trainer.validate(Model(), loader, verbose=False)


def test_jax_may_use_the_batches_memory(path: str) -> None:
    framework("jax")
    import jax

    with pario.Loader(path, BATCH, both) as loader:
        kept = [jax.device_put({**batch, "ids": batch.ids}) for _ in range(3) for batch in loader]
    for given in kept:
        assert (given["y"] == given["ids"]).all()
        assert (given["x"] == given["ids"][:, None]).all()


# -- the scripts of docs/pytorch.md ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the scripts can learn in two epochs: label k lights up its own row of pixels."""
    folder, rng = tmp_path_factory.mktemp("digits"), np.random.default_rng(0)
    for name, count in (("train.lmdb", 1000), ("test.lmdb", 77)):
        with lmdb.open(str(folder / name), map_size=1 << 24) as env, env.begin(write=True) as txn:
            for i in range(count):
                label = int(rng.integers(8))
                pixels = rng.integers(0, 3, (8, 8))
                pixels[label] += 13
                txn.put(b"%08d" % i, datum(pixels, label))
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_train_and_go_on(name: str, digits: Path, tmp_path: Path) -> None:
    for needed in ("torch", "lightning", "accelerate", "jax", "tensorflow"):
        framework(needed)
    script = (ROOT / "examples" / f"{name}.py").read_text()
    for ranks, epochs in ((2, 1), (3, 2)):
        shorter, count = re.subn(r"(?m)^(EPOCHS.*?= )2\b", rf"\g<1>{epochs}", script)
        assert count == 1
        (tmp_path / "train.py").write_text(shorter)
        words = [str(digits / "train.lmdb"), str(digits / "test.lmdb"), str(tmp_path / "saved")]
        if name in ("jax_script", "tensorflow_script"):
            words[2] += ".npz"
        done = run_job(ranks, [str(tmp_path / "train.py"), *words], limit_s=200, env={"PYTHONPATH": str(ROOT)})
        assert done.status == 0, done.output
        said = re.findall(r"epoch (\d+): ([\d.]+)%", done.output)
        # The Trainer says the number of epochs that it has done; the others each epoch, from the one where they go on.
        assert {int(epoch) for epoch, _ in said} == {epochs if name == "lightning_trainer" else epochs - 1}, done.output
        assert float(said[-1][1]) > 90
