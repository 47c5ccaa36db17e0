"""Cuts an order into steps by cost, and deals the records of a step to the seats."""
# mypy: disable-error-code=no-untyped-def

from __future__ import annotations

from pario.kernels.jit import inner, kernel

#: How often the records of a step are dealt anew, at most, to make room for one more. (Of the budget used by lognormal
#: costs, 40 records a batch, on 8 / 64 seats: 0 times 0.94 / 0.87, 3 times 0.99 / 0.94, 6 times 1.00 / 0.95, 12 times
#: 1.00 / 0.97; in 0.2 / 0.4, 0.3 / 0.6, 0.4 / 1.0, 0.8 / 2.1 us per record.)
PACKS = 6


@inner
def _settle(heap, loads, counts):
    """The seat on top of the heap has got a record: let it sink. On top is the seat with the least cost, of those the
    one with the fewest records, of those the first."""
    seats, at, child, seat = heap.shape[0], 0, 1, heap[0]
    load, count = loads[seat], counts[seat]
    while child < seats:
        one = heap[child]
        if child + 1 < seats:
            other = heap[child + 1]
            if (
                loads[other] < loads[one]
                or (loads[other] == loads[one] and counts[other] < counts[one])
                or (loads[other] == loads[one] and counts[other] == counts[one] and other < one)
            ):
                child, one = child + 1, other
        if (
            load < loads[one]
            or (load == loads[one] and count < counts[one])
            or (load == loads[one] and count == counts[one] and seat < one)
        ):
            break
        heap[at] = one
        at, child = child, 2 * child + 1
    heap[at] = seat


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
    # Heapsort: first a heap with the last one, the smallest, on top; then the top goes to the end, again and again.
    for turn in range(k // 2 + k - 1):
        at, end = k // 2 - 1 - turn, k
        if at < 0:
            end = k + at
            order[0], order[end] = order[end], order[0]
            at = 0
        one = order[at]
        cost, child = costs[one], 2 * at + 1
        while child < end:
            if child + 1 < end:
                a, b = order[child], order[child + 1]
                if costs[b] < costs[a] or (costs[b] == costs[a] and b > a):
                    child += 1
            other = order[child]
            if costs[other] > cost or (costs[other] == cost and other < one):
                break
            order[at] = other
            at, child = child, 2 * child + 1
        order[at] = one


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
        for j in range(first, i):
            seat_of[j] = tried[j]
    return i


@kernel
def deal_steps(costs, given, order, heap, loads, counts, seat_of, tried, bounds, rows, sums):
    """Cut records into steps, unless the steps are known, and deal each step's records to the seats.

    costs i64[k], in the order of the epoch; given i64[5]: GIVEN names its numbers
    scratch: order i64[k]; heap, loads, counts i64[seats]; tried i32[k]
    bounds i64[steps + 1]: indices where steps begin and end; in if `steps` says how many, else out, with bounds[0] = 0
    out: seat_of i32[k]; rows, sums i64[steps, seats], zeros: records and cost of each batch

    Returns the number of steps. The records after the last one of them do not fill a step. One kernel for both, because
    two take twice as long to compile.
    """
    limit, most, start, known, whole = given[0], given[1], given[2], given[3], given[4]
    seats = heap.shape[0]
    steps = first = 0
    while first < costs.shape[0] and steps != known:
        end = bounds[steps + 1] if known >= 0 else costs.shape[0]
        stop = _fill(costs, limit, most, first, end, order, heap, loads, counts, seat_of, tried)
        if known < 0 and stop == costs.shape[0] and not whole:
            break
        packed = _pack(costs, limit, most, first, stop, order, heap, loads, counts, tried)
        # By position, not by step: anyone who resumes numbers the steps anew.
        turn = (start + first) % seats
        for i in range(first, stop):
            seat = (tried[i] if packed else seat_of[i]) + turn
            seat -= seats if seat >= seats else 0
            seat_of[i] = seat
            rows[steps, seat] += 1
            sums[steps, seat] += costs[i]
        steps += 1
        first = stop
        bounds[steps] = stop
    return steps


#: The numbers that `deal_steps` is given: cost and records of a batch; the position of the first record, from which the
#: seat follows that gets the largest one; steps, or -1 if they are to be cut; whether the last records are a step, too.
GIVEN = ("limit", "most", "start", "steps", "whole")
