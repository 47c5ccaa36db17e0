"""Values of packed databases: headers, checksums, and the C functions of compression libraries, without the
interpreter.

A value of a packed database (codec/packing.py draws it):

    byte 0        slot in the table of codecs; 0: the value is stored as it is; BLOCK more: it is a block
    bytes 1..4    the low 32 bits of the value's XXH3, lowest byte first
    LEB128        the value's size in bytes; only where slot is not 0
    rest          what the codec made of it

A block holds several records, one after the other in key order, under the key of the last one. Before it is packed:

    u16           records of the block, n
    u8[2, 3, n]   high bytes, then low bytes, of three numbers a record: the bytes that its key shares with the key
                  before it, the other bytes of its key, the bytes of its value
    u8[...]       the other bytes of all keys; all values

A row of `hows` says how to call one codec's library: i64[HOW].

    [KIND]      which function's arguments (ZSTD, LZ4, ...); PYTHON: no C function, the caller does it
    [FUNCTION]  its address
    [CONTEXT]   address of what the function works with; of one thread at a time
    [EXTRA]     address of the dictionary, or of the dictionary's digest
    [NUMBER]    bytes of the dictionary, or the level
    [HELPER], [THIRD]  addresses of functions that prepare the context for a value

Every function here checks the bounds of what it reads and of what it writes before it calls C, and calls only functions
that take both bounds.
"""

from __future__ import annotations

import numpy as np

from pario.kernels.calls import as_bytes, call_c, copy_memory
from pario.kernels.jit import inner, kernel
from pario.kernels.sums import SCRATCH, sum_pieces

KIND, FUNCTION, CONTEXT, EXTRA, NUMBER, HELPER, THIRD, HOW = range(8)
PYTHON, RAW, ZSTD, LZ4, LZ4_STREAM, BROTLI, DEFLATE, BLOSC = range(8)

#: bytes of a header without the size
FIXED = 5
#: Added to the slot of a block; so there are fewer codecs. Bytes of its head; the most bytes that one unpacks to.
BLOCK, BLOCK_HEAD, MOST_BLOCK = 128, 2, 1 << 24
#: The largest value that LMDB holds; more in a header is damage.
MOST = 0xFFFFFFFF
#: A value is at most this many times its packed bytes and this much more: a few bytes can say, and hold, 4 GiB.
TIMES, MORE = 64, 128 << 20
#: The largest value that a call of another C function than zstd's takes: many count bytes in an int.
MOST_INT = 0x7E000000
#: A value is kept as it is unless compressing saves this share: 1 >> 5 = 3 %. Less is not worth the time of decoding.
_PAYS = 5

#: bytes of the header of a blosc2 chunk
BLOSC_HEAD = 32
#: flags of a chunk: its bytes stand as they are; its blocks are not split by the bytes of a number
_BLOSC_COPIED, _BLOSC_WHOLE = 2, 16

#: codes of rows -> what is wrong with the value
OK, LATER, HEADER, SLOT, SIZE, ROOM, BAD, SUM, FORM, TABLE = range(10)
WRONG = (
    "",
    "not decoded",
    "its header is damaged",
    "its header names a codec that the table of codecs does not have",
    "its header has another size than the table of sizes",
    "it does not lie inside of the memory that it should come from or go to",
    "the codec cannot decode it",
    "its checksum differs",
    "its size is not that of a row",
    "the table of its block is damaged",
)


@inner
def _word(buf, at):  # type: ignore[no-untyped-def]
    """The 32 bits at buf[at : at + 4], the lowest byte first."""
    low = np.int64(buf[at]) | np.int64(buf[at + 1]) << 8
    return low | np.int64(buf[at + 2]) << 16 | np.int64(buf[at + 3]) << 24


@inner
def _is_plain_chunk(chunk, size, head):  # type: ignore[no-untyped-def]
    """Whether a chunk's header is one that this codec writes: a damaged one may ask the library for plugins, which
    it starts processes for, or for chunks that lie elsewhere.

    head u8[BLOSC_HEAD] : the header of another chunk, made with the same options
    """
    n = len(chunk)
    if n < BLOSC_HEAD:
        return False
    nbytes, block, cbytes = _word(chunk, 4), _word(chunk, 8), _word(chunk, 12)
    if nbytes != size or cbytes != n or block <= 0 or block > max(size, 1):
        return False
    # Free are the flag of how blocks are split, and in the last byte how a value of equal bytes is kept.
    same = (chunk[2] ^ head[2]) & ~_BLOSC_WHOLE == 0 and (chunk[31] ^ head[31]) & 0x8F == 0
    for k in range(16, 31):
        same &= chunk[k] == head[k]
    return same and chunk[0] == head[0] and chunk[1] == head[1] and chunk[3] == head[3]


