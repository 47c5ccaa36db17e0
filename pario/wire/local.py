"""What is of this machine alone: names of users, and a bell for a thread that waits for sockets."""

from __future__ import annotations

import pwd
import socket
from contextlib import suppress


class Bell:
    """Wakes a thread that waits for sockets. Any thread may ring, and a signal's handler."""

    def __init__(self) -> None:
        self._here, self._rope = socket.socketpair()
        for each in (self._here, self._rope):
            each.setblocking(False)

    def fileno(self) -> int:
        """To be waited for."""
        return self._here.fileno()

    def ring(self) -> None:
        with suppress(OSError):  # full: it has rung already; closed: nobody waits
            self._rope.send(b".")

    def silence(self) -> None:
        with suppress(BlockingIOError):
            self._here.recv(4096)

    def close(self) -> None:
        self._here.close()
        self._rope.close()


def user_names(uid: int) -> tuple[str, ...]:
    """What a user of this number may be called, the system's name first."""
    try:
        return pwd.getpwuid(uid).pw_name, str(uid)
    except KeyError:
        return (str(uid),)
