"""A position in an epoch, as a few integers: `Loader.state_dict()` saves it and `load_state_dict()` checks it.

The position counts records of the epoch's order that all ranks together have consumed. So a state does not mention
ranks or batches, and any number of ranks can continue from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from pario.dataset.reader import Reader
from pario.errors import StateError
from pario.records import Records

#: Version of the fields and of the orders in plan/epoch.py: a state must never continue in another order.
VERSION = 3
#: In this one the pools of "block" were others; the rest is the same.
_BEFORE = 2

#: The remedy for each field that differs.
_HINTS = {
    "fingerprint": "open the dataset file that the state was saved with (writing to a file makes it another one)",
    "n": "open the dataset (and the database in it) that the state was saved with",
    "seed": "construct the Loader with the seed of the state",
    "shuffle": "construct the Loader with the shuffle of the state",
    "block_records": "construct the Loader with the block_bytes that the state was saved with",
    "mix_blocks": "construct the Loader with the mix_blocks of the state",
    "drop_last": "construct the Loader with the drop_last of the state",
    "selection": "construct the Loader with the select of the state, and its fields",
    "mixture": "construct the Loader with the weights of the state",
}
#: Fields that a state may lack: it was saved where they say nothing.
_OPTIONAL = {"selection": "", "mixture": ""}


def identify(reader: Reader, ends: Records) -> str:
    """The fingerprint of a dataset in a saved state, hex. Not collective.

    ends : the first and the last record of each file, see `ends_of`

    It covers the trees' page counts and these records; datasets that agree in them count as the same. It does not
    cover the extents of all records, because these may become known only while the records are read.
    """
    counts = tuple(
        (one.stop - one.start, *one.record[2:6])  # the depth, and pages of each kind
        for one in reader.index.files.stretches
    )
    identity = hashlib.sha256(repr(counts[0] if len(counts) == 1 else counts).encode())
    for part in (*reader.keys(ends.ids), *ends):
        identity.update(len(part).to_bytes(8, "little") + bytes(part))
    return identity.hexdigest()[:32]


def ends_of(reader: Reader) -> list[int]:
    """The ids of the first and the last record of each file."""
    return [record for _, start, stop, *_ in reader.index.files.stretches for record in (start, stop - 1)]


@dataclass(frozen=True)
class LoaderState:
    """A position in the stream of records.

    version : version of this format and of the orders
    fingerprint : the dataset's, hex
    n : records of an epoch
    seed : seed of the order
    shuffle : "none", "global" or "block"
    block_records, mix_blocks : parameters of the block order; 0 for the others
    epoch : the current epoch
    position : records of that epoch that all ranks together have consumed, 0..n
    drop_last : whether the remainder of an epoch is left out
    selection : hash of the selected ids, hex; "" for all records of the dataset
    mixture : the shares of a mixture's sources, and how many records each one has; "" if each record comes once
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
    selection: str = ""
    mixture: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Integers, strings and a bool, for json, pickle or torch.save."""
        return {name: value for name, value in asdict(self).items() if value != _OPTIONAL.get(name)}

    @classmethod
    def from_dict(cls, state: Mapping[str, Any]) -> LoaderState:
        """Raises StateError if this is not a state of this version, or if its values are impossible."""
        if not isinstance(state, Mapping):
            raise StateError(f"a loader state is a dict, got {type(state).__name__}")
        if state.get("version") == _BEFORE and state.get("shuffle") != "block":
            state = {**state, "version": VERSION}
        if state.get("version") != VERSION:
            raise StateError(
                f"a loader state of version {state.get('version')!r}, expected {VERSION}",
                hint="Continue with the pario that saved it, or start the epoch again without the state",
            )
        state = {**_OPTIONAL, **state}
        names = [field.name for field in fields(cls)]
        missing = [name for name in names if name not in state]
        unknown = [str(name) for name in state if name not in names]
        if missing or unknown:
            raise StateError(f"not a loader state: missing {missing}, unknown {unknown}")
        kinds = {"fingerprint": str, "shuffle": str, "drop_last": bool, "selection": str, "mixture": str}
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
        """Raises StateError unless this saved state fits `other`, which describes the Loader's dataset and options.
        Epoch and position may differ."""
        differ = [name for name in _HINTS if getattr(self, name) != getattr(other, name)]
        if differ:
            lines = [f"{name} is {getattr(other, name)!r}, the state has {getattr(self, name)!r}" for name in differ]
            hints = [_HINTS[name] for name in differ]
            if "selection" in differ:  # then n and the blocks differ for that reason
                hints = [_HINTS[name] for name in differ if name not in ("n", "block_records")]
                if not self.selection:
                    hints[-1] = 'construct the Loader with select="all": the state is one of all records'
            raise StateError(
                "the saved state is of another stream: " + "; ".join(lines),
                hint="To go on from it: " + "; ".join(hints) + ". Or start again without the state",
            )