@inner
def _decoded(how, src, n, dst, size, word):  # type: ignore[no-untyped-def]
    """OK, or BAD, of the n bytes at `src`, which are to give `size` bytes at `dst`. word : i64[1], for use here"""
    kind = how[KIND]
    if kind == PYTHON:  # a package takes values of any size
        return LATER
    if kind == ZSTD:
        got = call_c(how[FUNCTION], how[CONTEXT], dst, size, src, n, how[EXTRA])
        return OK if got == size else BAD
    if kind == RAW:
        if n != size:
            return BAD
        copy_memory(dst, src, n)
        return OK
    if n > MOST_INT or size > MOST_INT:
        return BAD
    if kind == LZ4:
        got = call_c(how[FUNCTION], src, dst, n, size, how[EXTRA], how[NUMBER])
        return OK if np.int32(got) == size else BAD
    if kind == BROTLI:
        word[0] = size
        got = call_c(how[FUNCTION], n, src, word.ctypes.data, dst, 0, 0)
        return OK if np.int32(got) == 1 and word[0] == size else BAD
    if kind == DEFLATE:
        word[0] = 0
        got = call_c(how[FUNCTION], how[CONTEXT], src, n, dst, size, word.ctypes.data)
        return OK if np.int32(got) == 0 and word[0] == size else BAD
    if kind == BLOSC:
        if n == 0 and size == 0:
            return OK
        if n >= BLOSC_HEAD and as_bytes(src, n)[2] & _BLOSC_COPIED:
            if n - BLOSC_HEAD != size:
                return BAD
            copy_memory(dst, src + BLOSC_HEAD, size)
            return OK
        if not _is_plain_chunk(as_bytes(src, n), size, as_bytes(how[EXTRA], BLOSC_HEAD)):
            return BAD
        got = call_c(how[FUNCTION], how[CONTEXT], src, n, dst, size, 0)
        return OK if np.int32(got) == size else BAD
    return LATER


@inner
def _inside(begin, n, whole):  # type: ignore[no-untyped-def]
    return begin >= 0 and n >= 0 and begin <= whole - n


@kernel
def decode_values(how, data, data_bytes, starts, nbytes, out, out_bytes, out_starts, out_nbytes, codes):  # type: ignore[no-untyped-def]
    """Value i: nbytes[i] bytes at data + starts[i] give out_nbytes[i] bytes at out + out_starts[i]. Returns how many
    codes are not OK.

    data, out : addresses of memory of data_bytes and out_bytes; codes : i64[n], written
    """
    word, failed = np.zeros(1, np.int64), 0
    for i in range(len(starts)):
        code = ROOM
        if _inside(starts[i], nbytes[i], data_bytes) and _inside(out_starts[i], out_nbytes[i], out_bytes):
            code = _decoded(how, data + starts[i], nbytes[i], out + out_starts[i], out_nbytes[i], word)
        codes[i] = code
        failed += code != OK
    return failed


@inner
def _header(at, n):  # type: ignore[no-untyped-def]
    """(value's size or -1, bytes of the header) of the n bytes at this address."""
    if n < FIXED:
        return -1, 0
    buf = as_bytes(at, n)
    if buf[0] & BLOCK - 1 == 0:
        return n - FIXED, FIXED
    size, k = np.int64(0), FIXED
    for shift in range(0, 35, 7):
        if k >= n:
            return -1, 0
        byte = np.int64(buf[k])
        size |= (byte & 127) << shift
        k += 1
        if byte < 128:
            return (size if size <= min(MOST, TIMES * n + MORE) else -1), k
    return -1, 0


@kernel
def raw_sizes(data, data_bytes, starts, nbytes, sizes):  # type: ignore[no-untyped-def]
    """sizes i64[n] = the values' sizes, of the headers; -1 where there is none."""
    for i in range(len(starts)):
        sizes[i] = -1
        if _inside(starts[i], nbytes[i], data_bytes):
            sizes[i], _ = _header(data + starts[i], nbytes[i])


