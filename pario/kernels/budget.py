"""Cuts an order into steps by cost, and deals the records of a step to the seats."""
# mypy: disable-error-code=no-untyped-def

from __future__ import annotations

from pario.kernels.jit import inner, kernel

__all__ = ["cut_steps", "deal_steps"]

#: How often the records of a step are dealt anew, at most, to make room for one more. (Of the budget used by lognormal
#: costs, 40 records a batch, on 8 / 64 seats: 0 times 0.94 / 0.87, 3 times 0.99 / 0.94, 6 times 1.00 / 0.95, 12 times
#: 1.00 / 0.97; in 0.2 / 0.4, 0.3 / 0.6, 0.4 / 1.0, 0.8 / 2.1 us per record.)
PACKS = 6


@inner
def _before(a, b, loads, counts):
    """Whether seat a is to get a record rather than seat b: the one with less, then with fewer, then the first."""
    if loads[a] != loads[b]:
        return loads[a] < loads[b]
    if counts[a] != counts[b]:
        return counts[a] < counts[b]
    return a < b


@inner
def _settle(heap, loads, counts):
    """The seat on top of the heap has got a record: let it sink."""
    seats = heap.shape[0]
    at = 0
    while True:
        child = 2 * at + 1
        if child >= seats:
            return
        if child + 1 < seats and _before(heap[child + 1], heap[child], loads, counts):
            child += 1
        if not _before(heap[child], heap[at], loads, counts):
            return
        heap[at], heap[child] = heap[child], heap[at]
        at = child


@inner
def _clear(heap, loads, counts):
    for seat in range(heap.shape[0]):
        heap[seat] = seat
        loads[seat] = 0
        counts[seat] = 0


@inner
def _sort(costs, first, order, k):
    """order[:k] = the indices first .. first + k - 1, the largest cost first, equal ones in their own order."""
    for j in range(k):
        order[j] = first + j
    # Heapsort: what comes last, the smallest, stands on top.
    for begin in range(k // 2 - 1, -1, -1):
        _sink(costs, order, begin, k)
    for end in range(k - 1, 0, -1):
        order[0], order[end] = order[end], order[0]
        _sink(costs, order, 0, end)


@inner
def _sink(costs, order, at, end):
    while True:
        child = 2 * at + 1
        if child >= end:
            return
        if child + 1 < end and _later(costs, order[child + 1], order[child]):
            child += 1
        if not _later(costs, order[child], order[at]):
            return
        order[at], order[child] = order[child], order[at]
        at = child


@inner
def _later(costs, a, b):
    return costs[a] < costs[b] or (costs[a] == costs[b] and a > b)


@inner
def _pack(costs, limit, most, first, stop, order, heap, loads, counts, seat_of):
    """Deal records first .. stop - 1 anew, the largest first; returns whether that keeps to the limits."""
    _sort(costs, first, order, stop - first)
    _clear(heap, loads, counts)
    for j in range(stop - first):
        i, seat = order[j], heap[0]
        if counts[seat] and (counts[seat] >= most or loads[seat] + costs[i] > limit):
            return False
        loads[seat] += costs[i]
        counts[seat] += 1
        seat_of[i] = seat
        _settle(heap, loads, counts)
    return True


@inner
def _fill(costs, limit, most, first, stop, order, heap, loads, counts, seat_of, tried):
    """Deal records from `first` on as they come, and all of them anew when one does not fit, if that helps.
    Returns the index of the first one that does not fit, or `stop`. out: seat_of of the others"""
    _clear(heap, loads, counts)
    i, total, packs = first, 0, 0
    while i < stop:
        seat = heap[0]
        if not counts[seat] or (counts[seat] < most and loads[seat] + costs[i] <= limit):
            loads[seat] += costs[i]
            counts[seat] += 1
            seat_of[i] = seat
            total += costs[i]
            _settle(heap, loads, counts)
            i += 1
            continue
        if packs == PACKS or counts[seat] >= most or total + costs[i] > limit * heap.shape[0]:
            break
        packs += 1
        if not _pack(costs, limit, most, first, i + 1, order, heap, loads, counts, tried):
            break
        total += costs[i]
        i += 1
        seat_of[first:i] = tried[first:i]
    return i


@kernel
def cut_steps(costs, limits, order, heap, loads, counts, seat_of, tried, stops):
    """Steps that are full: stops[i] is the index after the last record of step i; returns their number.

    costs i64[k], in the order of the epoch; limits i64[2]: cost and records of a batch
    scratch: order i64[k]; heap, loads, counts i64[seats]; seat_of, tried i32[k]; out: stops i64[k]

    The records after the last stop do not fill a step.
    """
    limit, most = limits[0], limits[1]
    steps = 0
    first = 0
    while True:
        first = _fill(costs, limit, most, first, costs.shape[0], order, heap, loads, counts, seat_of, tried)
        if first == costs.shape[0]:
            return steps
        stops[steps] = first
        steps += 1


@kernel
def deal_steps(costs, limits, order, heap, loads, counts, seat_of, tried, bounds, turns, rows, sums):
    """Deal whole steps to the seats.

    costs, limits and the scratch as for `cut_steps`; bounds i64[steps + 1]: indices where steps begin and end
    turns i64[steps]: the first seat of each step, so that not always the same one gets the largest record
    out: seat_of i32[k]; rows, sums i64[steps, seats], zeros: records and cost of each batch
    """
    limit, most, seats = limits[0], limits[1], heap.shape[0]
    for step in range(bounds.shape[0] - 1):
        first, stop = bounds[step], bounds[step + 1]
        if not _pack(costs, limit, most, first, stop, order, heap, loads, counts, seat_of):
            _fill(costs, limit, most, first, stop, order, heap, loads, counts, seat_of, tried)  # as it was cut
        for i in range(first, stop):
            seat = (seat_of[i] + turns[step]) % seats
            seat_of[i] = seat
            rows[step, seat] += 1
            sums[step, seat] += costs[i]
