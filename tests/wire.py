"""A bad connection: what a server sends arrives with single bits changed."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Container

from pario.comm.sockets import Address


class Wire:
    """Between clients and a server.

    flips : positions in the stream of bytes of each connection, from the server to the client, where one bit changes
    address : for clients
    flipped : bits changed so far
    """

    def __init__(self, server: Address, flips: Container[int]) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self._local, self._flips = server.local, flips
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
                passed += len(data)
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)
