"""What `save` returns."""

from __future__ import annotations

from collections.abc import Callable

from pario.checkpoint.writing import Attempt
from pario.errors import OptionError

__all__ = ["Handle"]


class Handle:
    """A checkpoint that was handed to `save`.

    step : its step; stall_s : seconds that `save` took on this rank
    """

    def __init__(self, attempt: Attempt, stall_s: float, wait: Callable[[Attempt, str, float | None], None]) -> None:
        self._attempt, self._wait = attempt, wait
        self.step = attempt.manifest.step
        self.stall_s = stall_s

    def __repr__(self) -> str:
        return f"Handle(step={self.step}, done={self.done})"

    @property
    def done(self) -> bool:
        """Whether nothing of it is left to do on this rank. Local; does not wait."""
        return self._attempt.committed.is_set()

    def wait(self, tier: str = "slow", timeout_s: float | None = None) -> None:
        """Return when the checkpoint is complete and durable on the slow store, or with "fast" on the tier that it is
        written to first. With "partner" also the copies of all nodes' parts stand on other nodes' fast tiers; where one
        cannot be made, it returns when the slow store has the checkpoint. Collective.

        Raises CheckpointError if it could not be saved, and TimeoutError (on all ranks) after `timeout_s` seconds.
        """
        if tier not in ("fast", "partner", "slow"):
            raise OptionError(f'tier must be "fast", "partner" or "slow", got {tier!r}')
        self._wait(self._attempt, tier, timeout_s)
