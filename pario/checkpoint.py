"""Where an epoch stands, as a few integers: what `Loader.state_dict()` saves and `load_state_dict()` checks.

The position counts records of the epoch's order that all ranks together have consumed, so a state says nothing about
ranks or batches and goes on with any number of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pario.errors import StateError

__all__ = ["VERSION", "LoaderState"]

#: Of the fields and of the orders in plan/epoch.py: a state must never go on in another order than it was saved in.
VERSION = 2

#: What to do about a field that differs.
_HINTS = {
    "fingerprint": "open the dataset file that the state was saved with (a file that was written to since is another)",
    "n": "open the dataset (and the database in it) that the state was saved with",
    "seed": "construct the Loader with the seed of the state",
    "shuffle": "construct the Loader with the shuffle of the state",
    "block_records": "construct the Loader with the block_bytes that the state was saved with",
    "mix_blocks": "construct the Loader with the mix_blocks of the state",
    "drop_last": "construct the Loader with the drop_last of the state",
}


@dataclass(frozen=True)
class LoaderState:
    """A place in the stream of records.

    version : of this format and of the orders
    fingerprint : of the dataset file, hex
    n : records of an epoch
    seed : of the order
    shuffle : "none", "global" or "block"
    block_records, mix_blocks : of the block order; 0 for the others
    epoch : the epoch that is under way
    position : records of that epoch that all ranks together have consumed, 0..n
    drop_last : whether the remainder of an epoch is left out
    """

    version: int
    fingerprint: str
    n: int
    seed: int
    shuffle: str
    block_records: int
    mix_blocks: int
    epoch: int
    position: int
    drop_last: bool

    def to_dict(self) -> dict[str, Any]:
        """Integers, strings and a bool: what json, pickle or torch.save take."""
        return asdict(self)

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> LoaderState:
        """Raises StateError for what is no state of this version, or one with impossible values."""
        if not isinstance(state, Mapping):
            raise StateError(f"a loader state is a dict, got {type(state).__name__}")
        if state.get("version") != VERSION:
            raise StateError(
                f"a loader state of version {state.get('version')!r}, expected {VERSION}",
                hint="Go on with the pario that saved it, or start the epoch anew without the state",
            )
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in state]
        unknown = [str(name) for name in state if name not in names]
        if missing or unknown:
            raise StateError(f"not a loader state: missing {missing}, unknown {unknown}")
        kinds = {"fingerprint": str, "shuffle": str, "drop_last": bool}
        for name in names:
            value = state[name]
            if name in kinds:
                good, what = isinstance(value, kinds[name]), f"a {kinds[name].__name__}"
            else:
                good = isinstance(value, int) and not isinstance(value, bool) and value >= 0
                what = "an integer of at least 0"
            if not good:
                raise StateError(f"loader state: {name} must be {what}, got {value!r}")
        made = cls(**{name: state[name] for name in names})
        if made.shuffle not in ("none", "global", "block"):
            raise StateError(f'loader state: shuffle must be "none", "global" or "block", got {made.shuffle!r}')
        if made.position > made.n:
            raise StateError(f"loader state: position {made.position} of an epoch of {made.n} records")
        return made

    def check(self, other: LoaderState) -> None:
        """Raises StateError unless this (saved) state can go on where `other`, the Loader's own, describes dataset
        and options. Epoch and position may differ."""
        if self.version != other.version:
            raise StateError(f"a loader state of version {self.version}, expected {other.version}")
        differ = [name for name in _HINTS if getattr(self, name) != getattr(other, name)]
        if differ:
            lines = [f"{name} is {getattr(other, name)!r}, the state has {getattr(self, name)!r}" for name in differ]
            hints = [_HINTS[name] for name in differ]
            raise StateError(
                "the saved state is of another stream: " + "; ".join(lines),
                hint="To go on from it: " + "; ".join(hints) + ". Or start anew without the state",
            )
