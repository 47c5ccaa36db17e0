"""What the ranks of a node have finished, and whether they wait."""

from __future__ import annotations

import threading

from pario.comm.solo import Solo
from pario.comm.window import LEFT, Ring


def test_how_far_the_furthest_is() -> None:
    ring = Ring(Solo(), 3)
    assert ring.consumers.furthest == 0
    ring.finish(0, 5)
    assert ring.consumers.furthest == 5
    ring.consumers.wait_further(4, 10.0)  # it has gone on: no wait
    ring.finish(0, LEFT)
    assert ring.consumers.furthest is None
    ring.reset()
    assert ring.consumers.furthest == 0
    ring.close()
    assert ring.consumers.furthest is None
    assert not ring.consumers.wait


def test_a_rank_that_waits_says_so() -> None:
    ring = Ring(Solo(), 3, alive_seconds=5)
    thread = threading.Thread(target=ring.wait_group, args=(0,), daemon=True)
    assert not ring.consumers.wait
    thread.start()
    while not ring.consumers.wait:
        pass
    ring.publish(0, 1)
    thread.join(10)
    assert not thread.is_alive()
    assert not ring.consumers.wait
    ring.close()
