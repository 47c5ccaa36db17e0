"""The line of a report about packed values."""

from __future__ import annotations

from dataclasses import replace

from pario.stats.explain import unpacking_words
from pario.stats.rank import RankStats
from pario.stats.report import Report

RANKS = [
    RankStats(rank=k, node=k, loop=2.0, records=1000, unpack=0.5, packed_bytes=10_000_000, unpacked_bytes=25_000_000)
    for k in range(2)
]
FORETOLD = {"codec": "zstd:3", "records_per_second": 510.0, "decode_seconds": 0.0004}


def test_it_says_what_went_in_and_out_and_whether_the_prediction_held() -> None:
    words = unpacking_words(RANKS, FORETOLD)
    assert words.startswith("unpacked 20 MB to 50 MB (2.50 times as many) in 1.00 s")
    assert "the prediction for zstd:3 held: 500 records/s per node of 510 foretold" in words
    assert "did not hold" in unpacking_words(RANKS, {**FORETOLD, "records_per_second": 600.0})
    assert "prediction" not in unpacking_words(RANKS, None)
    # The caller computed for longer than was foretold, and got all that he could take.
    busy = [replace(rank, consumer=1.96) for rank in RANKS]
    words_of_busy = unpacking_words(busy, {**FORETOLD, "records_per_second": 60_000.0})
    assert "held: 500 records/s per node of 60,000 foretold, and the loop waited 2.0% of its time" in words_of_busy
    waited = [replace(rank, consumer=1.8) for rank in RANKS]
    assert "did not hold: 500" in unpacking_words(waited, {**FORETOLD, "records_per_second": 60_000.0})
    # Neither of what was foretold is slower: it is the decoder, or the caller.
    easy = {**FORETOLD, "records_per_second": 60_000.0, "decode_seconds": 0.0006}
    assert "held: 500 records/s per node of 60,000 foretold, and neither unpacking" in unpacking_words(waited, easy)
    assert "did not hold" in unpacking_words([replace(rank, stalled=0.5) for rank in waited], easy)
    assert "cannot be read" in unpacking_words(RANKS, {"codec": 3})
    assert unpacking_words([RankStats(records=5, loop=1.0)], FORETOLD) == ""
    assert words in str(Report("x.lmdb", RANKS, FORETOLD))
