"""The arguments of a Loader, checked on each rank and compared over all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pario.comm.base import AnyWorld, together
from pario.comm.world import ranks_in
from pario.dataset.select import as_wanted
from pario.decode.base import Decoder
from pario.decode.given import as_decoder
from pario.errors import OptionError
from pario.fetch.resolve import Paths, as_paths
from pario.machine import Share, allowed_cores, boot, my_share
from pario.options import ORDERS, POLICIES, Options, Policy, Recipe, Shuffle, find_recipe
from pario.plan.budget import Budget
from pario.plan.mixture import as_units
from pario.plan.seats import Seats, seats_of_groups


@dataclass
class Arguments:
    """The arguments of `Loader`, whose docstring explains them. Unchecked until `agree` has been called.

    seats, budget : who delivers which batches, and what they may cost; set by `agree`
    """

    path: Paths
    batch_size: int | Budget
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
    share_batch: Any = None
    seats: Seats = field(init=False)
    budget: Budget | None = field(init=False, default=None)

    def agree(self, world: AnyWorld) -> Share:
        """Check them, and that all ranks were given the same. Returns this rank's share of its machine.

        Collective; raises OptionError on all ranks.
        """
        members: tuple[int, ...] | None = None
        with together(world, "checking the arguments of Loader"):
            self._check()
            if self.share_batch is not None:
                members = ranks_in(world, self.share_batch, "share_batch")
        return self._compare(world, members)

    def _check(self) -> None:
        if self.shuffle is True:
            self.shuffle = "global"
        shuffle, size, seed = self.shuffle, self.batch_size, self.seed
        if not isinstance(self.options, Options):
            raise OptionError(f"options must be a pario.Options, got {self.options!r}")
        if not (shuffle is False or (isinstance(shuffle, str) and shuffle in ORDERS)):
            raise OptionError(f'shuffle must be False, "global" (or True) or "block", got {shuffle!r}')
        self.recipe = recipe = find_recipe(self.recipe)
        if self.on_error not in POLICIES:
            raise OptionError(f'on_error must be "raise", "skip" or "substitute", got {self.on_error!r}')
        if isinstance(size, Budget):
            self.budget = size
        elif isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1:
            raise OptionError(f"batch_size must be an integer of at least 1 record per rank, or a Budget, got {size!r}")
        else:
            self.batch_size = int(size)
        if not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 64:
            raise OptionError(f"seed must be an integer of at least 0 and below 2**64, got {seed!r}")
        self.seed, self.drop_last = int(seed), bool(self.drop_last)
        self.verify = bool(self.verify)
        self.path = as_paths(self.path)
        if self.fields is not None:
            self._check_fields(recipe)
        self.decoder = as_decoder(self.decoder)
        self.select = as_wanted(self.select, sources=self.weights is not None)
        if self.weights is not None:
            self._check_weights()
        if self.options.trace is not None:
            from pario.stats.trace_file import check_writable

            check_writable(self.options.trace)

    def _check_weights(self) -> None:
        """Make whole numbers of them; None where there is nothing to mix."""
        self.weights = as_units(self.weights)
        if self.select.parts:
            count, what = len(self.select.parts), "selections"
            if self.fields is not None:
                raise OptionError("weights= of several selections goes without fields=")
        else:
            count, what = len(as_paths(self.path)), "paths"
        if len(self.weights) != count:
            raise OptionError(
                f"weights has {len(self.weights)} numbers for {count} {what}",
                hint="Pass a list of paths, each of which may be a pattern or a folder, or a list of selections "
                "(select=[b'cat/', b'dog/']), and a weight for each.",
            )
        if self.shuffle == "block":
            raise OptionError(
                'weights= goes with shuffle=False or "global", not with "block"',
                hint="A mixture draws record by record, so it would read no longer runs of neighbours.",
            )
        if self.budget is not None:
            raise OptionError(f"{self.budget!r} counts each record once, and weights= draws some of them several times")
        if count == 1:
            self.weights = None
            self.select = self.select.parts[0] if self.select.parts else self.select

    def _check_fields(self, recipe: Recipe) -> None:
        from pario.dataset.fields import as_fields

        self.fields = as_fields(self.fields)
        if self.decoder is not None:
            raise OptionError("decoder= and fields= exclude each other: each field has a decoder of its own")
        if recipe.source != "auto":
            raise OptionError(f"{recipe} is for studies, and knows no fields=")
        if self.budget is not None:
            raise OptionError(f"{self.budget!r} counts single records, and with fields= a sample has several")
        self.decoder = self.fields.decoder()

    def _compare(self, world: AnyWorld, members: tuple[int, ...] | None) -> Share:
        alike = ("weights", "db", "shuffle", "seed", "drop_last", "on_error", "verify")
        mine = {name: getattr(self, name) for name in alike} | {
            "path": [os.path.abspath(os.path.expanduser(path)) for path in as_paths(self.path)],
            "batch_size": self.batch_size if self.budget is None else self.budget.mark,
            "recipe": repr(self.recipe),
            "options": repr(self.options),
            "select": self.select.mark,
            "fields": self.fields and self.fields.mark,
        }
        everyones = world.allgather((mine, boot(), allowed_cores(), members, world.node))
        first = everyones[0][0]
        for rank, (theirs, *_) in enumerate(everyones):
            if theirs != first:
                others = [
                    f"{name} {theirs[name]!r} against {first[name]!r}" for name in mine if theirs[name] != first[name]
                ]
                error = OptionError(
                    f"the arguments of rank {rank} differ from those of rank 0: {'; '.join(others)}",
                    hint="The constructor is collective: call it with the same arguments on every rank. To read "
                    "another file on each rank, pass comm=MPI.COMM_SELF.",
                )
                raise world.raised_by_all(error)
        self.share_batch = None  # the script may free it
        *_, groups, nodes = zip(*everyones, strict=True)
        try:
            self.seats = _seats(world, groups, nodes)
        except OptionError as error:
            raise world.raised_by_all(error) from None
        return my_share(world.rank, [(machine, cores) for _, machine, cores, *_ in everyones])


def _seats(world: AnyWorld, groups: tuple[tuple[int, ...] | None, ...], nodes: tuple[int, ...]) -> Seats:
    if not any(group is not None for group in groups):
        return Seats(world.size, world.seat, ((world.node_seat, world.node_size),))
    return seats_of_groups(groups, nodes, world.rank)
