"""Reads that bypass the page cache (O_DIRECT), for data that is not read again soon or does not fit into memory."""

from __future__ import annotations

import errno
import os

from pario.errors import OptionError
from pario.fetch.file import FileFetcher


class DirectFetcher(FileFetcher):
    """O_DIRECT reads: offsets, lengths and memory are multiples of 4 KiB. Metadata still comes through the cache."""

    align = 4096

    def __init__(self, path: str, via: str | None = None) -> None:
        super().__init__(path, via)
        self._tell(os.POSIX_FADV_RANDOM)
        try:
            self._read_fd = os.open(via or path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except (OSError, AttributeError) as e:
            super().close()
            if isinstance(e, OSError) and e.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
            raise OptionError("this file system has no O_DIRECT", path=path, hint='Use Recipe(fetch="posix").') from e

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._read_fd)
        super().close()
