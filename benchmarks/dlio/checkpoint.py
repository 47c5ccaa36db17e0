"""`ParioCheckpointing`: DLIO's checkpoints through pario.Checkpointer, written in the background.

    checkpoint:
      checkpoint_folder: /scratch/run1
      checkpoint_mechanism_classname: benchmarks.dlio.checkpoint.ParioCheckpointing

With PARIO_FAST=FOLDER, on a disk or in the memory of each node, checkpoints go there first and are drained later.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from dlio_benchmark.checkpointing.base_checkpointing import BaseCheckpointing
from dlio_benchmark.common.enumerations import CheckpointLocationType
from dlio_benchmark.utils.utility import DLIOMPI

from pario.adapters.torch import Checkpointer
from pario.checkpoint.tree import Shard

__all__ = ["ParioCheckpointing"]

FAST = "PARIO_FAST"


class ParioCheckpointing(BaseCheckpointing):
    """`type: rank_zero`: all ranks hold the same state and divide the writing. `all_ranks`: each has its own."""

    _instance: ParioCheckpointing | None = None

    @staticmethod
    def get_instance() -> ParioCheckpointing:
        if ParioCheckpointing._instance is None:
            ParioCheckpointing._instance = ParioCheckpointing()
        return ParioCheckpointing._instance

    def __init__(self) -> None:
        from dlio_benchmark.utils.config import ConfigArguments

        args = ConfigArguments.get_instance()
        where = args.checkpoint_type
        # For "rank_zero" DLIO makes the state on rank 0 alone. In data-parallel training every rank holds it.
        args.checkpoint_type = CheckpointLocationType.ALL_RANKS
        try:
            super().__init__("h5")
        finally:
            args.checkpoint_type = where
        self._own = where is not CheckpointLocationType.RANK_ZERO
        self._tree = self._made()
        # DLIO's own mechanisms delete nothing, either.
        self._checkpointer = Checkpointer(
            DLIOMPI.get_instance().comm(), slow=args.checkpoint_folder, fast=os.environ.get(FAST) or None, keep=None
        )

    def get_tensor(self, size: int) -> torch.Tensor:
        return torch.randint(high=1, size=(size,), dtype=torch.int8)

    def save_state(self, suffix: str, state: Any) -> None:
        raise NotImplementedError("checkpoint() saves everything at once")

    def checkpoint(self, epoch: int, step_number: int) -> None:
        """Returns when the state has been copied. Collective."""
        self._checkpointer.save((epoch - 1) * self.args.training_steps + step_number, self._tree)

    def finalize(self) -> None:
        """Returns when everything is on the slow store, synced. Collective."""
        self._checkpointer.close()
        ParioCheckpointing._instance = None

    def _made(self) -> dict[str, Any]:
        """What DLIO's own mechanisms write at each checkpoint, as one tree."""
        args = self.args
        tree: dict[str, Any] = {"model": self.model_state, "optimizer": self.optimization_state}
        if self.layer_state and args.num_layers > 0:
            extra = args.tensor_parallelism if args.tensor_parallelism > 1 else 0
            tree |= {f"layer-{number}": self.layer_state for number in range(args.num_layers + extra)}
        return {name: self._sharded(state) for name, state in tree.items() if state}

    def _sharded(self, state: Any) -> Any:
        if isinstance(state, dict):
            return {name: self._sharded(one) for name, one in state.items()}
        if not self._own:
            return state
        return Shard(state, (len(state) * self.args.comm_size,), (len(state) * self.args.my_rank,))
