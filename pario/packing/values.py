"""How the values of one database shall be packed: the codec, and a dictionary if it pays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pario.codec import registry
from pario.codec.base import Codec
from pario.codec.packing import Packing
from pario.codec.select import Selection
from pario.codec.trial import selection_for
from pario.codec.zstd import train
from pario.errors import OptionError
from pario.packing.items import Items
from pario.records import Records
from pario.text import counted, decimal_bytes

__all__ = ["dictionary_bytes", "packing_for"]

#: Bytes of an automatic dictionary: 419 B JSON 3.66 with 32 KiB; four times as many digest longer than they save.
_DICTIONARY = 32 << 10
#: What is read to train and to judge: a hundred times the dictionary is the usual advice, and as much again to judge.
_SAMPLE_BYTES, _SAMPLES = 200 * _DICTIONARY, 20_000
#: Larger values hold themselves what a dictionary could tell; they are neither trained on nor judged by.
_SMALL = 64 << 10
#: For `auto`: samples in bytes, records of a batch, and the store's bytes per second, as of `choose`.
_CHOICE_BYTES, _BATCH, _STORE = 16 << 20, 256, 200e6
#: It must save this share of what is stored without it, since decoding looks it up.
_PAYS = 0.03


def dictionary_bytes(text: str) -> int | None:
    """What the option means: None for "auto", 0 for "no", else bytes: 32768, 32k, 1M. Raises OptionError."""
    if text in ("auto", "no"):
        return None if text == "auto" else 0
    number, unit = text.lower().removesuffix("ib").removesuffix("b"), 1
    if number[-1:] in ("k", "m"):
        number, unit = number[:-1], 1024 if number[-1] == "k" else 1024**2
    if not number.isdigit() or not 256 <= int(number) * unit <= 64 << 20:
        raise OptionError(f"dictionary is auto, no, or a size of 256 bytes to 64 MiB such as 32k, got {text!r}")
    return int(number) * unit


def packing_for(items: Items, spec: str, dictionary: int | None, say: Callable[[str], None]) -> Packing:
    """The packing for these records; reads samples of them. Local. Raises OptionError.

    spec : as `registry.parse` takes it, or "auto"
    dictionary : bytes; None: automatic, 0: none
    """
    more: dict[str, Any] = {}
    if spec == "auto":
        chosen = _chosen(items, dictionary != 0)
        spec, more["prediction"] = chosen.chosen.candidate.name, chosen.prediction()
        say(f"codec {spec}, chosen for samples of {counted(items.n, 'record')}; `python -m pario choose` says why")
    codec = registry.parse(spec)
    if dictionary and not codec.takes_dictionary:
        raise OptionError(f"codec {codec.name} takes no dictionary", hint="Use --dictionary no, or --codec zstd:3.")
    trained = b""
    if dictionary != 0 and codec.takes_dictionary:
        trained = _dictionary(items, codec, dictionary, say)
    return Packing([registry.parse(spec, trained)], more=more)


def _chosen(items: Items, dictionaries: bool) -> Selection:
    """What FanStore's equations say of these records, if nothing is known of the application.

    dictionaries : whether values may be packed with one
    """
    samples = [value.tobytes() for value in _samples(items, np.arange(items.n), _CHOICE_BYTES)[0]]
    return selection_for(
        samples, iteration=None, batch=_BATCH, threads=None, store=_STORE, seconds=0.1, dictionaries=dictionaries
    )


def _dictionary(items: Items, codec: Codec, nbytes: int | None, say: Callable[[str], None]) -> bytes:
    """A trained dictionary if it pays, else b"".

    nbytes : None: automatic
    """
    small = np.flatnonzero(items.sizes < _SMALL)
    if len(small) < 16:
        return b""
    train_on, judge_on = _samples(items, small, 200 * nbytes if nbytes else _SAMPLE_BYTES)
    trained = train([value.tobytes() for value in train_on], nbytes or _DICTIONARY, codec.level or 3)
    if not trained:
        return b""
    raw = max(1, int(judge_on.nbytes.sum()))
    scale = int(items.sizes[small].sum()) / raw  # from the judged records to all that it is for
    packings = (Packing([registry.parse(str(codec), known)]) for known in (b"", trained))
    without, with_it = (scale * int(packing.pack_many(judge_on)[2].sum()) for packing in packings)
    if with_it + len(trained) >= (1 - _PAYS) * without:
        return b""
    say(
        f"a dictionary of {decimal_bytes(len(trained))}, from {counted(len(train_on), 'sample')}: about "
        f"{decimal_bytes(with_it + len(trained))} instead of {decimal_bytes(without)}"
    )
    return trained


def _samples(items: Items, ids: np.ndarray, nbytes: int) -> tuple[Records, Records]:
    """Some of these records, from all over the database: those to train on, and those to judge by; about `nbytes`."""
    count = min(len(ids), _SAMPLES, max(16, int(nbytes * len(ids) / max(1, items.sizes[ids].sum()))))
    if count < len(ids):  # a step of a whole number could meet a pattern of the keys, such as every tenth record
        ids = ids[np.unique(np.random.default_rng(0).integers(0, len(ids), count))]
    chosen = items.read(ids)
    halves = [np.arange(len(ids)) % 2 == half for half in (0, 1)]
    train_on, judge_on = (Records(ids[half], chosen.data, chosen.starts[half], chosen.nbytes[half]) for half in halves)
    return train_on, judge_on
