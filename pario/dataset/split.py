"""`pario.split`: the parts of a dataset for training, validation and test, as values of `select=`.

A part is a rule, not a list of ids: it takes no memory until a Loader works it out.

    by="id"   the records, randomly permuted, are cut; exact sizes; another number of records is another split
    by="key"  a record belongs to the part in which the hash of its key lies; records that are added move no other
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np

from pario.comm.base import abandoning, together
from pario.comm.world import get_world
from pario.dataset.reader import Reader
from pario.dataset.select import Keys, Wanted, as_wanted, picked
from pario.errors import OptionError
from pario.fetch.resolve import Paths, as_paths
from pario.kernels.permute import STREAM_SPLIT, permute, stream_key
from pario.options import Options
from pario.plan.selection import Selection, common, id_type, runs_of


class Part(Wanted):
    """One part of a split. Pass it as `select=`.

    of : the records that were split
    cuts : [low, high) of what numbers a record by the rule: its position in the permutation, or the hash of its key
    n : records that were split by "id"; None: by "key"
    """

    def __init__(self, of: Wanted, seed: int, cuts: tuple[int, int], n: int | None) -> None:
        self._of = of
        self._seed = seed
        self._cuts = cuts
        self._n = n
        self.mark = ("part", of.mark, seed, *cuts, n)

    def __repr__(self) -> str:
        low, high = self._cuts
        if self._n is not None:
            return f"a part of pario.split with {high - low:,} of {self._n:,} records"
        return f"a part of pario.split with {(high - low) / 2**64:.3g} of all keys"

    def runs(self, reader: Reader) -> np.ndarray:
        if self._n is None:
            hashed = Keys(self._holds).runs(reader)
            return common(picked(self._of, reader), hashed)
        whole = picked(self._of, reader)
        with together(reader.world, "splitting by id (select)"):
            if reader.world.rank == 0:
                return self._of_permuted(whole, self._n, reader)
        return whole

    def _of_permuted(self, whole: np.ndarray, n: int, reader: Reader) -> np.ndarray:
        among = Selection(len(reader), "", runs=whole)
        if among.n != n:
            raise OptionError(
                f"{among.n:,} records are to be divided, and {n:,} were when pario.split was called",
                path=reader.path,
                hint='Split the dataset that you load; by="key" gives parts that stay as they are when records are '
                "added.",
            )
        order = np.empty(n, id_type(n))
        permute(np.uint64(stream_key(np.uint64(self._seed), np.uint64(0), np.uint64(STREAM_SPLIT))), order)
        return runs_of(among.ids(np.sort(order[slice(*self._cuts)]).astype(np.int64)))

    def _holds(self, key: bytes) -> bool:
        digest = hashlib.blake2b(key, digest_size=8, salt=self._seed.to_bytes(8, "little"), person=b"pario split 1")
        return self._cuts[0] <= int.from_bytes(digest.digest(), "little") < self._cuts[1]


def split(
    path: Paths,
    fractions: Sequence[float],
    *,
    seed: int = 0,
    by: Literal["id", "key"] = "id",
    select: Any = None,
    comm: Any = None,
    db: str | bytes | None = None,
    options: Options | None = None,
) -> tuple[Part, ...]:
    """Parts of a dataset, each a value for `Loader(select=...)`. Every record is in exactly one part.

    Parameters
    ----------
    path, comm, db, options : as for `Loader`
    fractions : of the records per part, above 0; their sum is 1
    seed : another seed divides the records in another way
    by : "id" divides them randomly, in sizes that are exact to one record; meant for a dataset that no longer changes.
        "key": the hash of its key says which part has a record, so it stays there when others are added or removed;
        sizes follow the fractions nearly. The values of one key stay together
    select : which records to divide, as `Loader` takes it

    Collective over `comm`. Raises OptionError, and what `Reader` raises, on all ranks.
    """
    world = get_world(comm, "pario.split")
    with abandoning(world):
        with together(world, "looking at the arguments of pario.split"):
            shares, wanted = _checked(fractions, seed, by), as_wanted(select)
            paths = [os.path.abspath(os.path.expanduser(one)) for one in as_paths(path)]
            mark = (paths, db, shares, seed, by, wanted.mark)
        everyones = world.allgather(mark)
        for rank, theirs in enumerate(everyones):
            if theirs != everyones[0]:
                what = f"pario.split has other arguments on rank {rank} than on rank 0: {theirs} against {everyones[0]}"
                raise world.raised_by_all(OptionError(what, hint="It is collective: call it alike on every rank."))
        if by == "key":
            world.close()
            return _parts(wanted, seed, shares, 2**64, None)
    with Reader(path, comm=world, db=db, options=options, grow=wanted.grows) as reader:
        runs = picked(wanted, reader)
        n = world.bcast(int((runs[:, 1] - runs[:, 0]).sum()) if world.rank == 0 else None)
        parts = _parts(wanted, seed, shares, n, n)
        if any(low == high for low, high in (part._cuts for part in parts)):
            what = f"{n:,} records divided by {shares} leave a part without any"
            raise world.raised_by_all(OptionError(what, path=reader.path))
        return parts


def _checked(fractions: Sequence[float], seed: int, by: str) -> tuple[float, ...]:
    if by not in ("id", "key"):
        raise OptionError(f'by must be "id" or "key", got {by!r}')
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 64:
        raise OptionError(f"seed must be an integer of at least 0 and below 2**64, got {seed!r}")
    try:
        shares = tuple(float(share) for share in fractions)
    except (TypeError, ValueError):
        shares = ()
    if not shares or not all(share > 0 for share in shares) or not math.isclose(sum(shares), 1, abs_tol=1e-6):
        raise OptionError(f"fractions must be numbers above 0 with the sum 1, got {fractions!r}")
    return shares


def _parts(of: Wanted, seed: int, shares: tuple[float, ...], whole: int, n: int | None) -> tuple[Part, ...]:
    cuts = [0, *(min(whole, round(share * whole)) for share in accumulate(shares[:-1])), whole]
    return tuple(Part(of, int(seed), (low, high), n) for low, high in pairwise(cuts))
