"""Tensors of torch and arrays of JAX in checkpoints; by `-m frameworks`, like test_frameworks.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from required import framework

import pario
from pario.checkpoint.tree import PAGE

pytestmark = pytest.mark.frameworks


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
