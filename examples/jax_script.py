"""JAX: mpiexec -n 2 python examples/jax_script.py train.lmdb test.lmdb [checkpoint.npz]"""

import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import pario

EPOCHS = 2
saved = sys.argv[3] if len(sys.argv) > 3 else "jax.npz"
comm = MPI.COMM_WORLD


def scores(weights: jax.Array, data: jax.Array) -> jax.Array:
    return data.reshape(len(data), -1) / 16 @ weights


@jax.jit
def gradient(weights: jax.Array, data: jax.Array, label: jax.Array) -> jax.Array:
    def loss(w: jax.Array) -> jax.Array:
        return jnp.sum(-jnp.take_along_axis(jax.nn.log_softmax(scores(w, data)), label[:, None], 1))

    found: jax.Array = jax.grad(loss)(weights)
    return found


weights = jnp.zeros((64, 10))
decoder = pario.decode.Datum()
train = pario.Loader(sys.argv[1], 16, decoder, shuffle="global", seed=0, drop_last=True)  # one shape: compiled once
test = pario.Loader(sys.argv[2], 16, decoder)
with train, test:
    if os.path.exists(saved):
        with np.load(saved) as state:
            weights = jnp.asarray(state["weights"])
            train.load_state_dict(json.loads(str(state["train"])))
    for epoch in range(train.epoch, EPOCHS):
        for batch in train:
            data, label = jax.device_put((batch["data"], batch["label"]))
            mine = np.asarray(gradient(weights, data, label))
            weights -= 0.1 / (16 * comm.size) * comm.allreduce(mine)
        right = np.zeros(2)
        for batch in test:
            data, label = jax.device_put((batch["data"], batch["label"]))
            right += int((scores(weights, data).argmax(1) == label).sum()), len(label)
        right = comm.allreduce(right)
        if comm.rank == 0:
            np.savez(saved, weights=weights, train=json.dumps(train.state_dict()))
            print(f"epoch {epoch}: {right[0] / right[1]:.1%} of {right[1]:.0f} test records right, {comm.size} ranks")
