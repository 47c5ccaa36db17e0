"""A training job in one framework, for test_frameworks.py: notes which records each step got, on every rank.

    mpiexec -n 2 python tests/frameworks_job.py lightning DATA FOLDER --stop-after 5
    mpiexec -n 3 python tests/frameworks_job.py lightning DATA FOLDER --resume

Notes are lines of JSON in FOLDER/notes-RANK.jsonl: [what, epoch, [record ids]], in the order of what the framework did.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import pario

BATCH, EPOCHS, SEED = 8, 2, 5


def record(value: bytes) -> dict[str, Any]:
    """x f32[4] and the record's own number, which is what its key says, too."""
    row = np.frombuffer(value, np.float32)
    return {"x": row[:4], "number": np.int64(row[4])}


class Notes:
    def __init__(self, folder: str, rank: int) -> None:
        self._file = (Path(folder) / f"notes-{rank}.jsonl").open("a")

    def add(self, what: str, epoch: int, batch: Any) -> None:
        ids, numbers = batch["ids"].tolist(), batch["number"].tolist()
        assert ids == numbers, "the ids are those of the records"
        print(json.dumps([what, epoch, ids]), file=self._file, flush=True)


def run_epochs(
    args: argparse.Namespace,
    notes: Notes,
    train: Any,
    validation: Iterable[Any],
    step: Callable[[Any], Any],
    save: Callable[[], None],
    *,
    batches: Iterable[Any] | None = None,
    begin: Callable[[int], None] = lambda epoch: None,
    told: Callable[[Any], Any] = lambda batch: batch,
) -> None:
    """The loop of those frameworks that leave it to the user: from the loader's epoch on, with a validation after each.

    step : learns from a batch
    save : keeps the state at the step where the job is to stop
    batches : what the framework made of `train`
    begin : is told each epoch before its loop
    told : what is noted of a batch
    """
    steps = 0
    for epoch in range(train.epoch, EPOCHS):
        begin(epoch)
        for batch in train if batches is None else batches:
            step(batch)
            notes.add("train", epoch, told(batch))
            steps += 1
            if steps == args.stop_after:
                save()
                return
        for batch in validation:
            notes.add("validate", epoch, told(batch))


def loaders(args: argparse.Namespace) -> tuple[Any, Any]:
    from pario.adapters.torch import Loader

    train = Loader(args.data, BATCH, record, shuffle=args.shuffle or False, seed=SEED, ids="ids")
    return train, Loader(args.data, BATCH, record, ids="ids")


def ddp(args: argparse.Namespace) -> None:
    import torch

    from pario.adapters.torch import use_mpi_ranks

    rank, _ = use_mpi_ranks()
    torch.distributed.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    saved = Path(args.folder) / "ddp.pt"
    train, validation = loaders(args)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        model(batch["x"]).sum().backward()
        optimizer.step()

    def save() -> None:
        if rank == 0:
            torch.save({"model": model.module.state_dict(), "train": train.state_dict()}, saved)

    with train, validation:
        if args.resume:
            state = torch.load(saved)
            model.module.load_state_dict(state["model"])
            train.load_state_dict(state["train"])
        # As with a DistributedSampler; it must not forget the position.
        run_epochs(args, Notes(args.folder, rank), train, validation, step, save, begin=train.set_epoch)
    torch.distributed.destroy_process_group()


def lightning(args: argparse.Namespace) -> None:
    import lightning.pytorch as pl
    import torch
    from lightning.pytorch.callbacks import ModelCheckpoint
    from mpi4py import MPI

    from pario.adapters.lightning import Resume

    rank, ranks = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    notes = Notes(args.folder, rank)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            notes.add("train", self.current_epoch, batch)
            if self.current_epoch == 1 and index == 0:
                held = args.overfit and not args.without_callback
                assert train.epoch == (0 if held else 1)
            return self.layer(batch["x"]).sum()

        def validation_step(self, batch: Any, index: int) -> None:
            if not self.trainer.sanity_checking:
                notes.add("validate", self.current_epoch, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-6)

    train, validation = loaders(args)
    with train, validation:
        saving = ModelCheckpoint(args.folder, "at-{step}", every_n_train_steps=args.stop_after, save_top_k=-1)
        if args.at_epoch_end:
            saving = ModelCheckpoint(args.folder, "at-{step}", save_top_k=-1)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=ranks,
            max_epochs=1 if args.at_epoch_end else EPOCHS,
            max_steps=args.stop_after or -1,
            callbacks=[saving, *([] if args.without_callback else [Resume(train)])],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            reload_dataloaders_every_n_epochs=int(args.reload),
            overfit_batches=args.overfit,
        )
        assert trainer.world_size == ranks
        assert trainer.global_rank == rank
        checkpoint = str(next(Path(args.folder).glob("at-*.ckpt"))) if args.resume else None
        trainer.fit(Model(), train, validation, ckpt_path=checkpoint)


