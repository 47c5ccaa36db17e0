"""What is of this machine alone: names of users, and a bell for a thread that waits for sockets."""

from __future__ import annotations

import io
import os
import pwd
import sys
from contextlib import suppress

#: what an eventfd takes
_ONCE = (1).to_bytes(8, sys.byteorder)


class Bell:
    """Wakes a thread that waits for sockets. Any thread may ring, and a signal's handler."""

    def __init__(self) -> None:
        self._file = io.FileIO(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), "r+")

    def fileno(self) -> int:
        """To be waited for."""
        return self._file.fileno()

    def ring(self) -> None:
        with suppress(ValueError):  # closed: nobody waits
            self._file.write(_ONCE)

    def silence(self) -> None:
        self._file.read(len(_ONCE))

    def close(self) -> None:
        self._file.close()


def user_names(uid: int) -> tuple[str, ...]:
    """What a user of this number may be called, the system's name first."""
    try:
        return pwd.getpwuid(uid).pw_name, str(uid)
    except KeyError:
        return (str(uid),)
