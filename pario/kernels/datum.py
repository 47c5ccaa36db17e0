"""Caffe's `Datum` message, read in place, and batches of them written row by row.

    message Datum {                    // every field optional, in any order
      int32 channels = 1;  int32 height = 2;  int32 width = 3;
      bytes data = 4;                  // channels x height x width, or an image file if `encoded`
      int32 label = 5;
      repeated float float_data = 6;   // instead of `data`; packed or one field per value
      bool encoded = 7;
    }

The wire format (protobuf's encoding guide): a field is a varint `number << 3 | wire type`, then a varint (0), 8 bytes
(1), a varint length and that many bytes (2), fields up to an end mark (3 .. 4, a group) or 4 bytes (5). Known fields of
another wire type and unknown fields are skipped; if a field occurs twice, the last one counts.
"""

from __future__ import annotations

import numpy as np

from pario.kernels.convert import crop_f32, crop_u8, draw_window
from pario.kernels.jit import kernel
from pario.kernels.pack import copy_bytes, foresee, settle

#: Results of `parse`.
OK, OUTSIDE, TRUNCATED, BAD_VARINT, BAD_TAG, BAD_LENGTH, BAD_GROUP = range(7)

#: The integers of geometry i64[9], in this order. `height` and `width` are -1 if any size that contains the window is
#: valid; `random`, `mirror` 0 or 1; `mean_kind` as in convert.py; `plain`: floats are copied unchanged.
GEOMETRY = ("channels", "height", "width", "out_height", "out_width", "random", "mirror", "mean_kind", "plain")

#: Groups may be nested this deep, as in protobuf's own parsers.
_DEPTH = 100

#: The key byte of one float_data value that is not packed: field 6, wire type 5. Records of features, as Caffe writes
#: them, hold thousands of such fields in a row, so both readers of them have a short loop.
_FLOAT = 6 << 3 | 5


@kernel
def varint(data, at, end):  # type: ignore[no-untyped-def]
    """(value u64, position after it), or (status, -1)."""
    value = np.uint64(0)
    shift = np.uint64(0)
    while at < end:
        byte = np.uint64(data[at])
        at += 1
        if shift == np.uint64(63) and byte >= np.uint64(0x80):
            return np.uint64(BAD_VARINT), np.int64(-1)
        value |= (byte & np.uint64(0x7F)) << shift  # drops bits beyond 64, as protobuf's parsers do
        if byte < np.uint64(0x80):
            return value, np.int64(at)
        shift += np.uint64(7)
    return np.uint64(TRUNCATED), np.int64(-1)


@kernel
def key(data, at, end):  # type: ignore[no-untyped-def]
    """(field number, wire type, position after them), or (0, status, -1)."""
    value, after = varint(data, at, end)
    if after < 0:
        return np.int64(0), np.int64(value), after
    number = np.int64(value >> np.uint64(3))
    if value > np.uint64(0xFFFFFFFF) or after - at > 5 or number == 0:
        return np.int64(0), np.int64(BAD_TAG), np.int64(-1)
    return number, np.int64(value & np.uint64(7)), after


@kernel
def length(data, at, end):  # type: ignore[no-untyped-def]
    """(bytes that follow, position after the length), or (status, -1); at most five bytes, as in protobuf's parsers."""
    value, after = varint(data, at, end)
    if after < 0:
        return np.int64(value), after
    if after - at > 5 or value > np.uint64(end - after):
        return np.int64(BAD_LENGTH), np.int64(-1)
    return np.int64(value), after


@kernel
def skip_group(data, at, end, number):  # type: ignore[no-untyped-def]
    """(OK, position after the group of field `number` that begins at `at`), or (status, -1)."""
    bad = np.int64(-1)
    opened = np.empty(_DEPTH, np.int64)
    opened[0] = number
    depth = 1
    while depth > 0:
        if at >= end:
            return TRUNCATED, bad
        field, wire, after = key(data, at, end)
        if after < 0:
            return wire, bad
        if wire == 0:
            value, after = varint(data, after, end)
            if after < 0:
                return np.int64(value), bad
        elif wire == 1 or wire == 5:
            size = 8 if wire == 1 else 4
            if end - after < size:
                return TRUNCATED, bad
            after += size
        elif wire == 2:
            size, after = length(data, after, end)
            if after < 0:
                return size, bad
            after += size
        elif wire == 3:
            if depth == _DEPTH:
                return BAD_GROUP, bad
            opened[depth] = field
            depth += 1
        elif wire == 4:
            if opened[depth - 1] != field:
                return BAD_GROUP, bad
            depth -= 1
        else:
            return BAD_TAG, bad
        at = after
    return OK, np.int64(at)


