"""Data for the instruments where the user has none yet: JPEG files, and the same records in an LMDB."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import lmdb
import numpy as np

from pario.errors import OptionError

#: 512 files of 112 KiB: the median of ImageNet's.
COUNT, NBYTES = 512, 112 << 10
_QUALITY = 90


def _encoder() -> Callable[[np.ndarray], bytes] | None:
    try:
        import simplejpeg
    except ImportError:
        return None
    return lambda image: bytes(simplejpeg.encode_jpeg(image, quality=_QUALITY, colorsubsampling="420"))


def has_codec() -> bool:
    """Whether images can be made and decoded; without, the files are random bytes."""
    return _encoder() is not None


def make_files(
    folder: str | Path, count: int = COUNT, nbytes: int = NBYTES, tick: Callable[[int], object] = lambda _: None
) -> Path:
    """Write `count` JPEG files of about `nbytes` bytes each, all different, or of random bytes without simplejpeg.

    The folder must not exist. tick : called with 1 after each file
    Raises OptionError.
    """
    if count < 1 or nbytes < 1024:
        raise OptionError(f"made data are at least one file of 1024 bytes, not {count} of {nbytes}")
    made = Path(folder)
    made.mkdir(parents=True)
    encode = _encoder()
    side = max(16, int((2 * nbytes) ** 0.5) // 16 * 16)
    noise = 0.0 if encode is None else _noise(encode, side, nbytes)
    for number in range(count):
        rng = np.random.default_rng([20181112, number])
        content = rng.bytes(nbytes) if encode is None else encode(_picture(rng, side, noise))
        (made / f"{number:06d}.{'bin' if encode is None else 'jpg'}").write_bytes(content)
        tick(1)
    return made


def make_lmdb(folder: str | Path, files: str | Path) -> Path:
    """Write an LMDB with the files' content, in the order of their names. The folder must not exist."""
    made = Path(folder)
    made.mkdir(parents=True)
    paths = sorted(Path(files).iterdir())
    size = sum(path.stat().st_size + 8192 for path in paths) + (4 << 20)
    try:
        with closing(lmdb.open(str(made), map_size=size * 2, subdir=True)) as env, env.begin(write=True) as txn:
            for path in paths:
                txn.put(path.name.encode(), path.read_bytes())
    except BaseException:
        shutil.rmtree(made)
        raise
    return made


def _picture(rng: np.random.Generator, side: int, noise: float) -> Any:
    """u8[side, side, 3]: a smooth picture, and noise that decides how well it can be compressed."""
    coarse = rng.integers(0, 256, (side // 16, side // 16, 3)).astype(np.float32)
    smooth = coarse.repeat(16, axis=0).repeat(16, axis=1)
    grain = rng.standard_normal((side, side, 3), dtype=np.float32)
    return np.clip(smooth + noise * grain, 0, 255).astype(np.uint8)


def _noise(encode: Callable[[np.ndarray], bytes], side: int, nbytes: int) -> float:
    """The noise with which a picture has `nbytes` bytes."""
    low, high = 0.0, 128.0
    for _ in range(10):
        middle = (low + high) / 2
        if len(encode(_picture(np.random.default_rng(0), side, middle))) > nbytes:
            high = middle
        else:
            low = middle
    return low
