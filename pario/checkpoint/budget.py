"""How long checkpoints took until they were durable, and from that, how long the next one will take.

A checkpoint is served by one line of threads: it begins when `save` is called, or when the one before it is durable,
whichever is later. What is under way must be finished first, so its remainder counts, too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from pario.checkpoint.writing import Attempt, Tier

__all__ = ["Budget"]

#: Checkpoints, and intervals between calls, of which the longest counts.
_LAST, _LAST_STEPS = 5, 10
#: A store that others use may be slower next time: that much longer than the longest is expected.
_SPREAD = 1.5


class Budget:
    """Of this rank; all numbers are seconds, all moments those of time.monotonic()."""

    def __init__(self) -> None:
        self._took: dict[Tier, deque[float]] = {"fast": deque(maxlen=_LAST), "slow": deque(maxlen=_LAST)}
        self._last: dict[Tier, tuple[int, float]] = {"fast": (0, 0.0), "slow": (0, 0.0)}  # number, durable when
        self._asked: float | None = None
        self._steps: deque[float] = deque(maxlen=_LAST_STEPS)

    def learn(self, attempts: Iterable[Attempt]) -> None:
        """From those that have become durable since the last call, oldest first."""
        for attempt in attempts:
            for tier in self._took:
                moment = attempt.durable_at.get(tier)
                number, before = self._last[tier]
                if moment is not None and attempt.number > number:
                    self._took[tier].append(moment - max(before, attempt.began))
                    self._last[tier] = attempt.number, moment

    def seconds(self, attempts: Iterable[Attempt], tier: Tier, now: float) -> float:
        """Until a checkpoint that begins `now` is durable on that tier; 0.0 while nothing has been measured.

        attempts : what is under way, oldest first
        """
        attempts = list(attempts)
        self.learn(attempts)
        _, before = self._last[tier]
        waiting = [each for each in attempts if each.error is None and not each.over(tier).is_set()]
        longest = max(self._took[tier], default=0.0)
        if not waiting:
            return _SPREAD * longest
        served = now - max(before, waiting[0].began)  # the first one for so long already
        longest = max(longest, served)
        return _SPREAD * ((len(waiting) + 1) * longest) - served

    def step(self, now: float) -> float:
        """The longest of the last intervals between two calls of this method."""
        if self._asked is not None:
            self._steps.append(now - self._asked)
        self._asked = now
        return max(self._steps, default=0.0)
