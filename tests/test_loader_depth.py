"""What is delivered never depends on the prefetch depth, which changes at random while epochs run. The oracle is
py-lmdb's content, as the set's maker wrote it down."""

from __future__ import annotations

import random
from itertools import count, pairwise

import pytest

import pario
from pario.tune import depth
from pario.tune.knobs import Setting
from pario.tune.tuner import Law


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Each read may be followed by another depth. Returns the depths that were asked for."""
    said: list[int] = []
    seeds = count()

    class AtRandom(Law):
        def __init__(self) -> None:
            self._random = random.Random(next(seeds))

        def step(self, depth: int, window: object) -> Setting:
            self.drains = self._random.random() < 0.1
            said.append(self._random.choice([0, 1, 2, 3, 8, 1000]))
            return Setting(said[-1], "at random")

    monkeypatch.setattr(depth, "FastProbe", AtRandom)
    monkeypatch.setattr(depth, "_HURRIED", (0.0, 0.0))
    monkeypatch.setattr(depth, "_PROBE", (0.0, 0.0))
    monkeypatch.setattr(depth.Depth, "_enough", lambda self: 1)
    return said


@pytest.mark.parametrize("shuffle", [False, "global", "block"])
@pytest.mark.parametrize("name", ["caffe_datum", "variable_sizes", "dupsort"])
def test_the_records_are_the_same(dataset, name, shuffle, restless) -> None:
    made = dataset(name)
    small = {"slot_bytes": 64 << 10, "slots": 3, "block_bytes": 16 << 10, "mix_blocks": 4}
    options = pario.Options(inflight=(1, 20), **small)
    expected = [value for _, value in made.truth]
    with pario.Loader(made.path, 7, shuffle=shuffle, db=made.db, recipe="ring", options=options) as loader:
        for _ in range(2):
            seen = []
            for batch in loader:
                data, offsets = batch["data"].tobytes(), batch["offsets"].tolist()
                values = [data[first:stop] for first, stop in pairwise(offsets)]
                assert values == [expected[i] for i in batch.ids.tolist()]
                seen += batch.ids.tolist()
            assert sorted(seen) == list(range(len(expected)))
        assert 1 <= loader.stats()["depth"] <= 20
        assert loader.stats()["depth_reason"] == "at random"
    assert len(set(restless)) > 2


def test_bounds_and_pins(caffe_datum) -> None:
    for given, allowed in ((3, {3}), ((2, 4), {2, 3, 4}), ("auto", set(range(1, 65)))):
        with pario.Loader(caffe_datum.path, 16, recipe="ring", options=pario.Options(inflight=given)) as loader:
            for _ in loader:
                assert loader.stats()["depth"] in allowed
            report = loader.report()
        assert report.ranks[0].tuned == (given != 3)
        assert ("inflight is" in str(report)) == (given != 3)


@pytest.mark.parametrize("given", [0, -1, True, "many", (0, 4), (5, 4), (1, 2, 3), [1, 4], (1, 2.5), None])
def test_what_is_no_depth(given) -> None:
    with pytest.raises(pario.errors.OptionError, match="inflight must be"):
        pario.Options(inflight=given)
