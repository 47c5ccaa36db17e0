"""What a server says of strangers: each thing now and then, and never nothing for good."""

from __future__ import annotations

import pytest

from pario.wire.server import Complaints


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_each_is_said_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    complaints = Complaints("the plane", clock)
    for clock.now in (0.0, 1.0, 599.0):
        complaints.say("refused a connection", "a wrong token")
    assert [each.message for each in caplog.records] == [
        "the plane refused a connection: a wrong token (said once in 10 minutes)"
    ]
    clock.now = 601.0
    complaints.say("refused a connection", "a wrong token")
    assert len(caplog.records) == 2


def test_one_who_floods_does_not_silence_what_is_said_of_others(caplog: pytest.LogCaptureFixture) -> None:
    complaints = Complaints("the plane", Clock())
    for k in range(10_000):
        complaints.say("refused user 7", f"he calls himself {k}")
    assert len(caplog.records) == 16
    complaints.say("refused user 8", "a wrong token")
    assert "refused user 8" in caplog.text


def test_a_flood_from_everywhere_ends(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    complaints = Complaints("the plane", clock)
    for k in range(10_000):
        complaints.say(f"refused a connection from {k}", "a wrong token")
    assert len(caplog.records) == 256
    clock.now = 700.0
    complaints.say("refused user 8", "a wrong token")
    assert len(caplog.records) == 257
