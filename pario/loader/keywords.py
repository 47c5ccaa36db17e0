"""The keywords of `pario.Loader` as a type, for the loaders of frameworks, which pass them on; and those of other
loaders, which it refuses with what to write instead. Loaded where a keyword is given that `pario.Loader` has not."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from pario.errors import OptionError
from pario.options import Options, Policy, Recipe, Shuffle


class Keywords(TypedDict, total=False):
    """See `pario.Loader`."""

    shuffle: Shuffle | None
    seed: int
    comm: Any
    db: str | bytes | None
    drop_last: bool
    on_error: Policy
    options: Options | None
    recipe: str | Recipe
    select: Any
    fields: Mapping[str, tuple[Any, Any]] | None
    weights: Sequence[float] | None
    verify: bool
    share_batch: Any
    save_index: bool
    progress: Callable[[int, int], None] | None


_WORKERS = "leave it out: each rank decodes in threads. Their number is options=pario.Options(decode_threads=N)"
_RANKS = "leave it out: each rank gets its own part of every step, in the order of shuffle= and seed="
#: keyword of torch.utils.data.DataLoader -> what to write
_INSTEAD = {
    "dataset": "pass the path of the LMDB first, and what decodes a record third",
    "num_workers": _WORKERS,
    "multiprocessing_context": _WORKERS,
    "worker_init_fn": _WORKERS,
    "persistent_workers": _WORKERS,
    "timeout": "leave it out: a rank that fails or hangs ends the loop on all ranks",
    "prefetch_factor": "leave it out: batches are read ahead as far as memory allows, options=pario.Options(slots=N) "
    "steps at most",
    "pin_memory": 'pass device="cuda" to pario.adapters.torch.Loader: it pins each batch and copies it one batch ahead',
    "pin_memory_device": 'pass device="cuda:1" to pario.adapters.torch.Loader',
    "collate_fn": "pass a decoder as the third argument: a function of one record's bytes, or one of pario.decode. Its "
    "arrays come as a batch; form=function of pario.adapters.torch.Loader changes the whole batch",
    "sampler": f"{_RANKS}; select= picks records, and weights= draws some more often",
    "batch_sampler": f"{_RANKS}; batch_size=pario.Budget(...) makes batches of equal cost",
    "generator": "pass seed=, an integer",
    "in_order": "leave it out: the order depends only on seed and epoch",
}


def refuse(kind: type, keywords: Iterable[str]) -> None:
    """Raise OptionError if one of them is a DataLoader's, and not one that this kind of Loader has itself."""
    for name in keywords:
        if name in _INSTEAD and name not in inspect.signature(kind.__init__).parameters:  # type: ignore[misc]
            raise OptionError(f"{name}= is an argument of a DataLoader, and a Loader has none", hint=_INSTEAD[name])


def refuse_number() -> None:
    """What `loader[3]` says, and a DataLoader around a loader with it. Raises OptionError."""
    raise OptionError(
        "a Loader gives batches in their order, not by number",
        hint="Loop over it: `for batch in loader`, without a DataLoader around it; loader.peek() shows the next batch, "
        "and pario.Reader reads records by id.",
    )
