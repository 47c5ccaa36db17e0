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
    entry, value = cursor.value(), txn.get(key)
assert value is not None, "no such key"
assert entry[:8] == b"PARIOPK\x01", "not packed"
end = 12 + int.from_bytes(entry[8:12], "little")
codecs, parts = json.loads(entry[12:end])["codecs"], entry[end:-8]
slot, checksum, at, size, shift = value[0], value[1:5], 5, 0, 0
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
sys.stdout.buffer.write(raw)
