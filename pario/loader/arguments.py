"""The arguments of a Loader, checked on each rank and compared over all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from pario.comm.base import AnyWorld
from pario.dataset.fields import as_fields
from pario.dataset.select import as_wanted
from pario.decode.base import Decoder
from pario.decode.function import as_decoder
from pario.errors import OptionError
from pario.fetch.resolve import Paths, as_paths
from pario.machine import Share, allowed_cores, boot, my_share
from pario.options import ORDERS, POLICIES, Options, Policy, Recipe, Shuffle, find_recipe
from pario.plan.mixture import as_units

__all__ = ["Arguments"]


@dataclass
class Arguments:
    """The arguments of `Loader`, whose docstring explains them. Unchecked until `agree` has been called."""

    path: Paths
    batch_size: int
    decoder: Decoder | Callable[..., Any] | None
    shuffle: Shuffle
    seed: int
    db: str | bytes | None
    drop_last: bool
    on_error: Policy
    options: Options
    recipe: Recipe | str
    select: Any = None
    fields: Any = None
    weights: Any = None
    verify: bool = False

    def agree(self, world: AnyWorld) -> Share:
        """Check them, and that all ranks were given the same. Returns this rank's share of its machine.

        Collective; raises OptionError on all ranks.
        """
        error: BaseException | None = None
        try:
            self._check()
        except Exception as e:
            error = e
        world.agree(error, "checking the arguments of Loader")
        return self._compare(world)

    def _check(self) -> None:
        if self.shuffle is True:
            self.shuffle = "global"
        shuffle, size, seed = self.shuffle, self.batch_size, self.seed
        if not isinstance(self.options, Options):
            raise OptionError(f"options must be a pario.Options, got {self.options!r}")
        if not (shuffle is False or (isinstance(shuffle, str) and shuffle in ORDERS)):
            raise OptionError(f'shuffle must be False, "global" (or True) or "block", got {shuffle!r}')
        self.recipe = find_recipe(self.recipe)
        if self.on_error not in POLICIES:
            raise OptionError(f'on_error must be "raise", "skip" or "substitute", got {self.on_error!r}')
        if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise OptionError(f"batch_size must be an integer of at least 1 record per rank, got {size!r}")
        if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 64:
            raise OptionError(f"seed must be an integer of at least 0 and below 2**64, got {seed!r}")
        self.batch_size, self.seed, self.drop_last = int(size), int(seed), bool(self.drop_last)
        self.verify = bool(self.verify)
        self.path = as_paths(self.path)
        self.fields = as_fields(self.fields)
        if self.fields is not None:
            if self.decoder is not None:
                raise OptionError("decoder= and fields= exclude each other: each field has a decoder of its own")
            if self.recipe.source != "auto":
                raise OptionError(f"{self.recipe} is for studies, and knows no fields=")
            self.decoder = self.fields.decoder()
        self.decoder = as_decoder(self.decoder)
        self.select = as_wanted(self.select)
        if self.weights is not None:
            self._check_weights()

    def _check_weights(self) -> None:
        """Make whole numbers of them; None where there is nothing to mix."""
        paths, self.weights = as_paths(self.path), as_units(self.weights)
        if len(self.weights) != len(paths):
            raise OptionError(
                f"weights has {len(self.weights)} numbers for {len(paths)} paths",
                hint="Pass a list of paths, each of which may be a pattern or a folder, and a weight for each.",
            )
        if self.shuffle == "block":
            raise OptionError(
                'weights= goes with shuffle=False or "global", not with "block"',
                hint="A mixture draws record by record, so it would read no longer runs of neighbours.",
            )
        if len(paths) == 1:
            self.weights = None

    def _compare(self, world: AnyWorld) -> Share:
        paths = [os.path.abspath(os.path.expanduser(path)) for path in as_paths(self.path)]
        mine: tuple[Any, ...] = (paths, self.weights, self.db)
        mine += (self.batch_size, self.shuffle, self.seed, self.drop_last, self.on_error)
        mine += (repr(self.recipe), repr(self.options), self.select.mark, self.fields and self.fields.mark, self.verify)
        everyones = world.allgather((mine, boot(), allowed_cores()))
        first = everyones[0][0]
        for rank, (theirs, *_) in enumerate(everyones):
            if theirs != first:
                error = OptionError(
                    f"the arguments of rank {rank} differ from those of rank 0: {theirs} against {first} "
                    "(path, weights, db, batch_size, shuffle, seed, drop_last, on_error, recipe, options, select, "
                    "fields, verify)",
                    hint="The constructor is collective: call it with the same arguments on every rank. To read "
                    "another file on each rank, pass comm=MPI.COMM_SELF.",
                )
                raise world.raised_by_all(error)
        return my_share(world.rank, [(machine, cores) for _, machine, cores in everyones])
