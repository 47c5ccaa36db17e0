"""PyTorch: mpiexec -n 2 python examples/pytorch_ddp.py train.lmdb test.lmdb [checkpoint.pt]"""

import os
import sys

import torch
from torch import nn

import pario
from pario.adapters.torch import Loader, use_mpi_ranks

EPOCHS = 2
saved = sys.argv[3] if len(sys.argv) > 3 else "pytorch.pt"

rank, ranks = use_mpi_ranks()  # torch.distributed gets MPI's ranks
cuda = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
torch.distributed.init_process_group("nccl" if cuda else "gloo")
network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(device)
model = nn.parallel.DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

decoder = pario.decode.Datum()
train = Loader(sys.argv[1], 16, decoder, shuffle="global", seed=0, drop_last=True, device=device)
test = Loader(sys.argv[2], 16, decoder, device=device)
with train, test:
    if os.path.exists(saved):
        state = torch.load(saved, map_location=device)
        network.load_state_dict(state["model"])
        train.load_state_dict(state["train"])  # at the next record, on any number of ranks
    for epoch in range(train.epoch, EPOCHS):
        for batch in train:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["data"].float() / 16), batch["label"])
            loss.backward()
            optimizer.step()
        right = torch.zeros(2, device=device)
        with torch.no_grad():
            for batch in test:
                hits = network(batch["data"].float() / 16).argmax(1) == batch["label"]
                right += torch.tensor([hits.sum(), len(hits)], device=device)
        torch.distributed.all_reduce(right)
        if rank == 0:
            torch.save({"model": network.state_dict(), "train": train.state_dict()}, saved)
            print(f"epoch {epoch}: {right[0] / right[1]:.1%} of {right[1]:.0f} test records right, {ranks} ranks")
torch.distributed.destroy_process_group()
