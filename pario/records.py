"""The data that rooms pass to each other: extents down, records and batches up."""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

#: Where a record's value lies in the data file. `offset` and `nbytes` are bytes.
EXTENT = np.dtype([("offset", "<i8"), ("nbytes", "<i8")])


@dataclass(frozen=True, slots=True)
class Records:
    """The bytes of several records, as views: record i is `data[starts[i] : starts[i] + nbytes[i]]`.

    ids : i64[n], record ids (key order)
    data : u8[...], memory that holds the values, not packed and not in order
    starts, nbytes : i64[n], bytes

    Records from a ring are valid until the step is released; copy what you keep.
    """

    ids: np.ndarray
    data: np.ndarray
    starts: np.ndarray
    nbytes: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> np.ndarray:
        """u8[nbytes[i]], a view."""
        start = int(self.starts[i])
        return self.data[start : start + int(self.nbytes[i])]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    @staticmethod
    def of(ids: np.ndarray, values: Sequence[bytes]) -> Records:
        """These values, one behind the other in memory of their own."""
        nbytes = np.fromiter(map(len, values), np.int64, len(values))
        data = np.frombuffer(values[0] if len(values) == 1 else b"".join(values), np.uint8)
        return Records(ids, data, np.cumsum(nbytes) - nbytes, nbytes)

    def part(self, first: int, stop: int) -> Records:
        """Records [first, stop), in the same memory."""
        return Records(self.ids[first:stop], self.data, self.starts[first:stop], self.nbytes[first:stop])


if TYPE_CHECKING:  # type checkers believe that iterating over a Mapping gives its keys
    _Arrays = Iterable[np.ndarray]
else:
    _Arrays = Mapping[str, np.ndarray]


class Batch(_Arrays):
    """Named arrays of one step on one rank, first axis = records.

    `batch["data"]` and the like are the decoder's arrays. `batch.ids` i64[b] are the record ids, `batch.epoch` and
    `batch.step` the batch's position. `batch.skipped` counts the records that the decoder could not read (policy
    "skip"). An array stays valid as long as you refer to it.

    `x, y = batch` and `for array in batch` give the arrays, in the order of their names' first mention by the decoder;
    `keys()`, `values()` and `items()` are those of a dict, and so are `dict(batch)` and `f(**batch)`.

    Frameworks rebuild a mapping out of its changed values, `Batch({"data": tensor, ...})`. What they build has the
    values alone: `ids`, `epoch`, `step` and `skipped` raise AttributeError.
    """

    __slots__ = ("_arrays", "epoch", "ids", "skipped", "step")

    def __init__(
        self,
        arrays: Mapping[str, Any] | Iterable[tuple[str, Any]],
        ids: np.ndarray | None = None,
        epoch: int | None = None,
        step: int | None = None,
        skipped: int = 0,
    ) -> None:
        self._arrays = dict(arrays)
        if ids is None or epoch is None or step is None:
            return  # rebuilt: __getattr__ says what it lacks
        self.ids = ids
        self.epoch = epoch
        self.step = step
        self.skipped = skipped

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in Batch.__slots__:
                raise AttributeError(
                    f"this batch has no {name}: a framework built it anew out of the arrays of another one. Ask the "
                    "batch that came from the loader, or let pario.adapters.torch.Loader(ids=...) make the ids one of "
                    "the arrays"
                )
            raise AttributeError(f"a batch has no attribute {name!r}; its arrays are items: batch[{name!r}]")

    def __getitem__(self, name: str) -> np.ndarray:
        try:
            return self._arrays[name]
        except (KeyError, TypeError):  # an array, of a loop that expected names, cannot be hashed
            has = ", ".join(map(repr, self._arrays))
            if isinstance(name, str):
                raise KeyError(f"no array {name!r} in this batch; it has {has}") from None
            raise KeyError(
                f"arrays of a batch have names ({has}), got {type(name).__name__}; `for name in batch.keys()` goes "
                "over the names, `for array in batch` over the arrays"
            ) from None

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(self._arrays.values())

    def __len__(self) -> int:
        """Number of named arrays; the number of records is `len(batch.ids)`."""
        return len(self._arrays)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._arrays

    def get(self, name: str, default: Any = None) -> Any:
        return self._arrays.get(name, default)

    def keys(self) -> KeysView[str]:
        return self._arrays.keys()

    def values(self) -> ValuesView[np.ndarray]:
        return self._arrays.values()

    def items(self) -> ItemsView[str, np.ndarray]:
        return self._arrays.items()

    def __repr__(self) -> str:
        arrays = ", ".join(f"{name}: {_extent(value)}" for name, value in self._arrays.items())
        if not hasattr(self, "ids"):
            return f"Batch({arrays})"
        return f"Batch(epoch={self.epoch}, step={self.step}, records={len(self.ids)}, {arrays})"

    def _repr_html_(self) -> str:
        from pario.notebook import html_of_arrays

        return html_of_arrays(repr(self), self._arrays)


def _extent(value: Any) -> str:
    """An array as "float32[8, 4]"; anything else by its type."""
    shape = getattr(value, "shape", None)
    return f"{value.dtype}{list(shape)}" if shape is not None else type(value).__name__
