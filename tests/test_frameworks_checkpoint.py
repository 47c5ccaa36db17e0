"""Tensors of torch and arrays of JAX in checkpoints; by `-m frameworks`, like test_frameworks.py."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import equal
from launch import run_job
from required import framework

import pario
from pario.checkpoint.tree import PAGE

pytestmark = pytest.mark.frameworks

JOB = str(Path(__file__).with_name("frameworks_checkpoint_job.py"))


def ranks_of_torch(ranks: int, *words: str) -> None:
    """A job on that many ranks. words : see frameworks_checkpoint_job.py"""
    done = run_job(ranks, [JOB, *words], limit_s=200, env={"PYTHONPATH": str(Path(__file__).parents[1])})
    assert done.status == 0, done.output


@pytest.mark.parametrize("saved", [(2, 1), (2, 2)], ids=["FSDP2", "FSDP2 over tensor parallel"])
def test_dtensors_come_back_on_another_mesh(tmp_path: Path, saved: tuple[int, int]) -> None:
    framework("torch")
    ranks_of_torch(saved[0] * saved[1], "save", str(tmp_path), *map(str, saved))
    for dp, tp in [(3, 1), (1, 3)]:
        ranks_of_torch(dp * tp, "restore", str(tmp_path), str(dp), str(tp))


def test_dtensors_that_cannot_be_saved_are_refused_on_all_ranks(tmp_path: Path) -> None:
    framework("torch")
    ranks_of_torch(2, "refuse", str(tmp_path), "2", "1")


def test_every_type_of_torch(tmp_path: Path) -> None:
    framework("torch")
    import torch

    from pario.adapters.torch import Checkpointer

    names = {str(each).removeprefix("torch.") for each in vars(torch).values() if isinstance(each, torch.dtype)}
    names = {name for name in names if re.fullmatch(r"b?float.*|complex.*|bool|u?int(8|16|32|64)", name)}
    assert len(names) >= 18
    tree: dict[str, Any] = {"meta": torch.ones(5)}
    for name in names:
        dtype = getattr(torch, name)
        bits = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % (2 if name == "bool" else 100)
        tree[name] = bits.view(dtype).reshape(2, 3).T
    with Checkpointer("self", slow=tmp_path) as ckpt:
        ckpt.save(1, tree).wait()
        ckpt.save(2, tree)
        ckpt.close()
    with Checkpointer("self", slow=tmp_path) as ckpt:
        for got in (ckpt.restore(), ckpt.restore(like=tree | {"meta": torch.empty(5, device="meta")})):
            assert torch.equal(got["meta"], torch.ones(5))
            for name in names:
                assert got[name].dtype == tree[name].dtype, name
                bits = [each[name].reshape(-1).view(torch.uint8) for each in (tree, got)]
                assert torch.equal(*bits), name
        with pytest.raises(pario.OptionError, match="meta"):
            ckpt.save(3, [torch.empty(5, device="meta")])


def test_tensors_of_torch(tmp_path: Path) -> None:
    framework("torch")
    import torch

    from pario.adapters.torch import Checkpointer

    model = torch.nn.Linear(600, 700)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(3, 600)).sum().backward()
    optimizer.step()
    tensors = {
        "bf16": torch.randn(1000, 1000).bfloat16(),
        "turned": torch.randn(500, 800).T,
        "empty": torch.empty(0, 3),
        "bool": torch.tensor(True),
        "complex": torch.randn(3, dtype=torch.complex64),
        "part": torch.arange(10.0)[::2],
    }
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "tensors": tensors, "np": np.ones(3)}
    tree["shard"] = pario.Shard(torch.arange(300_000.0), (300_000,), (0,))
    for tensor in [*tensors.values(), torch.randn(5, 9000).T, torch.ones(3, dtype=torch.complex64).conj()]:
        flat = tensor.resolve_conj().contiguous().reshape(-1)
        expected = flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        pages, rest = Checkpointer.leaves.held(tensor, 0, 1)  # what is compared between ranks
        assert pages.tobytes() + rest.tobytes() == expected
        pages, _ = Checkpointer.leaves.held(tensor, 2, 3)
        assert pages.tobytes() == b"".join(
            expected[k : k + PAGE] for k in range(2 * PAGE, len(expected) - PAGE + 1, 3 * PAGE)
        )
    with Checkpointer("self", slow=tmp_path) as ckpt:
        for step in (1, 2):  # in new and in known memory
            ckpt.save(step, tree)
        ckpt.close()
    with Checkpointer("self", slow=tmp_path) as ckpt:
        got = ckpt.restore()
        for name, tensor in tensors.items():
            assert got["tensors"][name].dtype == tensor.dtype, name
            assert torch.equal(got["tensors"][name], tensor), name
        model.load_state_dict(got["model"])
        optimizer.load_state_dict(got["optimizer"])
        like = {"shard": pario.Shard(torch.empty(7), (300_000,), (1000,)), "np": np.empty(3)}
        got = ckpt.restore(like=like)
        assert torch.equal(got["shard"], torch.arange(1000.0, 1007.0))
        assert isinstance(got["np"], np.ndarray)
        with pytest.raises(pario.OptionError, match="layout"):
            ckpt.save(3, [torch.eye(3).to_sparse()])


def test_arrays_of_jax(tmp_path: Path) -> None:
    framework("jax")
    import jax

    from pario.adapters.jax import Checkpointer

    jnp = jax.numpy
    tree = {"a": jnp.arange(700_000.0), "b": jnp.ones((3, 4), jnp.bfloat16), "c": [jnp.float32(2), jnp.zeros((0, 2))]}
    with Checkpointer("self", slow=tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, tree)
        ckpt.close()
    with Checkpointer("self", slow=tmp_path) as ckpt:
        assert isinstance(ckpt.restore()["a"], np.ndarray)
        for old, new in zip(jax.tree.leaves(tree), jax.tree.leaves(ckpt.restore(like=tree)), strict=True):
            assert isinstance(new, jax.Array)
            assert old.dtype == new.dtype
            assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


def test_every_type_of_ml_dtypes(tmp_path: Path) -> None:
    framework("jax")
    import jax
    import ml_dtypes

    from pario.adapters.jax import Checkpointer

    kinds = [each for each in vars(ml_dtypes).values() if isinstance(each, type) and issubclass(each, np.generic)]
    assert len(kinds) >= 15
    tree: dict[str, Any] = {}
    for kind in kinds:
        dtype = np.dtype(kind)
        bits = np.arange(6 * dtype.itemsize, dtype=np.uint8) % (2 if dtype.name.endswith("int1") else 4)
        array = bits.view(dtype).reshape(2, 3)
        tree[dtype.name] = {"array": array, "turned": array.T, "scalar": array[1, 2], "none": array[:0]}
        with contextlib.suppress(TypeError, jax.errors.JaxRuntimeError):  # JAX computes with most of them
            tree[dtype.name]["jax"] = jax.numpy.asarray(array)
    assert sum("jax" in of for of in tree.values()) >= 10
    for checkpointer in (pario.Checkpointer, Checkpointer):
        plain = checkpointer is pario.Checkpointer
        kept = {
            name: {key: each for key, each in of.items() if not plain or key != "jax"} for name, of in tree.items()
        }
        folder = tmp_path / str(plain)
        with checkpointer("self", slow=folder) as ckpt:
            ckpt.save(1, kept).wait()
            ckpt.save(2, kept)
            ckpt.close()
        with checkpointer("self", slow=folder) as ckpt:
            got = ckpt.restore(like=kept)
            for name, of in kept.items():
                for key, value in of.items():
                    assert got[name][key].dtype == value.dtype, (name, key)
                    assert type(got[name][key]) is type(value), (name, key)
                    assert equal(np.asarray(got[name][key]), np.asarray(value)), (name, key)
            with pytest.raises(pario.OptionError, match=r"bfloat16.*cannot be saved"):
                ckpt.save(3, [np.zeros(2, [("a", ml_dtypes.bfloat16)])])


def test_trees_of_flax_and_optax_and_typed_keys(tmp_path: Path) -> None:
    for name in ("jax", "flax", "optax"):
        framework(name)
    import collections
    import dataclasses

    import flax.linen
    import flax.training.train_state
    import jax
    import optax

    from pario.adapters.jax import Checkpointer

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Pair:
        first: Any
        second: Any
        name: str = dataclasses.field(default="", metadata={"static": True})

    model = flax.linen.Dense(3)

    def made(seed: int) -> dict[str, Any]:
        keys = {impl: jax.random.key(seed, impl=impl) for impl in ("threefry2x32", "rbg")}
        state = flax.training.train_state.TrainState.create(
            apply_fn=model.apply, params=model.init(keys["threefry2x32"], np.ones((1, 5), np.float32)),
            tx=optax.chain(optax.clip(1.0), optax.adamw(optax.linear_schedule(0.1, 0.01, 10))),
        )  # fmt: skip
        state = state.apply_gradients(grads=jax.tree.map(lambda each: each * 0.5, state.params))
        pair = Pair(jax.numpy.arange(4.0) * seed, None, name="static")
        many = jax.random.split(keys["rbg"], (2, 3))
        ordered = collections.OrderedDict(z=np.float32(seed), a=jax.numpy.ones(2) * seed)
        return {"state": state, "keys": keys, "many": many, "pair": pair, "nested": [(pair, many[0])], "o": ordered}

    def bits(tree: Any) -> list[Any]:
        leaves = jax.tree.leaves(tree)
        of_keys = [jax.dtypes.issubdtype(getattr(each, "dtype", int), jax.dtypes.prng_key) for each in leaves]
        plain = [jax.random.key_data(each) if is_key else each for each, is_key in zip(leaves, of_keys, strict=True)]
        found = [np.asarray(each) for each in plain]
        return [(type(leaf), each.dtype, each.tobytes()) for leaf, each in zip(leaves, found, strict=True)]

    tree = made(1)
    with Checkpointer("self", slow=tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, tree)
        ckpt.close()
    with Checkpointer("self", slow=tmp_path) as ckpt:
        like = made(2)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])

        def described(each: Any) -> Any:
            if not isinstance(each, jax.Array | np.generic):
                return each  # the step of TrainState is a plain number
            return jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=device)

        placed = jax.tree.map(described, like)
        assert bits(like) != bits(tree)
        for each in (like, placed):
            got = ckpt.restore(like=each)
            assert jax.tree.structure(got) == jax.tree.structure(each)
        assert bits(ckpt.restore(like=like)) == bits(tree)
        assert all(isinstance(each, int) or each.sharding == device for each in jax.tree.leaves(got))
        assert [each[1:] for each in bits(got)] == [each[1:] for each in bits(tree)]
        assert ckpt.restore()["keys"]["rbg"]["key_impl"] == "rbg"
        with pytest.raises(pario.StateError, match="keys of"):
            ckpt.restore(like={"keys": {"rbg": jax.random.key(0, impl="unsafe_rbg")}})
        with pytest.raises(pario.OptionError, match="a/first"):
            ckpt.save(3, {"a": Pair(lambda: 0, 1)})
        with pytest.raises(pario.OptionError, match="ShapeDtypeStruct"):
            ckpt.save(3, {"a": placed["pair"].first})


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a model, narrower than the real one."""
    if name == "convolutions":
        made: dict[str, tuple[int, ...]] = {f"layer{k}.conv.weight": (8 * k, 8, 3, 3) for k in (1, 2, 3)}
        made |= {f"layer{k}.bn.{what}": (8 * k,) for k in (1, 2, 3) for what in ("weight", "running_mean")}
        return made | {"layer1.bn.num_batches_tracked": ()}
    made = {f"h.{k}.{name}": (96, 31) for k in range(3) for name in ("q.weight", "mlp.weight")}
    return made | {"wte.weight": (503, 31), "norm.weight": (31,), "none": (0, 4)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("model", ["convolutions", "transformer"])
def test_models_come_back_from_safetensors_and_dcp(
    tmp_path: Path, model: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    framework("torch")
    framework("safetensors")
    import safetensors.torch
    import torch
    import torch.distributed.checkpoint as dcp

    import pario.adapters.dcp
    from pario.adapters.torch import Checkpointer
    from pario.cli import main

    monkeypatch.setattr(pario.adapters.dcp, "WINDOW", 20_000)  # large tensors are cut, small ones come together
    state = {name: torch.randn(shape).to(getattr(torch, dtype)) for name, shape in shapes_of(model).items()}
    tree = {"model": state, "optimizer": {"state": [{"step": torch.tensor(3.0)}], "lr": 0.1}, "epoch": 4}

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        if isinstance(a, list):
            return len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, torch.Tensor):
            bits = [each.reshape(-1).view(torch.uint8) for each in (a, b)]
            return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
        return type(a) is type(b) and a == b

    def run(*words: object) -> None:
        assert main(["checkpoint", *map(str, words)]) == 0

    def restored(folder: Path) -> Any:
        with Checkpointer("self", slow=folder) as ckpt:
            return ckpt.restore()

    with Checkpointer("self", slow=tmp_path / "run") as ckpt:
        ckpt.save(1, tree)
    run("export", tmp_path / "run", tmp_path / "ours.safetensors", "--under", "model")
    assert same(safetensors.torch.load_file(tmp_path / "ours.safetensors"), state)
    safetensors.torch.save_file(state, tmp_path / "theirs.safetensors")
    run("import", tmp_path / "theirs.safetensors", tmp_path / "a")
    assert same(restored(tmp_path / "a"), state)
    run("export", tmp_path / "run", tmp_path / "ours")
    got = {"model": {name: torch.zeros_like(each) for name, each in state.items()}, "epoch": 0}
    dcp.load(got, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert same(got["model"], state)
    assert got["epoch"] == 4
    with pytest.raises(pario.OptionError, match="new folder"):
        run("export", tmp_path / "run", tmp_path / "ours")
    dcp.save(tree, checkpoint_id=tmp_path / "theirs", no_dist=True)
    for folder in ("ours", "theirs"):
        run("import", tmp_path / folder, tmp_path / f"from {folder}")
        assert same(restored(tmp_path / f"from {folder}"), tree)
    (tmp_path / "ours" / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(pario.CorruptedError, match="cannot read it"):
        run("import", tmp_path / "ours", tmp_path / "b")
