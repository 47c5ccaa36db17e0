"""The peers: where they come from, and what they need. Imports nothing but the standard library."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["PEERS", "SOURCE", "Peer", "Variant", "variants"]

#: the folder of a set that the readers of LMDBs share
SOURCE = "source"

_COMMON = ("numpy", "lmdb>=1.4", "simplejpeg>=1.7")


#: pario's variants that behaviour.py reads, too
_MORE = {"skip": 'pario, `on_error="skip"`', "verify": "pario, `verify=True`"}
#: A random resized crop of 224 pixels, flipped or not, and normalised: of these peers, only where it is asked for.
_CROPS = ("pario:crop", "ffcv:crop")


@dataclass(frozen=True)
class Peer:
    """One loader.

    module : benchmarks.peers.MODULE, which is also its folder in a set
    pip : requirements of its environment; (): pario's own environment
    apt : Debian packages that its installation compiles against
    own_format : False: it reads the source LMDB
    variants : name of the variant -> what it is; {}: there is one
    """

    module: str
    title: str
    pip: tuple[str, ...] = ()
    apt: tuple[str, ...] = ()
    own_format: bool = True
    mpi: bool = False
    variants: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        return self.module if self.own_format else SOURCE


@dataclass(frozen=True)
class Variant:
    """One row of the tables."""

    peer: Peer
    name: str

    @property
    def title(self) -> str:
        return self.peer.variants.get(self.name) or _MORE.get(self.name, self.peer.title)

    @property
    def key(self) -> str:
        return f"{self.peer.module}:{self.name}" if self.name else self.peer.module


PEERS = (
    Peer(
        "pario",
        "pario",
        own_format=False,
        mpi=True,
        variants={
            "global": 'pario, "global"',
            "block": 'pario, "block"',
            "memory": 'pario, "global", memory tier',
        },
    ),
    Peer("bare_lmdb", "py-lmdb, a tight loop", own_format=False),
    Peer(
        "ffcv",
        "FFCV",  # torch as in .ci/run: a later one takes its CUDA packages along
        (*_COMMON, "torch==2.13.0", "opencv-python-headless", "pillow", "ffcv==1.0.2"),
        ("g++", "pkg-config", "libturbojpeg0-dev", "libopencv-dev"),
    ),
    Peer("dali", "NVIDIA DALI, CPU, Caffe LMDB", (*_COMMON, "nvidia-dali-cuda120==2.4.0")),
    Peer("webdataset", "WebDataset", (*_COMMON, "webdataset==1.0.2")),
    Peer("tfdata", "tf.data over TFRecord", (*_COMMON, "tensorflow-cpu")),
    Peer("hf", "HF datasets over Arrow", (*_COMMON, "datasets")),
)


def variants(names: list[str] | None = None) -> list[Variant]:
    """All rows, or those of these peers or variants ("pario", "pario:block")."""
    found = [Variant(peer, name) for peer in PEERS for name in (peer.variants or ("",))]
    if names is None:
        return found
    found += [one for one in (Variant(peer, "crop") for peer in PEERS) if one.key in _CROPS and one.key in names]
    return [one for one in found if one.key in names or one.peer.module in names]