@inner
def _sum(at, n, lanes, scratch):  # type: ignore[no-untyped-def]
    value = as_bytes(at, n)
    return np.int64(sum_pieces(value, 0, 0, value, 0, n, 0, lanes, scratch) & np.uint64(MOST))


@inner
def _kept_sum(at):  # type: ignore[no-untyped-def]
    return _word(as_bytes(at, FIXED), 1)


@inner
def _checked_header(hows, data, data_bytes, start, n, expected):  # type: ignore[no-untyped-def]
    """(code, value's size, bytes of the header) of the packed value of n bytes at data + start."""
    if not _inside(start, n, data_bytes):
        return ROOM, 0, 0
    size, head = _header(data + start, n)
    if size < 0:
        return HEADER, 0, 0
    if expected >= 0 and size != expected:
        return SIZE, 0, 0
    if as_bytes(data + start, 1)[0] >= len(hows):
        return SLOT, 0, 0
    return OK, size, head


@inner
def _unpacked(hows, at, head, n, dst, size, word, lanes, scratch):  # type: ignore[no-untyped-def]
    """The code of the packed value of n bytes at `at`, with this header, whose `size` bytes are written to `dst`. They
    are compared with their checksum while they are in the processor's cache. (197 KB values: a pass of its own over
    the batch costs 10 to 15 % of decoding.)"""
    code = _decoded(hows[as_bytes(at, 1)[0] & BLOCK - 1], at + head, n - head, dst, size, word)
    if code == OK and _sum(dst, size, lanes, scratch) != _kept_sum(at):
        return SUM
    return code


@inner
def _block_size(hows, data, data_bytes, start, n):  # type: ignore[no-untyped-def]
    """(code, bytes that it unpacks to, bytes of the header) of the packed block of n bytes at data + start."""
    if not _inside(start, n, data_bytes):
        return ROOM, 0, 0
    size, head = _header(data + start, n)
    if size < 0 or size > MOST_BLOCK or as_bytes(data + start, 1)[0] < BLOCK:
        return HEADER, 0, 0
    if as_bytes(data + start, 1)[0] & BLOCK - 1 >= len(hows):
        return SLOT, 0, 0
    return OK, size, head


@inner
def _in_block(block, k):  # type: ignore[no-untyped-def]
    """(where the value of the block's record k begins, its bytes); -1 where the table does not fit the block."""
    n = np.int64(block[0]) | np.int64(block[1]) << 8 if len(block) >= BLOCK_HEAD else 0
    high, low = BLOCK_HEAD + n, BLOCK_HEAD + 4 * n  # of the other bytes of keys; behind them those of values
    at = BLOCK_HEAD + 6 * n
    if not 0 <= k < n or at > len(block):
        return -1, 0
    for i in range(n):
        at += np.int64(block[high + i]) << 8 | np.int64(block[low + i])
    begin, size = at, np.int64(0)
    for i in range(n, 2 * n):
        nbytes = np.int64(block[high + i]) << 8 | np.int64(block[low + i])
        if i == n + k:
            begin, size = at, nbytes
        at += nbytes
    return (begin, size) if at == len(block) else (-1, 0)


@kernel
def unpack_values(hows, data, data_bytes, starts, nbytes, out, out_bytes, out_starts, expected, ordinals, codes):  # type: ignore[no-untyped-def]
    """Like `decode_values` for packed values: value i has expected[i] bytes, or as many as its header says where
    expected[i] is -1.

    hows : i64[slots, HOW]; rows of codecs without a C function keep the code LATER.
    ordinals : i64[n], which one of the block at data + starts[i] value i is; -1: it stands there by itself, as all do
        if there are none. Neighbouring rows of one block unpack it once.
    """
    word, failed = np.zeros(1, np.int64), 0
    lanes, scratch = np.empty(8, np.uint64), np.empty(SCRATCH, np.uint8)
    memory, size = np.empty(1 << 14 if len(ordinals) else 1, np.uint8), np.int64(0)
    at, of, found = np.int64(-1), np.int64(-1), OK
    for i in range(len(starts)):
        to, wanted = out_starts[i], expected[i]
        if len(ordinals) == 0 or ordinals[i] < 0:
            code, n, head = _checked_header(hows, data, data_bytes, starts[i], nbytes[i], wanted)
            if code == OK:
                code = ROOM
                if _inside(to, n, out_bytes):
                    code = _unpacked(hows, data + starts[i], head, nbytes[i], out + to, n, word, lanes, scratch)
        else:
            if starts[i] != at or nbytes[i] != of:
                at, of = starts[i], nbytes[i]
                found, size, head = _block_size(hows, data, data_bytes, at, of)
                if found == OK:
                    if size > len(memory):
                        memory = np.empty(size, np.uint8)
                    dst = np.int64(memory.ctypes.data)
                    found = _unpacked(hows, data + at, head, of, dst, size, word, lanes, scratch)
            code, begin, n = found, np.int64(0), np.int64(0)
            if code == OK:
                begin, n = _in_block(memory[:size], ordinals[i])
                code = TABLE if begin < 0 else SIZE if wanted >= 0 and n != wanted else OK
            if code == OK:
                code = ROOM
                if _inside(to, n, out_bytes):
                    code = OK
                    copy_memory(out + to, np.int64(memory.ctypes.data) + begin, n)
        codes[i] = code
        failed += code != OK
    return failed


