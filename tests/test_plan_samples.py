"""Tables of samples against dictionaries."""

from __future__ import annotations

import numpy as np
import pytest

from pario.errors import OptionError
from pario.plan.samples import Samples, absent, digest_of_samples, sample_type, widened
from pario.plan.selection import Figures

TOTAL = 1000
DRAW = np.random.default_rng(5)
FIRST = np.sort(DRAW.choice(TOTAL, 40, replace=False))
OTHERS = [DRAW.choice(TOTAL, 40, replace=False) for _ in range(2)]
NUMBERS = DRAW.choice(10**6, 40, replace=False)
HOLES = {(3, 1), (3, 2), (17, 2)}


def samples(*, numbers: bool = True, by_place: np.ndarray | None = None) -> Samples:
    kind = sample_type(TOTAL)
    columns = [ids.astype(kind) for ids in (FIRST, *OTHERS)]
    for i, j in HOLES:
        columns[j][i] = absent(kind)
    called = NUMBERS if numbers else None
    digest = digest_of_samples(columns, called, TOTAL)
    return Samples(TOTAL, digest, columns, numbers=called, by_place=by_place, figures=Figures(1, 1))


def records(i: int) -> list[int]:
    """Of sample i, with what stands in for a missing one."""
    ids = [FIRST, *OTHERS]
    return [int(FIRST[i] if (i, j) in HOLES else ids[j][i]) for j in range(3)]


def test_records_follow_each_other() -> None:
    made, ordinals = samples(), np.array([17, 0, 3, 39, 3])
    expected = [one for i in ordinals.tolist() for one in records(i)]
    assert (made.n, made.width) == (40, 3)
    assert made.ids(ordinals).tolist() == made.ids_of(ordinals, "id").tolist() == expected
    assert made.ids(np.arange(0)).tolist() == []


def test_places() -> None:
    order = DRAW.permutation(40)
    made = samples(by_place=order.astype(np.uint32))
    assert made.ids_of(np.array([5, 1]), "place").tolist() == records(int(order[5])) + records(int(order[1]))
    assert made.ids_of(np.array([5, 1]), "id").tolist() == records(5) + records(1)


def test_a_first_record_tells_its_sample() -> None:
    made, which = samples(), np.array([17, 0, 3, 39])
    assert made.numbers_of(FIRST[which]).tolist() == NUMBERS[which].tolist()
    assert samples(numbers=False).numbers_of(FIRST[which]).tolist() == which.tolist()
    assert sorted(made.missing(FIRST[which])) == [(0, 2), (2, 1), (2, 2)]
    assert made.records(NUMBERS[which]).tolist() == FIRST[which].tolist()
    assert samples(numbers=False).records(which).tolist() == FIRST[which].tolist()


@pytest.mark.parametrize("number", [-1, int(NUMBERS.max()) + 1, int(NUMBERS.min()) + 1])
def test_a_number_without_a_sample(number: int) -> None:
    with pytest.raises(OptionError, match=f"no sample {number} "):
        samples().records(np.array([NUMBERS[0], number]))
    with pytest.raises(OptionError, match="no sample"):
        samples(numbers=False).records(np.array([-1 if number < 0 else 40]))


def test_the_digest_knows_records_and_numbers() -> None:
    kind = sample_type(TOTAL)
    columns = [ids.astype(kind) for ids in (FIRST, *OTHERS)]
    digests = {digest_of_samples(columns, NUMBERS, TOTAL), digest_of_samples(columns, None, TOTAL)}
    digests |= {digest_of_samples(columns[:2], NUMBERS, TOTAL), digest_of_samples(columns, NUMBERS, TOTAL + 1)}
    changed = [column.copy() for column in columns]
    changed[2][7] += 1
    digests |= {digest_of_samples(changed, NUMBERS, TOTAL), samples().digest}
    assert len(digests) == 6
    assert digest_of_samples([column.copy() for column in columns], NUMBERS, TOTAL) in digests


def test_rows_of_records() -> None:
    rows = np.array([4, 0, 9], np.int32)
    assert widened(rows, 3).tolist() == [12, 13, 14, 0, 1, 2, 27, 28, 29]
    assert widened(rows, 3).dtype == np.int32


def test_closed() -> None:
    made = samples()
    made.close()
    made.close()
    assert made.nbytes == 0
