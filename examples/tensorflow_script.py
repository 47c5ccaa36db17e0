"""TensorFlow: mpiexec -n 2 python examples/tensorflow_script.py train.lmdb test.lmdb [checkpoint.npz]"""

import json
import os
import sys

import numpy as np
import tensorflow as tf
from mpi4py import MPI

import pario
from pario.adapters.tensorflow import dataset

EPOCHS = 2
saved = sys.argv[3] if len(sys.argv) > 3 else "tensorflow.npz"
comm = MPI.COMM_WORLD
weights = tf.Variable(tf.zeros((64, 10)))

decoder = pario.decode.Datum()
train = pario.Loader(sys.argv[1], 16, decoder, shuffle="global", seed=0, drop_last=True)
test = pario.Loader(sys.argv[2], 16, decoder)
with train, test:
    if os.path.exists(saved):
        with np.load(saved) as state:
            weights.assign(state["weights"])
            train.load_state_dict(json.loads(str(state["train"])))
    for epoch in range(train.epoch, EPOCHS):
        for batch in dataset(train):
            with tf.GradientTape() as tape:
                scores = tf.reshape(tf.cast(batch["data"], tf.float32) / 16, (-1, 64)) @ weights
                loss = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["label"], scores)
            mine = tape.gradient(loss, weights).numpy()
            weights.assign_sub(0.1 / (16 * comm.size) * comm.allreduce(mine))
        right = np.zeros(2)
        for batch in dataset(test):
            scores = tf.reshape(tf.cast(batch["data"], tf.float32) / 16, (-1, 64)) @ weights
            hits = tf.argmax(scores, 1) == batch["label"]
            right += int(tf.reduce_sum(tf.cast(hits, tf.int32))), len(hits)
        right = comm.allreduce(right)
        if comm.rank == 0:
            np.savez(saved, weights=weights.numpy(), train=json.dumps(train.state_dict()))
            print(f"epoch {epoch}: {right[0] / right[1]:.1%} of {right[1]:.0f} test records right, {comm.size} ranks")
