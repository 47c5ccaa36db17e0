"""What Lightning's Trainer needs besides `pario.adapters.torch.Loader`: the right number of batches after resuming on
another number of ranks."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from pario.adapters.torch import Loader
from pario.errors import StateError

if TYPE_CHECKING:
    from lightning.pytorch import Callback
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:  # the older name of the package
    from pytorch_lightning import Callback
else:
    from lightning.pytorch import Callback

__all__ = ["Resume"]

_COUNTS = ("ready", "started", "processed", "completed")


class Resume(Callback):
    """Lets a checkpoint go on at the exact record on any number of ranks.

    loader : the training loader that is given to `Trainer.fit`

    Lightning counts the batches of an epoch and ends the epoch at that number. On another number of ranks the rest of
    an epoch has another number of batches: this callback writes it into the checkpoint that Lightning is loading. On
    the same number of ranks it changes nothing.

    With `Trainer(overfit_batches=...)` every epoch has the batches of the first one.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Called by Lightning on every rank, before it looks at the loaders."""
        if stage == "fit":
            self._loader.batch_sampler.held = self._loader.epoch if trainer.overfit_batches else None

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Called by Lightning on every rank."""
        if trainer.state.fn != "fit":  # validate, test and predict take weights out of the checkpoint, and no position
            return
        loop = checkpoint.get("loops", {}).get("fit_loop", {})
        states = loop.get("state_dict", {}).get("combined_loader", [])
        if not states:
            return
        if len(states) != 1:
            raise StateError(
                f"the checkpoint has the states of {len(states)} training loaders, and Resume knows one",
                hint="Resume on the number of ranks that saved it, without this callback.",
            )
        loader, state = self._loader, {name: value for name, value in states[0].items() if name != "ranks"}
        loader.load_state_dict(state)
        # Of a state after an epoch's last batch nothing is left: the loader stands before the next epoch.
        taken = len(loader) if loader.epoch != state["epoch"] else loader.taken
        progress = loop["epoch_loop.batch_progress"]
        more = taken - progress["current"]["ready"]
        for count in _COUNTS:
            progress["current"][count] += more
        progress["is_last_batch"] = taken == len(loader)
        states[0] = state  # without the number of ranks: the position and the count agree now
