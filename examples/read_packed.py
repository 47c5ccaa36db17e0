"""Values of a dataset that pario packed with zstd, by py-lmdb alone: python read_packed.py DATA.LMDB KEY"""

import json
import os
import sys

import lmdb
import xxhash
import zstandard

path, key = sys.argv[1], os.fsencode(sys.argv[2])
with lmdb.open(path, subdir=os.path.isdir(path), readonly=True, lock=False) as env, env.begin() as txn:
    cursor = txn.cursor()
    cursor.last()
    entry = cursor.value()
    cursor.set_range(key)  # several records may lie under the key of the last one
    found, value = cursor.item()
assert entry[:8] in (b"PARIOPK\x01", b"PARIOPK\x02"), "not packed"
end = 12 + int.from_bytes(entry[8:12], "little")
codecs, parts = json.loads(entry[12:end])["codecs"], entry[end:-8]
assert value[0] & 128 or found == key, "no such key"
slot, checksum, at, size, shift = value[0] & 127, value[1:5], 5, 0, 0
while slot:
    size |= (value[at] & 127) << shift
    shift, at = shift + 7, at + 1
    if value[at - 1] < 128:
        break
raw = value[at:]
if slot:
    assert codecs[slot - 1]["name"] == "zstd", codecs[slot - 1]
    first, length = codecs[slot - 1]["dictionary"] or (0, 0)
    known = zstandard.ZstdCompressionDict(parts[first : first + length]) if length else None
    codec = zstandard.ZstdDecompressor(dict_data=known, format=zstandard.FORMAT_ZSTD1_MAGICLESS)
    raw = codec.decompress(raw, max_output_size=size)
assert xxhash.xxh3_64_intdigest(raw) & 0xFFFFFFFF == int.from_bytes(checksum, "little"), "damaged"
if value[0] & 128:
    n = int.from_bytes(raw[:2], "little")
    table = [raw[2 + i] << 8 | raw[2 + 3 * n + i] for i in range(3 * n)]
    shared, rest, sizes, name = table[:n], table[n : 2 * n], table[2 * n :], b""
    at, begin, values = 2 + 6 * n, len(raw) - sum(sizes), {}
    for i in range(n):
        name = name[: shared[i]] + raw[at : at + rest[i]]
        values[name] = raw[begin : begin + sizes[i]]
        at, begin = at + rest[i], begin + sizes[i]
    raw = values[key]
sys.stdout.buffer.write(raw)
