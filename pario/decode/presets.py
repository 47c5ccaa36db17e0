"""Decoders for the LMDBs that projects publish, by the project's name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pario.decode.base import Decoder
from pario.errors import OptionError


def _lsun(**options: Any) -> Decoder:
    from pario.decode.image import Image

    return Image(**options)


def _ase(**options: Any) -> Decoder:
    from pario.decode.compressed import Zlib
    from pario.decode.json import Json

    given = {"fields": ("numbers", "positions"), "ragged": "list", **options}
    return Zlib(Json(**given, arrays="ase"))


def _atom3d(**options: Any) -> Decoder:
    from pario.decode.compressed import Gzip
    from pario.decode.json import Json

    return Gzip(Json(**options))


def _pickled(**options: Any) -> Decoder:
    from pario.decode.pickle import Pickle

    return Pickle(**options)


def _oc20(**options: Any) -> Decoder:
    return _pickled(**{"fields": ("atomic_numbers", "pos"), "ragged": "list", **options})


def _unimol(**options: Any) -> Decoder:
    return _pickled(**{"fields": ("atoms", "coordinates"), "ragged": "object", **options})


def _unimol_plus(**options: Any) -> Decoder:
    from pario.decode.compressed import Gzip

    return Gzip(_pickled(**options))


def _tape(**options: Any) -> Decoder:
    return _pickled(**{"fields": "all", "ragged": "list", **options})


def _tensorpack(**options: Any) -> Decoder:
    if {"allow", "allow_pickle"} & options.keys():
        return _pickled(**{"fields": "all", **options})
    from pario.decode.msgpack import MsgPack

    return MsgPack(**{"fields": "all", **options})


#: name -> (what makes it, what its records are)
PRESETS: Mapping[str, tuple[Callable[..., Decoder], str]] = {
    "ase": (_ase, "ASE's LMDB (.aselmdb; OMat24, OMol25): zlib of JSON"),
    "atom3d": (_atom3d, "ATOM3D: gzip of JSON"),
    "lsun": (_lsun, "LSUN: image files"),
    "oc20": (_oc20, "OC20, OC22: pickled torch_geometric Data"),
    "tape": (_tape, "TAPE: pickled dicts"),
    "tensorpack": (_tensorpack, "tensorpack's LMDBSerializer: MessagePack, or pickles with allow= or allow_pickle="),
    "unimol": (_unimol, "Uni-Mol: pickled dicts"),
    "unimol+": (_unimol_plus, "Uni-Mol+: gzip of pickled dicts"),
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
        known = "\n".join(f"  {key:<11} {words}" for key, (_, words) in PRESETS.items())
        raise OptionError(f"no preset is called {name!r}; there are\n{known}")
    return PRESETS[name][0](**options)
