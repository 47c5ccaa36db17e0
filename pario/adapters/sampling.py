"""A sampler that tells `pario.lmdb` which records come next: the workers of a DataLoader then find them in memory."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from pario.errors import OptionError

__all__ = ["prefetching"]


class prefetching:
    """The same sampler, which announces its records: `DataLoader(dataset, sampler=prefetching(sampler, env, key))`.

    sampler : gives indices, or lists of them (a batch sampler)
    env : a `pario.lmdb.Environment` of this process, which gets `will_read`; the workers open theirs as ever
    key : key(index) -> bytes, the key of that record
    records : how far ahead of the one that the DataLoader takes records are announced; it is itself some batches ahead
        of the loop
    db : as for `env.begin`

    Whatever else is asked of it, as `set_epoch` or `batch_size`, the sampler answers.
    """

    def __init__(
        self, sampler: Iterable[Any], env: Any, key: Callable[[Any], bytes], *, records: int = 512, db: Any = None
    ) -> None:
        if not callable(getattr(env, "will_read", None)):
            raise OptionError(
                f"env must be a pario.lmdb.Environment, got {type(env).__module__}.{type(env).__name__}",
                hint="import pario.lmdb as lmdb, or start the script by `python -m pario run`.",
            )
        if records < 1:
            raise OptionError(f"records must be at least 1, got {records!r}")
        self.sampler = sampler
        self._env, self._key, self._records, self._db = env, key, records, db

    def __iter__(self) -> Iterator[Any]:
        source = iter(self.sampler)
        waiting: deque[Any] = deque()
        ahead = 0  # records in `waiting`
        while True:
            if 2 * ahead <= self._records:
                told: list[bytes] = []
                while ahead + len(told) < self._records and (more := list(islice(source, 1))):
                    waiting.extend(more)
                    told += [self._key(index) for index in _indices(more[0])]
                if told:
                    self._env.will_read(told, self._db)
                    ahead += len(told)
            if not waiting:
                return
            one = waiting.popleft()
            ahead -= len(_indices(one))
            yield one

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "sampler":  # before __init__, when it is unpickled
            raise AttributeError(name)
        return getattr(self.sampler, name)


def _indices(one: Any) -> list[Any]:
    return list(one) if isinstance(one, (list, tuple)) else [one]