@kernel
def join_blocks(counts, keys, key_nbytes, data, starts, nbytes, out, out_nbytes):  # type: ignore[no-untyped-def]
    """Write blocks of counts[b] records, as they are before they are packed, one after the other to `out`, and their
    bytes to out_nbytes[b]; a record that stands alone is its value.

    keys : u8[...], one after the other; out : u8[bytes of keys and values, 8 more for each record]
    """
    i, at, key, before = 0, 0, np.int64(0), np.int64(0)
    for b in range(len(counts)):
        n, begin = counts[b], at
        if n > 1:
            out[at], out[at + 1] = n & 255, n >> 8
            high, low = at + BLOCK_HEAD, at + BLOCK_HEAD + 3 * n
            at += BLOCK_HEAD + 6 * n
            for k in range(n):
                own, shared = key_nbytes[i + k], np.int64(0)
                if k > 0:
                    most = min(own, key_nbytes[i + k - 1])
                    while shared < most and keys[before + shared] == keys[key + shared]:
                        shared += 1
                rest = own - shared
                out[at : at + rest] = keys[key + shared : key + own]
                at, before, key = at + rest, key, key + own
                out[high + k], out[low + k] = shared >> 8, shared & 255
                out[high + n + k], out[low + n + k] = rest >> 8, rest & 255
                out[high + 2 * n + k], out[low + 2 * n + k] = nbytes[i + k] >> 8, nbytes[i + k] & 255
        else:
            key += key_nbytes[i]
        for k in range(i, i + n):
            out[at : at + nbytes[k]] = data[starts[k] : starts[k] + nbytes[k]]
            at += nbytes[k]
        i += n
        out_nbytes[b] = at - begin


