"""Accelerate: mpiexec -n 2 python examples/accelerate_script.py train.lmdb test.lmdb [folder for checkpoints]"""

import os
import sys

import torch
from accelerate import Accelerator
from torch import nn

import pario
from pario.adapters.torch import Loader, use_mpi_ranks

EPOCHS = 2
saved = sys.argv[3] if len(sys.argv) > 3 else "accelerate"

use_mpi_ranks()  # before Accelerator()
accelerator = Accelerator(cpu=not torch.cuda.is_available())
network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=0.1))

decoder = pario.decode.Datum()
train = Loader(sys.argv[1], 16, decoder, shuffle="global", seed=0, drop_last=True, device=accelerator.device)
test = Loader(sys.argv[2], 16, decoder, device=accelerator.device)
with train, test:
    accelerator.register_for_checkpointing(train)  # instead of prepare: the ranks' batches are divided already
    if os.path.exists(saved):
        accelerator.load_state(saved)  # the loader goes on at the next record: no skip_first_batches
    for epoch in range(train.epoch, EPOCHS):
        for batch in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["data"].float() / 16), batch["label"])
            accelerator.backward(loss)
            optimizer.step()
        right = torch.zeros(2, device=accelerator.device)
        with torch.no_grad():
            for batch in test:
                hits = model(batch["data"].float() / 16).argmax(1) == batch["label"]
                right += torch.tensor([hits.sum(), len(hits)], device=accelerator.device)
        right = accelerator.reduce(right)
        accelerator.print(f"epoch {epoch}: {right[0] / right[1]:.1%} of {right[1]:.0f} test records right")
        accelerator.save_state(saved)
accelerator.end_training()
