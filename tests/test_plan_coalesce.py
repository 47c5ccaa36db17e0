"""Plans are carried out on a file in memory and the records compared byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pario.errors import CorruptedError, OptionError, ParioError
from pario.plan import coalesce as module
from pario.plan.coalesce import span_reads

FILE = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)
PAGE = 4096


def coalesce(offsets, nbytes, *, lead_bytes=0, **options):
    """The plan for values, each with what stands before it."""
    begins = np.where(offsets < 0, offsets, np.maximum(offsets - lead_bytes, 0))
    return module.coalesce(begins, nbytes + (offsets - begins), **options).behind(offsets - begins)


def carry_out(plan, file=FILE):
    """The slot, filled; 0 where nothing was read."""
    slot = np.zeros(plan.nbytes, np.uint8)
    for (offset, nbytes), start in zip(plan.reads.tolist(), plan.starts.tolist(), strict=True):
        data = file[offset : offset + nbytes]  # short at the end of the file, as pread
        assert start + nbytes <= plan.nbytes
        slot[start : start + len(data)] = data
    return slot


def check(plan, offsets, nbytes, *, lead_bytes, align, read_bytes, file=FILE):
    slot = carry_out(plan, file)
    for offset, size, start in zip(offsets.tolist(), nbytes.tolist(), plan.record_starts.tolist(), strict=True):
        lead = min(lead_bytes, offset)
        assert start >= lead
        assert start + size <= plan.nbytes
        assert (slot[start - lead : start + size] == file[offset - lead : offset + size]).all()
        assert start % max(align, 8) == offset % max(align, 8)
    first, size = plan.reads["offset"], plan.reads["nbytes"]
    assert (size > 0).all()
    assert (size <= read_bytes).all()
    assert (first % align == 0).all()
    assert (size % align == 0).all()
    assert (plan.starts % max(align, 8) == first % max(align, 8)).all()
    assert (first[1:] >= (first + size)[:-1]).all()  # no byte twice
    assert (plan.starts[1:] >= (plan.starts + size)[:-1]).all()  # nor over another
    if len(first):
        assert first[0] >= 0
        assert first[-1] + size[-1] <= -(-len(file) // align) * align


def alone(offsets, nbytes, lead, align):
    """Slot bytes of the records if each were read alone."""
    first = np.maximum(offsets - lead, 0) // align * align
    return int((-(-(offsets + nbytes) // align) * align - first + (7 if align == 1 else 0)).sum())


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    k=st.integers(0, 120),
    span=st.sampled_from([3000, 60_000, len(FILE)]),
    longest=st.sampled_from([0, 1, 50, 3000, 40_000]),
    lead=st.sampled_from([0, 8, 16, 24]),
    align=st.sampled_from([1, 512, 4096]),
    gap=st.sampled_from([0, 100, 4096, 16384, 1 << 17]),
    read=st.sampled_from([4096, 10_000, 1 << 16, 4 << 20]),
    ordered=st.booleans(),
)
def test_every_byte_of_every_record_lies_where_the_plan_says(seed, k, span, longest, lead, align, gap, read, ordered):
    random = np.random.default_rng(seed)
    end = len(FILE) if seed % 2 else span
    nbytes = random.integers(0, min(longest, span) + 1, k)
    offsets = (end - span) + random.integers(0, span - nbytes + 1)
    if ordered:
        offsets.sort()
        nbytes = np.minimum(nbytes, end - offsets)
    options = {"lead_bytes": lead, "align": align, "read_bytes": read}
    plan = coalesce(offsets, nbytes, gap_bytes=gap, file_bytes=len(FILE), **options)
    check(plan, offsets, nbytes, **options)
    tight = coalesce(
        offsets, nbytes, gap_bytes=gap, file_bytes=len(FILE), capacity=alone(offsets, nbytes, lead, align), **options
    )
    check(tight, offsets, nbytes, **options)

    # Larger gaps cost at most 1 % of the pages with something wanted, smaller ones a page each.
    wanted = np.zeros(len(FILE) // PAGE + 1, bool)
    for offset, size in zip(offsets.tolist(), nbytes.tolist(), strict=True):
        wanted[max(0, offset - lead) // PAGE : -(-(offset + size) // PAGE)] = True
    touched = np.zeros_like(wanted)
    for offset, size in plan.reads.tolist():
        touched[offset // PAGE : -(-(offset + size) // PAGE)] = True
    extra = touched & ~wanted
    edges = np.flatnonzero(np.diff(np.concatenate([[0], extra.view(np.int8), [0]])))
    lengths = edges[1::2] - edges[::2]
    assert lengths[lengths > 1].sum() <= 0.01 * wanted.sum()
    if gap == 0:
        assert not extra.any()


def layout(n, pages, page_of_leaf=100):
    """Offsets of n records of `pages` pages with a leaf page after each hundredth: what a bulk load writes."""
    number = np.arange(n)
    return (number * pages + number // page_of_leaf + 2) * PAGE + 16


def test_neighbours_with_leaf_pages_between_them_are_one_read_with_one_percent_more():
    offsets = layout(1000, 1)
    nbytes = np.full(1000, 3000)
    for align in (1, 4096):
        plan = coalesce(
            offsets, nbytes, lead_bytes=16, align=align, gap_bytes=16384, read_bytes=64 << 20, file_bytes=1 << 30
        )
        assert len(plan.reads) == 1
        assert plan.reads["nbytes"].sum() <= 1.01 * 1000 * PAGE
    without = coalesce(offsets, nbytes, lead_bytes=16, align=4096, gap_bytes=0, read_bytes=64 << 20, file_bytes=1 << 30)
    assert len(without.reads) == 10
    assert without.reads["nbytes"].sum() == 1000 * PAGE


def test_scattered_records_are_not_joined():
    offsets = layout(200_000, 1)[np.random.default_rng(1).permutation(200_000)[:2000]]
    nbytes = np.full(2000, 3000)
    plan = coalesce(offsets, nbytes, lead_bytes=16, align=1, gap_bytes=16384, read_bytes=4 << 20, file_bytes=1 << 30)
    assert len(plan.reads) > 1900
    assert plan.reads["nbytes"].sum() <= 1.06 * 2000 * 3016


def test_long_runs_are_cut_at_multiples_of_the_read_size():
    read = 1 << 16
    plan = coalesce(
        np.array([100_016]),
        np.array([300_000]),
        lead_bytes=16,
        align=1,
        gap_bytes=0,
        read_bytes=read,
        file_bytes=len(FILE),
    )
    ends = plan.reads["offset"] + plan.reads["nbytes"]
    assert plan.reads["offset"][0] == 100_000
    assert (plan.reads["offset"][1:] % read == 0).all()
    assert (ends[:-1] == plan.reads["offset"][1:]).all()
    assert ends[-1] == 400_016
    assert (np.diff(plan.starts) == plan.reads["nbytes"][:-1]).all()


def test_the_same_record_twice_is_read_once():
    offsets, nbytes = np.array([5000, 9000, 5000]), np.array([100, 50, 100])
    plan = coalesce(offsets, nbytes, lead_bytes=0, align=1, gap_bytes=0, read_bytes=4096, file_bytes=len(FILE))
    assert plan.reads.tolist() == [(5000, 100), (9000, 50)]
    assert plan.record_starts[0] == plan.record_starts[2]


def test_a_file_whose_size_is_no_multiple_of_the_alignment():
    file = FILE[:10_001]
    offsets, nbytes = np.array([9_000]), np.array([1_001])
    options = {"lead_bytes": 16, "align": 4096, "read_bytes": 1 << 20}
    plan = coalesce(offsets, nbytes, gap_bytes=0, file_bytes=len(file), **options)
    assert plan.reads.tolist() == [(8192, 4096)]
    check(plan, offsets, nbytes, file=file, **options)


def test_gaps_are_left_out_when_they_do_not_fit():
    offsets, nbytes = np.array([4096, 12_000]), np.array([4000, 4000])
    options = {"lead_bytes": 0, "align": 1, "read_bytes": 1 << 20, "file_bytes": len(FILE), "gap_bytes": 1 << 20}
    assert coalesce(offsets, nbytes, **options).nbytes == 11_904
    assert coalesce(offsets, nbytes, capacity=8_100, **options).nbytes == 8_000
    with pytest.raises(ParioError, match="8000 of 7999 bytes of memory"):
        coalesce(offsets, nbytes, capacity=7_999, **options)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(-1, 1), (5, -1), (len(FILE) - 3, 4), (len(FILE) + 1, 0), (2**62, 2**62)]
)
def test_a_value_outside_of_the_file_is_damage(offset, nbytes):
    with pytest.raises(CorruptedError) as caught:
        coalesce(
            np.array([0, offset]),
            np.array([5, nbytes]),
            lead_bytes=0,
            align=1,
            gap_bytes=0,
            read_bytes=4096,
            file_bytes=len(FILE),
        )
    assert caught.value.offset == offset


@pytest.mark.parametrize("wrong", [{"align": 3}, {"align": 0}, {"gap_bytes": -1}, {"read_bytes": 0}])
def test_wrong_arguments_are_named(wrong):
    options = {"lead_bytes": 0, "align": 1, "gap_bytes": 0, "read_bytes": 4096, "file_bytes": 100, **wrong}
    with pytest.raises(OptionError, match=next(iter(wrong))):
        coalesce(np.array([0]), np.array([1]), **options)


# -- spans -----------------------------------------------------------------------------------------------------------


def spans(offsets, nbytes, runs=None, **more):
    how = {"align": 1, "gap_bytes": 16 << 10, "read_bytes": 64 << 10, "file_bytes": len(FILE)}
    offsets, nbytes = np.array(offsets, np.int64), np.array(nbytes, np.int64)
    runs = np.zeros(len(offsets), np.int64) if runs is None else np.array(runs, np.int64)
    return span_reads(offsets - 16, nbytes + 16, runs, **{**how, **more}).behind(16)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    k=st.integers(0, 90),
    steps=st.integers(1, 5),
    kind=st.sampled_from(["file order", "random", "leaves", "jumps"]),
    align=st.sampled_from([1, 4096]),
    capacity=st.sampled_from([None, "least"]),
)
def test_spans_bring_the_same_bytes(seed, k, steps, kind, align, capacity):
    rng = np.random.default_rng(seed)
    nbytes = rng.integers(0, 6000, k)
    if kind == "random":
        offsets = rng.integers(16, len(FILE) - 6000, k)
    else:
        offsets = 16 + np.concatenate([[0], np.cumsum(nbytes + 32)[:-1]]).astype(np.int64)[:k]
        if kind == "leaves":  # values grow downwards in a page
            offsets = offsets[::-1].copy()
            nbytes = nbytes[::-1].copy()
        if kind == "jumps":
            offsets = offsets + (np.arange(k) % 17 == 3) * 400_000
    runs = np.sort(rng.integers(0, steps, k))
    room = None if capacity is None else alone(offsets, nbytes, 16, align)
    plan = spans(offsets, nbytes, runs, align=align, capacity=room)
    assert room is None or plan.nbytes <= room
    check(plan, offsets, nbytes, lead_bytes=16, align=align, read_bytes=len(FILE))


def test_a_span_is_one_read_with_what_lies_between():
    offsets = np.arange(50) * 5000 + 16
    plan = spans(offsets, np.full(50, 3000))
    assert plan.reads.tolist() == [(0, 49 * 5000 + 3016)]
    # the same in another order, and of several steps that follow each other
    assert spans(offsets[::-1], np.full(50, 3000)).reads.tolist() == plan.reads.tolist()
    assert spans(offsets, np.full(50, 3000), np.arange(50) // 10).reads.tolist() == plan.reads.tolist()


def test_steps_that_lie_apart_are_read_apart():
    """The records of other nodes lie between."""
    near = np.arange(10) * 4096 + 16
    offsets = np.concatenate([near, near + 300_000, near + 600_000])
    plan = spans(offsets, np.full(30, 3000), np.repeat([0, 1, 2], 10))
    assert plan.reads["offset"].tolist() == [0, 300_000, 600_000]
    assert set(plan.reads["nbytes"].tolist()) == {9 * 4096 + 3016}


def test_a_value_far_away_does_not_stretch_the_span():
    offsets = np.concatenate([np.arange(20) * 4096 + 500_016, [16]])
    plan = spans(offsets, np.full(21, 3000))
    assert plan.reads["offset"].tolist() == [0, 500_000]


def test_random_places_are_read_one_by_one():
    offsets = np.random.default_rng(3).permutation(200)[:12] * 5000 + 16
    plan = spans(offsets, np.full(12, 100), gap_bytes=0)
    assert len(plan.reads) == 12
    assert int(plan.reads["nbytes"].sum()) == 12 * 116


def test_a_value_outside_of_the_file_in_a_span():
    with pytest.raises(CorruptedError, match="outside of the file"):
        spans([16, len(FILE) - 50], [100, 100])


@pytest.mark.parametrize(
    ("first", "second", "gap", "reads"),
    [
        (100, 200, 0, 2),
        (100, 200, 100, 1),
        (4000, 8192, 1 << 14, 1),  # a page, and what is left of another
        (1, 12_287, 1 << 14, 1),  # the longest
        (1, 12_288, 1 << 14, 2),  # two pages
        (1, 12_287, 12_285, 2),
    ],
)
def test_a_page_between_two_ranges_is_read_along_and_two_are_not(first, second, gap, reads):
    begins, nbytes = np.array([0, second]), np.array([first, 10])
    how = {"align": 1, "gap_bytes": gap, "read_bytes": 1 << 20, "file_bytes": 100_000}
    assert len(coalesce(begins, nbytes, **how).reads) == reads
