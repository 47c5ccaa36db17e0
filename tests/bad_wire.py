"""A bad connection: what a server sends arrives with single bits changed, or byte by byte."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Container

from pario.wire.client import Address


class Wire:
    """Between clients and a server.

    flips : positions in the stream of bytes of each connection, from the server to the client, where one bit changes
    drips : from this position of each stream on, bytes come one by one, ten in a second
    address : for clients
    flipped : bits changed so far
    """

    def __init__(self, server: Address, flips: Container[int] = (), drips: int | None = None) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self._local, self._flips, self._drips = server.local, flips, drips
        self.flipped = 0
        self.address = Address("another machine", server.local, ("127.0.0.1",), self._door.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            here, _ = self._door.accept()
            there = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            there.connect(f"\0{self._local}")
            threading.Thread(target=self._pass, args=(here, there, ()), daemon=True).start()
            threading.Thread(target=self._pass, args=(there, here, self._flips), daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, flips: Container[int]) -> None:
        passed = 0
        with contextlib.suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                for k in range(len(data)) if flips else ():
                    if passed + k in flips:
                        data[k] ^= 1 << (passed + k) % 8
                        self.flipped += 1
                if self._drips is not None and source.family == socket.AF_UNIX:
                    at_once = max(0, self._drips - passed)
                    to.sendall(data[:at_once])
                    for byte in data[at_once:]:
                        to.sendall(bytes([byte]))
                        time.sleep(0.1)
                else:
                    to.sendall(data)
                passed += len(data)
            to.shutdown(socket.SHUT_WR)
