"""Decoders for the LMDBs that projects publish, by the project's name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pario.decode.base import Decoder
from pario.decode.registry import make
from pario.errors import OptionError


class Preset(NamedTuple):
    """decoder : as `registry.make` takes it
    what : its records are
    defaults, always : options of the innermost decoder, and those that nobody chooses
    """

    decoder: str
    what: str
    defaults: Mapping[str, Any] = {}
    always: Mapping[str, Any] = {}


PRESETS: Mapping[str, Preset] = {
    "ase": Preset(
        "zlib+json",
        "ASE's LMDB (.aselmdb; OMat24, OMol25): zlib of JSON",
        {"fields": ("numbers", "positions"), "ragged": "list"},
        {"arrays": "ase"},
    ),
    "atom3d": Preset("gzip+json", "ATOM3D: gzip of JSON"),
    "lsun": Preset("image", "LSUN: image files"),
    "oc20": Preset(
        "pickle", "OC20, OC22: pickled torch_geometric Data", {"fields": ("atomic_numbers", "pos"), "ragged": "list"}
    ),
    "tape": Preset("pickle", "TAPE: pickled dicts", {"fields": "all", "ragged": "list"}),
    "tensorpack": Preset(
        "msgpack",
        "tensorpack's LMDBSerializer: MessagePack, or pickles with allow= or allow_pickle=",
        {"fields": "all"},
    ),
    "unimol": Preset("pickle", "Uni-Mol: pickled dicts", {"fields": ("atoms", "coordinates"), "ragged": "object"}),
    "unimol+": Preset("gzip+pickle", "Uni-Mol+: gzip of pickled dicts"),
}


def preset(name: str, **options: Any) -> Decoder:
    """The decoder for the records of a published dataset.

    preset("lsun", size=256)                    Image(256)
    preset("ase", fields=("numbers", "positions", "energy"))
    preset("oc20", allow_pickle=True)           what a project pickles needs allow_pickle=True, or allow=[...]

    options : of the decoder inside: `fields`, `ragged`, `size`, ...
    Raises OptionError for an unknown name, or where the decoder does.
    """
    if name not in PRESETS:
        known = "\n".join(f"  {key:<11} {each.what}" for key, each in PRESETS.items())
        raise OptionError(f"no preset is called {name!r}; there are\n{known}")
    one = PRESETS[name]
    # tensorpack's records are pickles where the user says how far to trust them.
    decoder = "pickle" if name == "tensorpack" and {"allow", "allow_pickle"} & options.keys() else one.decoder
    made: Decoder = make(decoder, **{**one.defaults, **options}, **one.always)
    return made
