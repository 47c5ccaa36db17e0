"""Lightning: mpiexec -n 2 python examples/lightning_trainer.py train.lmdb test.lmdb [folder for checkpoints]"""

import sys
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from mpi4py import MPI
from torch import nn

import pario
from pario.adapters.lightning import Resume
from pario.adapters.torch import Loader

EPOCHS = 2
folder = sys.argv[3] if len(sys.argv) > 3 else "checkpoints"


class Digits(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.network(batch["data"].float() / 16), batch["label"])

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        hits = self.network(batch["data"].float() / 16).argmax(1) == batch["label"]
        if len(hits):  # the last batch may be empty on some ranks
            self.log("right", hits.float().mean(), batch_size=len(hits))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


decoder = pario.decode.Datum()
train = Loader(sys.argv[1], 16, decoder, shuffle="global", seed=0, drop_last=True)  # the Trainer copies to the device
test = Loader(sys.argv[2], 16, decoder)
with train, test:
    trainer = pl.Trainer(
        devices=MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED).size,  # ranks per node; Lightning finds MPI by itself
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint(folder, save_last=True, every_n_train_steps=20), Resume(train)],
        logger=False,
    )
    trainer.fit(Digits(), train, test, ckpt_path="last")  # from the beginning if there is none
    print(f"epoch {trainer.current_epoch}: {trainer.callback_metrics.get('right', 0):.1%} of the test records right")
