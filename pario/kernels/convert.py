"""Pixels to pixels: crop, flip, u8 -> f32 with mean and scale, HWC -> CHW; and the random choice of the window.

One record per call, for the loops in other kernels. No checks: sources hold channels * height * width values from `at`,
windows lie inside the source, `out` has room from `to`.

Inner loops run over slices from index 0, and backwards with unsigned indices. So LLVM sees that no index is negative
and vectorises them (a flip with signed indices ran at a tenth of the speed).
"""

from __future__ import annotations

import numpy as np

from pario.kernels.jit import kernel
from pario.kernels.pack import copy_bytes, move_bytes
from pario.kernels.permute import mix64

#: content of `mean` f32[...]: one value, one per channel, or one per pixel of the source
MEAN_ONE, MEAN_CHANNEL, MEAN_PIXEL = 0, 1, 2


@kernel
def mix(x):  # type: ignore[no-untyped-def]
    """One number of SplitMix64, u64 -> u64; the same arithmetic stands in decode/base.py."""
    return mix64(np.uint64(x) + np.uint64(0x9E3779B97F4A7C15))


@kernel
def draw_window(key, record, height, width, out_height, out_width, random, mirror):  # type: ignore[no-untyped-def]
    """(top, left, flip) of a record's window: a function of the epoch's key and the record id alone."""
    top, left = (height - out_height) // 2, (width - out_width) // 2
    flip = False
    if random or mirror:
        # 24 bits for each offset, 1 for the flip: the bias of an offset is below 1 in 2**24 / (height or width).
        bits = mix(np.uint64(key) ^ mix(np.uint64(record)))
        if random:
            top = np.int64(((bits >> np.uint64(40)) * np.uint64(height - out_height + 1)) >> np.uint64(24))
            low = (bits >> np.uint64(16)) & np.uint64(0xFFFFFF)
            left = np.int64((low * np.uint64(width - out_width + 1)) >> np.uint64(24))
        flip = bool(mirror) and (bits & np.uint64(1)) == np.uint64(1)
    return top, left, flip


@kernel
def crop_u8(src, at, shape, out, to, window, streams):  # type: ignore[no-untyped-def]
    """out u8[to:] = the window of src u8[at:].

    streams : a window that is the whole record goes past the caches (pack.settle is the caller's business)

    shape : (channels, height, width) of the source
    window : (top, left, height, width, flip): where it begins in the source, its size, whether it is mirrored left to
    right
    """
    channels, height, width = shape
    top, left, out_height, out_width, flip = window
    if out_height == height and out_width == width and not flip:
        move_bytes(out, to, src, at, channels * height * width, streams)
        return
    last = np.uint64(out_width - 1)
    for c in range(channels):
        for y in range(out_height):
            row = at + (c * height + top + y) * width + left
            if flip:
                s, d = src[row : row + out_width], out[to : to + out_width]
                for x in range(out_width):
                    d[x] = s[last - np.uint64(x)]
            else:
                copy_bytes(out, to, src, row, out_width)
            to += out_width


@kernel
def crop_f32(src, at, shape, out, to, window, mean, mean_kind, scale):  # type: ignore[no-untyped-def]
    """out f32[to:] = (window of src[at:] - mean) * scale; src u8 or f32, `mean` of one of the MEAN_ kinds.

    shape, window : see `crop_u8`
    A mean per pixel belongs to the pixel of the source, before the flip (as in Caffe).
    """
    channels, height, width = shape
    top, left, out_height, out_width, flip = window
    rows, run = out_height, out_width
    if out_width == width and not flip:  # the rows of a channel are contiguous
        rows, run = 1, out_height * width
    last = np.uint64(run - 1)
    for c in range(channels):
        one = mean[c] if mean_kind == MEAN_CHANNEL else mean[0]
        for y in range(rows):
            inside = (c * height + top + y) * width + left
            s, d = src[at + inside : at + inside + run], out[to : to + run]
            if mean_kind == MEAN_PIXEL:
                m = mean[inside : inside + run]
                if flip:
                    for x in range(run):
                        d[x] = (np.float32(s[last - np.uint64(x)]) - m[last - np.uint64(x)]) * scale
                else:
                    for x in range(run):
                        d[x] = (np.float32(s[x]) - m[x]) * scale
            elif flip:
                for x in range(run):
                    d[x] = (np.float32(s[last - np.uint64(x)]) - one) * scale
            else:
                for x in range(run):
                    d[x] = (np.float32(s[x]) - one) * scale
            to += run


@kernel
def hwc_to_chw(image, channels, out):  # type: ignore[no-untyped-def]
    """out u8[channels * pixels] = image u8[pixels * channels] with the channels apart."""
    pixels = len(image) // channels
    if channels == 3:
        a, b, c = out[:pixels], out[pixels : 2 * pixels], out[2 * pixels : 3 * pixels]
        for i in range(pixels):
            a[i] = image[3 * i]
            b[i] = image[3 * i + 1]
            c[i] = image[3 * i + 2]
    else:
        for c in range(channels):
            d = out[c * pixels : (c + 1) * pixels]
            for i in range(pixels):
                d[i] = image[channels * i + c]
