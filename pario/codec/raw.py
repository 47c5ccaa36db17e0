"""Values as they are."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from pario.codec.base import Codec
from pario.kernels.coded import KIND, RAW


class Raw(Codec):
    """No compression."""

    name = "raw"

    def encode(self, value: Any) -> bytes:
        return bytes(value)

    def decoding(self) -> AbstractContextManager[np.ndarray]:
        return self._calling({KIND: RAW})