def accelerate(args: argparse.Namespace) -> None:
    import torch
    from accelerate import Accelerator

    from pario.adapters.torch import use_mpi_ranks

    rank, ranks = use_mpi_ranks()
    accelerator = Accelerator(cpu=True)
    assert (accelerator.process_index, accelerator.num_processes) == (rank, ranks)
    saved = f"{args.folder}/accelerate"
    train, validation = loaders(args)

    def step(batch: Any) -> None:
        with accelerator.accumulate(model):
            optimizer.zero_grad()
            accelerator.backward(model(batch["x"]).sum())
            optimizer.step()

    with train, validation:
        layer = torch.nn.Linear(4, 1)
        model, optimizer, prepared = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 1e-6), train)
        assert prepared is train, "the ranks' batches are not divided once more"
        accelerator.register_for_checkpointing(train)
        if args.resume:
            accelerator.load_state(saved)
        run_epochs(
            args, Notes(args.folder, rank), train, validation, step, lambda: accelerator.save_state(saved),
            batches=prepared,
        )  # fmt: skip
        accelerator.end_training()


def transformers(args: argparse.Namespace) -> None:
    import torch
    from transformers import Trainer, TrainingArguments

    from pario.adapters.torch import use_mpi_ranks

    rank, ranks = use_mpi_ranks()
    notes = Notes(args.folder, rank)
    train, validation = loaders(args)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, **batch: Any) -> Any:
            notes.add("train" if self.training else "validate", int(trainer.state.epoch), batch)
            return {"loss": self.layer(batch["x"]).sum()}

    class Fed(Trainer):
        def get_train_dataloader(self) -> Any:
            return train

        def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
            return validation

    trainer = Fed(
        Model(),
        TrainingArguments(
            args.folder,
            num_train_epochs=EPOCHS,
            max_steps=args.stop_after or -1,
            per_device_train_batch_size=BATCH,
            save_steps=args.stop_after or 500,
            use_cpu=True,
            ddp_backend="gloo",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    with train, validation:
        assert (trainer.args.process_index, trainer.args.world_size) == (rank, ranks)
        assert trainer.num_examples(train) == train.records
        trainer.train(resume_from_checkpoint=args.resume)
        if not args.stop_after:
            trainer.evaluate()
    torch.distributed.destroy_process_group()


def deepspeed(args: argparse.Namespace) -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed as framework
    import torch

    from pario.adapters.torch import use_mpi_ranks

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]  # compiled on the spot
    rank, _ = use_mpi_ranks()
    framework.init_distributed("gloo", auto_mpi_discovery=False)
    layer = torch.nn.Linear(4, 1)
    engine, *_ = framework.initialize(
        model=layer,
        optimizer=torch.optim.SGD(layer.parameters(), 1e-6),
        config={"train_micro_batch_size_per_gpu": BATCH, "zero_optimization": {"stage": 0}},
    )
    train, validation = loaders(args)

    def step(batch: Any) -> None:
        engine.backward(engine(batch["x"]).sum())
        engine.step()

    def save() -> None:
        engine.save_checkpoint(args.folder, client_state={"train": train.state_dict()})

    with train, validation:
        if args.resume:
            train.load_state_dict(engine.load_checkpoint(args.folder)[1]["train"])
        run_epochs(args, Notes(args.folder, rank), train, validation, step, save)
    torch.distributed.destroy_process_group()


def in_ray(args: argparse.Namespace) -> None:
    """A process that Ray Train has started, as one of several."""
    import tempfile

    import torch
    from ray import train as framework

    notes = Notes(args.folder, framework.get_context().get_world_rank())
    layer = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
    train, validation = loaders(args)

    def save() -> None:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(train.state_dict(), f"{folder}/state.pt")
            framework.report({}, checkpoint=framework.Checkpoint.from_directory(folder))

    with train, validation:
        saved = framework.get_checkpoint()
        if saved is not None:
            with saved.as_directory() as folder:
                train.load_state_dict(torch.load(f"{folder}/state.pt"))
        run_epochs(args, notes, train, validation, lambda batch: layer(batch["x"]).sum().backward(), save)


def ray(args: argparse.Namespace) -> None:
    """Ray starts two ranks itself; a run of the same name goes on at its newest checkpoint."""
    import tempfile

    import ray as framework
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory(prefix="ray-") as folder:
        framework.init(num_cpus=2, include_dashboard=False, _temp_dir=folder)
        TorchTrainer(
            in_ray,
            train_loop_config=args,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name="run", storage_path=args.folder),
        ).fit()
        framework.shutdown()