@kernel
def parse(data, start, nbytes):  # type: ignore[no-untyped-def]
    """Ten i64 (status, at, channels, height, width, label, data_at, data_nbytes, floats, encoded) of the message at
    data[start : start + nbytes]; `at`, the field that could not be read, and `data_at` count from the start of data.
    """
    channels, height, width, label, encoded = np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    data_at, data_nbytes, floats = np.int64(start), np.int64(0), np.int64(0)
    at, end = np.int64(start), np.int64(start + nbytes)
    status = np.int64(OK)
    if start < 0 or nbytes < 0 or start > len(data) - nbytes:
        status, end = np.int64(OUTSIDE), at
    while at < end:
        field, wire, after = key(data, at, end)
        if after < 0:
            status = wire
            break
        if wire == 0:
            value, after = varint(data, after, end)
            if after < 0:
                status = np.int64(value)
                break
            number = np.int64(np.int32(value & np.uint64(0xFFFFFFFF)))  # an int32 keeps the low bits
            if field == 1:
                channels = number
            elif field == 2:
                height = number
            elif field == 3:
                width = number
            elif field == 5:
                label = number
            elif field == 7:
                encoded = np.int64(value != np.uint64(0))
        elif wire == 2:
            size, after = length(data, after, end)
            if after < 0:
                status = size
                break
            if field == 4:
                data_at, data_nbytes = after, size
            elif field == 6:
                if size % 4:
                    status = np.int64(BAD_LENGTH)
                    break
                floats += size // 4
            after += size
        elif wire == 1 or wire == 5:
            size = np.int64(8 if wire == 1 else 4)
            if end - after < size:
                status = np.int64(TRUNCATED)
                break
            after += size
            if wire == 5 and field == 6:
                floats += 1
                while end - after >= 5 and data[after] == _FLOAT:
                    floats += 1
                    after += 5
        elif wire == 3:
            result, after = skip_group(data, after, end, field)
            if after < 0:
                status = np.int64(result)
                break
        else:
            status = np.int64(BAD_GROUP if wire == 4 else BAD_TAG)
            break
        at = after
    return status, at, channels, height, width, label, data_at, data_nbytes, floats, encoded


@kernel
def fits(geometry, channels, height, width, values):  # type: ignore[no-untyped-def]
    """True if a record of this shape and number of values can become a row. The products cannot overflow."""
    if channels != geometry[0] or channels <= 0 or height <= 0 or width <= 0:
        return False
    if geometry[1] >= 0 and (height != geometry[1] or width != geometry[2]):
        return False
    if height < geometry[3] or width < geometry[4]:
        return False
    # Each factor is below 2**31, so the product of two is exact.
    return values % (channels * height) == 0 and values // (channels * height) == width


@kernel
def window_of(draw, record, height, width, geometry):  # type: ignore[no-untyped-def]
    """The window of a record of this size, as `crop_u8` takes it."""
    out_height, out_width = geometry[3], geometry[4]
    top, left, flip = draw_window(draw, record, height, width, out_height, out_width, geometry[5], geometry[6])
    return top, left, out_height, out_width, flip


@kernel
def datum_u8(data, starts, nbytes, ids, draw, geometry, out, labels, failed, streams):  # type: ignore[no-untyped-def]
    """Rows of out u8[n * row] and labels i64[n] from records with `data`.

    streams : rows that are whole records go past the caches (pack.stream_bytes)
    Leaves the rows of other records unchanged, writes their numbers to failed i64[n], and returns how many. The same
    holds for `datum_f32` and `datum_floats`.
    """
    n = 0
    row = geometry[0] * geometry[3] * geometry[4]
    for i in range(len(starts)):
        if i + 1 < len(starts):
            foresee(data, starts[i + 1], nbytes[i + 1], starts[min(i + 2, len(starts) - 1)])
        status, _, channels, height, width, label, at, size, _, encoded = parse(data, starts[i], nbytes[i])
        if status != OK or encoded or not fits(geometry, channels, height, width, size):
            failed[n] = i
            n += 1
            continue
        labels[i] = label
        window = window_of(draw, ids[i], height, width, geometry)
        crop_u8(data, at, (channels, height, width), out, i * row, window, streams)
    settle(streams)
    return n