@kernel
def unpack_rows(hows, data, data_bytes, starts, nbytes, form, which, rows, edges, kept, spare, codes):  # type: ignore[no-untyped-def]
    """Like `unpack_values` for values that contain a row of an array: of value i, its row goes to row which[i] of
    `rows`, `head` bytes before it and what is behind it go to edges[which[i]], joined, and their number to
    kept[which[i]]. Values whose size is not one of such a value get the code FORM.

    form : i64[3], (head, row, tail): at most `tail` bytes stand behind a row
    which : i64[n]
    rows : u8[k * row]; edges : u8[k, head + tail]; kept : i64[k]; spare : u8[head + row + tail]

    A value is decoded where its row lies, over bytes of the neighbouring rows, which are put back at once: no other
    thread may use `rows` meanwhile. (Through memory that stays in the cache, with a copy of the row, 3 KB values took
    7.2 us of a core instead of 6.2, and 197 KB ones 390 instead of 342.)
    """
    head, row, tail = form[0], form[1], form[2]
    word, failed = np.zeros(1, np.int64), 0
    lanes, scratch = np.empty(8, np.uint64), np.empty(SCRATCH, np.uint8)
    neighbours = np.empty(head + tail, np.uint8)
    aside, base, other = np.int64(neighbours.ctypes.data), np.int64(rows.ctypes.data), np.int64(spare.ctypes.data)
    limit = min(len(edges), len(kept), len(rows) // row if row > 0 else 0)
    if edges.shape[1] < head + tail or len(spare) < head + row + tail:
        limit = 0
    for i in range(len(starts)):
        mine = which[i]
        code, size, lead = _checked_header(hows, data, data_bytes, starts[i], nbytes[i], -1)
        rest = size - head - row
        if code == OK and not 0 <= rest <= tail:
            code = FORM
        if code == OK and not 0 <= mine < limit:
            code = ROOM
        if code == OK:
            begin, at = mine * row - head, data + starts[i]
            end = begin + head + row
            there = begin >= 0 and end + rest <= len(rows)
            dst = base + begin if there else other
            if there:
                copy_memory(aside, dst, head)
                copy_memory(aside + head, base + end, rest)
            code = _unpacked(hows, at, lead, nbytes[i], dst, size, word, lanes, scratch)
            if code == OK:
                edge = np.int64(edges[mine].ctypes.data)
                copy_memory(edge, dst, head)
                copy_memory(edge + head, dst + head + row, rest)
                kept[mine] = head + rest
            if there:
                copy_memory(dst, aside, head)
                copy_memory(base + end, aside + head, rest)
            elif code == OK:
                copy_memory(base + begin + head, other + head, row)
        codes[i] = code
        failed += code != OK
    return failed


@kernel
def check_values(data, starts, rows, out, out_starts, sizes, codes):  # type: ignore[no-untyped-def]
    """Compare the decoded values of these rows, which have the code OK, with the checksums of their headers."""
    lanes, scratch = np.empty(8, np.uint64), np.empty(SCRATCH, np.uint8)
    for k in range(len(rows)):
        i = rows[k]
        if codes[i] == OK and _sum(out + out_starts[i], sizes[i], lanes, scratch) != _kept_sum(data + starts[i]):
            codes[i] = SUM


@inner
def _encoded(how, src, n, dst, room, word):  # type: ignore[no-untyped-def]
    """Bytes written to `dst`, or 0."""
    if n > MOST:  # its header would be taken for a damaged one
        return 0
    kind = how[KIND]
    if kind == ZSTD:
        got = call_c(how[FUNCTION], how[CONTEXT], dst, room, src, n, 0)
        return got if 0 < got <= room else 0
    if n > MOST_INT:
        return 0
    room = min(room, MOST_INT)
    if kind == LZ4:
        got = np.int64(np.int32(call_c(how[FUNCTION], src, dst, n, room, 0, 0)))
    elif kind == LZ4_STREAM:
        call_c(how[THIRD], how[CONTEXT], how[NUMBER], 0, 0, 0, 0)
        if how[EXTRA] != 0:
            call_c(how[HELPER], how[CONTEXT], how[EXTRA], 0, 0, 0, 0)
        got = np.int64(np.int32(call_c(how[FUNCTION], how[CONTEXT], src, dst, n, room, 1)))
    elif kind == DEFLATE:
        got = call_c(how[FUNCTION], how[CONTEXT], src, n, dst, room, 0)
    else:
        got = 0
    return got if 0 < got <= room else 0


@kernel
def pack_values(how, slot, data, data_bytes, starts, nbytes, out, out_bytes, packed_starts, packed_nbytes):  # type: ignore[no-untyped-def]
    """Write the packed values one after the other from `out` on, and where they lie. Returns the bytes written, or
    -1 - i where value i lies outside of `data`, or where `out` may not hold it.

    Of n values `out` needs the sum of bound(size) + 10: what does not get smaller is stored raw, slot 0. An empty
    context (a kind without C function) stores all of them raw.
    """
    word = np.zeros(1, np.int64)
    lanes, scratch = np.empty(8, np.uint64), np.empty(SCRATCH, np.uint8)
    end = 0
    for i in range(len(starts)):
        n = nbytes[i]
        if not _inside(starts[i], n, data_bytes) or end > out_bytes - n - 2 * FIXED:
            return -1 - i
        src, head = data + starts[i], FIXED
        to = as_bytes(out + end, 2 * FIXED)
        left = n
        while True:
            to[head] = left & 127 | (128 if left > 127 else 0)
            head += 1
            left >>= 7
            if left == 0:
                break
        got = _encoded(how, src, n, out + end + head, out_bytes - end - head, word)
        mine = slot
        little = got + head - FIXED > n - (n >> _PAYS) or got + head - FIXED >= n
        if got == 0 or little or n > TIMES * (got + head) + MORE:
            mine, head, got = 0, FIXED, n
            copy_memory(out + end + FIXED, src, n)
        total = _sum(src, n, lanes, scratch)
        to[0], to[1], to[2], to[3], to[4] = mine, total & 255, total >> 8 & 255, total >> 16 & 255, total >> 24
        packed_starts[i], packed_nbytes[i] = end, head + got
        end += head + got
    return end
