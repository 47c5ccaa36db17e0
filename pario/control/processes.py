"""What a plane and a node agent do with the processes that are connected to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pario.control.book import Book, Hello
from pario.control.rules import Rules
from pario.control.server import Client, Server
from pario.control.wire import Address, WireError, grant_tail, grant_text, rates_of, read_number, report_of, text_of
from pario.errors import ParioError

__all__ = ["Processes"]

#: Telling the state takes at most this part of the time.
_TELL = 1 / 20


class Processes(Server):
    """See `Server`. Subclasses set `book`.

    tell(state) : called about once a second with `state()`

    by_row : their connections, by their rows in the book's table
    """

    book: Book

    def __init__(
        self,
        address: Address,
        rules: Rules,
        name: str,
        clock: Callable[[], float],
        tell: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        super().__init__(address, rules, name, clock)
        self.by_row: dict[int, Client] = {}
        self._tell, self._tell_at = tell, -math.inf

    def hear(self, wait_s: float) -> None:
        """Besides: the state is told."""
        now = self._clock()
        if self._tell is not None and now >= self._tell_at:
            try:
                self._tell(self.state())
            except ParioError as e:
                self.say("cannot tell its state", str(e))
            # That of thousands of jobs less often.
            self._tell_at = max(now + 1.0, self._clock() + (self._clock() - now) / _TELL)
        super().hear(wait_s)

    def join(self, client: Client, words: dict[str, Any], now: float) -> None:
        """Raises WireError, RefusedError."""
        holds = rates_of(words, "holds") if words.get("holds") is not None else None
        job, name, node = (text_of(words, key) for key in ("job", "name", "node"))
        who = Hello(client.user, read_number(words, "member", 16), job, name, node, holds)
        member = self.book.join(who, now)
        earlier = self.by_row.get(member.row)
        if earlier is not None:  # its process has lost that connection
            earlier.member = None
            self.drop(earlier)
        client.member = member
        self.by_row[member.row] = client
        client.whom = f"user {client.user}, job {who.job}, {client.whom}"

    def obey(self, client: Client, words: dict[str, Any], now: float) -> None:
        assert client.member is not None
        if "bye" in words:
            self.leave(client, now, bye=True)
            self.drop(client)
        elif not self.book.report(client.member, report_of(words), now):
            raise WireError("too many messages")

    def forget(self, client: Client) -> None:
        self.leave(client, self._clock(), bye=False)

    def leave(self, client: Client, now: float, *, bye: bool) -> None:
        """Its process has left the book, if it was in it."""
        member, client.member = client.member, None
        if member is not None:
            del self.by_row[member.row]
            self.book.leave(member, now, bye=bye)

    def tell_grants(self, due: np.ndarray, lease_s: float, every_s: float) -> None:
        """due : bool[n], the rows that are to hear of their grants"""
        rows = np.array(list(self.by_row), np.int64)
        rows = rows[due[rows]]
        tail = grant_tail(lease_s, every_s)
        for row, grant in zip(rows.tolist(), self.book.table.grants(rows).tolist(), strict=True):
            client = self.by_row.get(row)
            if client is not None and not client.answer:
                self.put(client, grant_text(grant, tail))
