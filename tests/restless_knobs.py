"""Laws that turn every knob to anything, at every occasion."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest

from pario.feed.ring_writer import RingWriter
from pario.tune import decoding, depth
from pario.tune.knobs import Setting
from pario.tune.tuner import Law


def restless(monkeypatch: pytest.MonkeyPatch, seed: int = 0) -> dict[str, list[int]]:
    """From now on, until the test ends. Returns what was asked for, by the names of options."""
    said: dict[str, list[int]] = {"inflight": [], "decode_threads": [], "decode_ahead": []}
    seeds = count(1000 * seed)

    def law(name: str, choices: list[int]) -> type:
        class AtRandom(Law):
            def __init__(self) -> None:
                self._random = random.Random(next(seeds))

            def step(self, value: int, window: Any) -> Setting:
                said[name].append(self._random.choice(choices))
                return Setting(said[name][-1], "at random")

        return AtRandom

    monkeypatch.setattr(depth, "FastProbe", law("inflight", [0, 1, 2, 3, 8, 1000]))
    monkeypatch.setattr(decoding, "ThreadsLaw", law("decode_threads", [0, 1, 2, 5, 1000]))
    monkeypatch.setattr(decoding, "AheadLaw", law("decode_ahead", [0, 1, 2, 7, 1000]))
    monkeypatch.setattr(depth, "_HURRIED", (0.0, 0.0))
    monkeypatch.setattr(depth, "_PROBE", (0.0, 0.0))
    monkeypatch.setattr(depth.Depth, "_enough", lambda self: 1)
    monkeypatch.setattr(decoding, "WINDOW_S", 0.0)
    monkeypatch.setattr(decoding, "_LEAST_BATCHES", 1)
    lengths = random.Random(seed)
    merge = RingWriter._merge

    def of_any_length(self: RingWriter, *arguments: Any, **more: Any) -> Any:
        self._read_bytes = lengths.choice([4096, 12_288, 100_000, 1 << 20])
        return merge(self, *arguments, **more)

    monkeypatch.setattr(RingWriter, "_merge", of_any_length)
    return said