@kernel
def datum_f32(data, starts, nbytes, ids, draw, geometry, mean, scale, out, labels, failed):  # type: ignore[no-untyped-def]
    """As `datum_u8`, with rows (data - mean) * scale of out f32[n * row]."""
    n = 0
    row = geometry[0] * geometry[3] * geometry[4]
    for i in range(len(starts)):
        if i + 1 < len(starts):
            foresee(data, starts[i + 1], nbytes[i + 1], starts[min(i + 2, len(starts) - 1)])
        status, _, channels, height, width, label, at, size, _, encoded = parse(data, starts[i], nbytes[i])
        if status != OK or encoded or not fits(geometry, channels, height, width, size):
            failed[n] = i
            n += 1
            continue
        labels[i] = label
        window = window_of(draw, ids[i], height, width, geometry)
        crop_f32(data, at, (channels, height, width), out, i * row, window, mean, geometry[7], scale)
    return n


@kernel
def gather_floats(data, at, end, out, to):  # type: ignore[no-untyped-def]
    """out f32[to:] = the float_data of a message that `parse` found OK, in the order of its fields."""
    to *= 4
    while at < end:
        field, wire, after = key(data, at, end)
        if wire == 0:
            _, after = varint(data, after, end)
        elif wire == 2:
            size, after = length(data, after, end)
            if field == 6:
                copy_bytes(out, to, data, after, size)
                to += size
            after += size
        elif wire == 5:
            if field == 6:
                copy_bytes(out, to, data, after, 4)
                to += 4
                while end - after >= 9 and data[after + 4] == _FLOAT:
                    copy_bytes(out, to, data, after + 5, 4)
                    to += 4
                    after += 5
            after += 4
        elif wire == 1:
            after += 8
        else:
            _, after = skip_group(data, after, end, field)
        at = after


@kernel
def datum_floats(data, starts, nbytes, ids, draw, geometry, mean, scale, out, labels, failed):  # type: ignore[no-untyped-def]
    """As `datum_f32`, from records with `float_data` (little-endian, as the machine)."""
    n = 0
    row = geometry[0] * geometry[3] * geometry[4]
    values = np.empty(0, np.float32)
    for i in range(len(starts)):
        if i + 1 < len(starts):
            foresee(data, starts[i + 1], nbytes[i + 1], starts[min(i + 2, len(starts) - 1)])
        status, _, channels, height, width, label, _, size, floats, encoded = parse(data, starts[i], nbytes[i])
        if status != OK or encoded or size or not fits(geometry, channels, height, width, floats):
            failed[n] = i
            n += 1
            continue
        labels[i] = label
        end = starts[i] + nbytes[i]
        if geometry[8]:
            gather_floats(data, starts[i], end, out, i * row)
            continue
        if floats > len(values):
            values = np.empty(floats, np.float32)
        gather_floats(data, starts[i], end, values, 0)
        window = window_of(draw, ids[i], height, width, geometry)
        crop_f32(values, 0, (channels, height, width), out, i * row, window, mean, geometry[7], scale)
    return n


@kernel
def datum_rest(data, starts, nbytes, head, labels, failed):  # type: ignore[no-untyped-def]
    """labels i64[n] of records without their pixels: `head` u8[h], the bytes before the first pixel, then those after
    the last one, which may be a label and `encoded` = false.

    Writes the rows of other records to failed i64[n]; returns how many.
    """
    n = 0
    for i in range(len(starts)):
        at, end = starts[i], starts[i] + nbytes[i]
        good = at >= 0 and len(head) <= nbytes[i] <= len(data) - at
        for k in range(len(head)):
            good = good and data[at + k] == head[k]
        at += len(head)
        label = np.int64(0)
        while good and at < end:
            field, wire, after = key(data, at, end)
            good = after >= 0 and wire == 0 and (field == 5 or field == 7)
            if good:
                value, at = varint(data, after, end)
                good = at >= 0 and (field == 5 or value == np.uint64(0))
                if field == 5:
                    label = np.int64(np.int32(value & np.uint64(0xFFFFFFFF)))
        labels[i] = label
        if not good:
            failed[n] = i
            n += 1
    return n