def plain_loaders(args: argparse.Namespace) -> tuple[Any, Any]:
    train = pario.Loader(args.data, BATCH, record, shuffle=args.shuffle, seed=SEED)
    return train, pario.Loader(args.data, BATCH, record)


def jax(args: argparse.Namespace) -> None:
    import jax as framework
    import jax.numpy as jnp
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    weights, saved = jnp.zeros(4), Path(args.folder) / "jax.json"
    gradient = framework.jit(framework.grad(lambda w, x: (x @ w).sum()))
    train, validation = plain_loaders(args)

    def given(batch: Any) -> Any:
        return framework.device_put({**batch, "ids": batch.ids})

    def step(batch: Any) -> None:
        nonlocal weights
        weights -= 1e-6 * comm.allreduce(np.asarray(gradient(weights, given(batch)["x"])))

    def save() -> None:
        if comm.rank == 0:
            saved.write_text(json.dumps(train.state_dict()))

    with train, validation:
        if args.resume:
            train.load_state_dict(json.loads(saved.read_text()))
        run_epochs(args, Notes(args.folder, comm.rank), train, validation, step, save, told=given)


def tensorflow(args: argparse.Namespace) -> None:
    import tensorflow as tf
    from mpi4py import MPI

    from pario.adapters.tensorflow import dataset

    comm = MPI.COMM_WORLD
    weights, saved = tf.zeros(4), Path(args.folder) / "tensorflow.json"
    train, validation = plain_loaders(args)

    def noted(batch: Any) -> Any:
        return {name: tensor.numpy() for name, tensor in batch.items()}

    def step(batch: Any) -> None:
        nonlocal weights
        with tf.GradientTape() as tape:
            tape.watch(weights)
            loss = tf.reduce_sum(tf.linalg.matvec(batch["x"], weights))
        weights -= 1e-6 * comm.allreduce(tape.gradient(loss, weights).numpy())

    def save() -> None:
        if comm.rank == 0:
            saved.write_text(json.dumps(train.state_dict()))

    with train, validation:
        if args.resume:
            train.load_state_dict(json.loads(saved.read_text()))
        run_epochs(
            args, Notes(args.folder, comm.rank), train, dataset(validation, ids="ids"), step, save,
            batches=dataset(train, ids="ids"), told=noted,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    names = ["ddp", "lightning", "accelerate", "transformers", "deepspeed", "ray", "jax", "tensorflow"]
    parser.add_argument("framework", choices=names)
    parser.add_argument("data")
    parser.add_argument("folder")
    parser.add_argument("--shuffle", default="global")
    parser.add_argument("--stop-after", type=int)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--at-epoch-end", action="store_true")
    parser.add_argument("--without-callback", action="store_true")
    parser.add_argument("--reload", action="store_true")
    parser.add_argument("--overfit", type=int, default=0)
    args = parser.parse_args()
    globals()[args.framework](args)


if __name__ == "__main__":
    sys.exit(main())
