"""A decoded picture to a row of the batch, in one call: crop, resize, flip, jitter, normalise, layout and dtype.

A window of the picture is resized with a triangle filter. Where it grows, that is bilinear interpolation. Where it
shrinks, the filter is as wide as the pixels that a new pixel covers (antialiasing), as in Pillow's BILINEAR. Pixels
outside the window have no influence.

Row by row: the lines of the picture under a new line are added up, each with its weight, then the pixels of the sum.
The first step runs over contiguous memory, and both keep what they use in the first-level cache. All memory belongs to
the caller, which keeps it for the next picture.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from pario.kernels.convert import mix
from pario.kernels.jit import ARRAY, emitted, inner, kernel
from pario.kernels.permute import mix64

#: how a window is chosen
WHOLE, CENTER, RANDOM = 0, 1, 2
#: dtype of a row
U8, F32, F16 = 0, 1, 2
#: window f64[5] of a picture: where it begins, its size, 1 if it is mirrored left to right
WINDOW = ("top", "left", "height", "width", "flip")
#: jitter f32[4]: factors, and an angle in turns; (1, 1, 1, 0) changes nothing
JITTER = ("brightness", "contrast", "saturation", "hue")

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
#: `colors` that change nothing.
_AS_IS = np.array([1, 1, 1, 0, 0, 0, 0, 0, 0], np.float32)
#: Makes these draws others than those of convert.draw_window.
_SALT = np.uint64(0xB5297A4D3F84D5B5)
#: A window that does not fit is drawn again this often.
_ATTEMPTS = 10
#: Y, I and Q of red, green and blue, and back (the NTSC standard's).
_I = (0.596, -0.274, -0.322)
_Q = (0.211, -0.523, 0.312)
_BACK_I = (0.956, -0.272, -1.106)
_BACK_Q = (0.621, -0.647, 1.703)


@inner
def _uniform(bits):  # type: ignore[no-untyped-def]
    """f64 in [0, 1)."""
    return np.float64(bits >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@kernel
def draw_picture(key, record, size, crop, chance, window, jitter):  # type: ignore[no-untyped-def]
    """Choose the window f64[5] and jitter f32[4] of a record: a function of the epoch's key and the record id alone.

    size : (height, width) of the picture
    crop : WHOLE, CENTER or RANDOM
    chance : f64[10]: (least, most) share of the picture's area, (least, most) logarithm of width / height, the
        probability of a flip, how far each part of the jitter goes, and the share of the sides (CENTER). With CENTER,
        chance[2] is the logarithm of width / height.
    """
    height, width = size
    state = mix(np.uint64(key) ^ mix(np.uint64(record) ^ _SALT))
    window[4] = 0.0
    if chance[4] > 0.0 and _uniform(mix64(state)) < chance[4]:
        window[4] = 1.0
    for k in range(4):
        state += _GAMMA
        part = chance[5 + k]
        jitter[k] = 0.0 if k == 3 else 1.0
        if part > 0.0:
            low = -part if k == 3 else max(0.0, 1.0 - part)
            high = part if k == 3 else 1.0 + part
            jitter[k] = low + (high - low) * _uniform(mix64(state))
    window[0], window[1], window[2], window[3] = 0.0, 0.0, height, width
    if crop == WHOLE:
        return
    if crop == RANDOM:
        for _ in range(_ATTEMPTS):
            state += _GAMMA
            area = height * width * (chance[0] + (chance[1] - chance[0]) * _uniform(mix64(state)))
            state += _GAMMA
            ratio = math.exp(chance[2] + (chance[3] - chance[2]) * _uniform(mix64(state)))
            h, w = np.int64(round(math.sqrt(area / ratio))), np.int64(round(math.sqrt(area * ratio)))
            state += _GAMMA
            down = _uniform(mix64(state))
            state += _GAMMA
            if 0 < h <= height and 0 < w <= width:
                window[0] = min(math.floor(down * (height - h + 1)), height - h)
                window[1] = min(math.floor(_uniform(mix64(state)) * (width - w + 1)), width - w)
                window[2], window[3] = h, w
                return
    # The largest window in the middle with a ratio within bounds.
    low = math.exp(chance[2])
    high = low if crop == CENTER else math.exp(chance[3])
    share = chance[9] if crop == CENTER else 1.0
    ratio = min(max(width / height, low), high)
    h = min(max(np.int64(round(share * min(np.float64(height), width / ratio))), np.int64(1)), height)
    w = min(max(np.int64(round(share * min(np.float64(width), height * ratio))), np.int64(1)), width)
    window[0], window[1], window[2], window[3] = (height - h) // 2, (width - w) // 2, h, w


@inner
def _most_taps(length, out_length):  # type: ignore[no-untyped-def]
    """Pixels that a new pixel may need, and one more."""
    return np.int64(2.0 * max(length / out_length, 1.0)) + 3


@kernel
def work_floats(height, width, out_height, out_width, jitters):  # type: ignore[no-untyped-def]
    """Size of `picture_row`'s work f32[n], for a picture of three channels and any window of it."""
    across, down = _most_taps(np.float64(width), out_width), _most_taps(np.float64(height), out_height)
    n = 3 * (width + 1 + across) + 3 * out_width + out_width * across + out_height * down
    return n + 3 * out_height * out_width if jitters else n


@kernel
def work_numbers(out_height, out_width):  # type: ignore[no-untyped-def]
    """Size of `picture_row`'s numbers i64[n]."""
    return out_height + out_width


@inner
def _covered(begin, length, most, n, x):  # type: ignore[no-untyped-def]
    """(first, one past the last) pixel that new pixel x of n may need, and its centre, counted from floor(begin).

    most : pixels from there to the picture's end; begin + length may be rounded to a little more
    """
    scale = length / n
    support = max(scale, 1.0)
    begin -= math.floor(begin)
    limit = min(math.ceil(begin + length), most)
    centre = begin + (x + 0.5) * scale
    low = min(max(math.floor(centre - support + 0.5), 0), limit - 1)
    return low, max(min(math.floor(centre + support + 0.5), limit), low + 1), centre


@inner
def _weigh(begin, length, most, flip, first, weights):  # type: ignore[no-untyped-def]
    """New pixel x is the sum of weights[x * taps + k] * pixel[first[x] + k], counted from pixel floor(begin).

    Returns taps: the most pixels that one needs.
    """
    n = len(first)
    support = max(length / n, 1.0)
    taps, same = 1, length == n and begin == math.floor(begin)
    if not same:
        for x in range(n):
            low, high, _ = _covered(begin, length, most, n, x)
            taps = max(taps, high - low)
    for x in range(n):
        to = n - 1 - x if flip else x
        low, high, centre = _covered(begin, length, most, n, x)
        if same:
            low, high = x, x + 1
        first[to] = low
        total = 0.0
        for k in range(taps):
            weight = 0.0
            if low + k < high:
                weight = max(0.0, 1.0 - abs(low + k - centre + 0.5) / support)
            weights[to * taps + k] = weight
            total += weight
        for k in range(taps):
            weights[to * taps + k] /= total
    return taps


@inner
def _add_lines(src, at, stride, n, taps, weights, line):  # type: ignore[no-untyped-def]
    """line f32[:n] = sum of weights[k] * src[at + k * stride :], for the weights that are not 0."""
    l = line[:n]  # noqa: E741
    a = weights[0]
    s = src[at : at + n]
    begin = 2
    if taps >= 3 and weights[2] != np.float32(0):
        b, c = weights[1], weights[2]
        t = src[at + stride : at + stride + n]
        u = src[at + 2 * stride : at + 2 * stride + n]
        for i in range(n):
            l[i] = a * np.float32(s[i]) + b * np.float32(t[i]) + c * np.float32(u[i])
        begin = 3
    elif taps >= 2 and weights[1] != np.float32(0):
        b = weights[1]
        t = src[at + stride : at + stride + n]
        for i in range(n):
            l[i] = a * np.float32(s[i]) + b * np.float32(t[i])
    else:
        for i in range(n):
            l[i] = a * np.float32(s[i])
    for k in range(begin, taps):
        b = weights[k]
        if b != np.float32(0):
            t = src[at + k * stride : at + k * stride + n]
            for i in range(n):
                l[i] += b * np.float32(t[i])


def _sum_of(taps: int) -> Any:
    """add(out, to, line, at, weights, begin, colors): out[to : to + 4] = the sum over k < taps of
    weights[begin + k] * line[at + 3 * k :][:4], times colors[:4], plus colors[3:7].

    All f32 and contiguous. Unchecked. Three of the four are a pixel: LLVM does not find this vector by itself.
    """

    @emitted(types.void, ARRAY, types.intp, ARRAY, types.intp, ARRAY, types.intp, ARRAY)
    def add(builder, out, to, line, at, weights, begin, colors):  # type: ignore[no-untyped-def]
        four = ir.VectorType(ir.FloatType(), 4)
        nothing, number = ir.Constant(four, ir.Undefined), to.type

        def four_at(array: ir.Value, index: ir.Value) -> ir.Value:
            return builder.bitcast(builder.gep(array, [index]), four.as_pointer())

        total = None
        for k in range(taps):
            weight = builder.load(builder.gep(weights, [builder.add(begin, number(k))]))
            lanes = builder.insert_element(nothing, weight, ir.IntType(32)(0))
            lanes = builder.shuffle_vector(lanes, nothing, ir.Constant(ir.VectorType(ir.IntType(32), 4), [0] * 4))
            pixel = builder.load(four_at(line, builder.add(at, number(3 * k))), align=4)
            part = builder.fmul(lanes, pixel)
            total = part if total is None else builder.fadd(total, part)
        factors, offsets = (builder.load(four_at(colors, number(k)), align=4) for k in (0, 3))
        total = builder.fadd(builder.fmul(total, factors), offsets)
        builder.store(total, four_at(out, to), align=4)

    return add


_one, _two, _three = _sum_of(1), _sum_of(2), _sum_of(3)


@inner
def _add_pixels(line, channels, first, taps, weights, colors, res, to):  # type: ignore[no-untyped-def]
    """res f32[to : to + channels * w] = the new pixels of a line times colors[:3], plus colors[3:6].

    Of three channels the pixels lie one after the other, and the last one is written by itself: nothing behind it is.
    """
    w = len(first)
    if channels != 3:
        for x in range(w):
            v = np.float32(0)
            for k in range(taps):
                v += weights[x * taps + k] * line[first[x] + k]
            res[to + x] = v * colors[0] + colors[3]
        return
    if taps == 1:
        for x in range(w - 1):
            _one(res, to + 3 * x, line, 3 * first[x], weights, x, colors)
    elif taps == 2:
        for x in range(w - 1):
            _two(res, to + 3 * x, line, 3 * first[x], weights, 2 * x, colors)
    elif taps == 3:
        for x in range(w - 1):
            _three(res, to + 3 * x, line, 3 * first[x], weights, 3 * x, colors)
    done = max(w - 1, 0) if taps <= 3 else 0
    for x in range(done, w):
        i = 3 * first[x]
        r, g, v = np.float32(0), np.float32(0), np.float32(0)
        for k in range(taps):
            a = weights[x * taps + k]
            r += a * line[i + 3 * k]
            g += a * line[i + 3 * k + 1]
            v += a * line[i + 3 * k + 2]
        res[to + 3 * x] = r * colors[0] + colors[3]
        res[to + 3 * x + 1] = g * colors[1] + colors[4]
        res[to + 3 * x + 2] = v * colors[2] + colors[5]


@inner
def _half(bits):  # type: ignore[no-untyped-def]
    """u16 bits of the float16 nearest to the float32 of these u32 bits; ties go to the even one."""
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    rest = bits & np.uint32(0x7FFFFFFF)
    # A normal number: the exponent's offset is 112 less, and 13 bits of the fraction go.
    odd = (rest >> np.uint32(13)) & np.uint32(1)
    normal = (rest - np.uint32(112 << 23) + np.uint32(0xFFF) + odd) >> np.uint32(13)
    # Below 2^-14: a multiple of 2^-24.
    shift = min(np.uint32(126) - min(rest >> np.uint32(23), np.uint32(113)), np.uint32(31))
    fraction = (rest & np.uint32(0x7FFFFF)) | np.uint32(0x800000)
    below = (np.uint32(1) << (shift - np.uint32(1))) - np.uint32(1)
    small = (fraction + below + ((fraction >> shift) & np.uint32(1))) >> shift
    half = small if rest < np.uint32(113 << 23) else normal
    if rest >= np.uint32(0x477FF000):  # 65,520 and more, infinity
        half = np.uint32(0x7C00)
    if rest > np.uint32(0x7F800000):
        half = np.uint32(0x7E00)
    return np.uint16(sign | half)


@inner
def _store(res, channels, planar, kind, out, to, plane):  # type: ignore[no-untyped-def]
    """A line res f32[channels * w], pixel after pixel, becomes out[to:] as `kind`; out: see `picture_row`.

    planar : channel c of it lies at `to` + c * plane
    """
    bytes_, floats, halves = out
    if planar and channels == 3:
        w = len(res) // 3
        first, second, third = to, to + plane, to + 2 * plane
        if kind == U8:
            d, e, f = bytes_[first : first + w], bytes_[second : second + w], bytes_[third : third + w]
            half = np.float32(0.5)
            for i in range(w):
                d[i] = np.uint8(res[3 * i] + half)
                e[i] = np.uint8(res[3 * i + 1] + half)
                f[i] = np.uint8(res[3 * i + 2] + half)
        elif kind == F32:
            g, h, k = floats[first : first + w], floats[second : second + w], floats[third : third + w]
            for i in range(w):
                g[i] = res[3 * i]
                h[i] = res[3 * i + 1]
                k[i] = res[3 * i + 2]
        else:
            bits = res.view(np.uint32)
            p, q, r = halves[first : first + w], halves[second : second + w], halves[third : third + w]
            for i in range(w):
                p[i] = _half(bits[3 * i])
                q[i] = _half(bits[3 * i + 1])
                r[i] = _half(bits[3 * i + 2])
        return
    n = len(res)
    if kind == U8:
        d = bytes_[to : to + n]
        for i in range(n):
            d[i] = np.uint8(res[i] + np.float32(0.5))
    elif kind == F32:
        e = floats[to : to + n]
        for i in range(n):
            e[i] = res[i]
    else:
        bits = res.view(np.uint32)
        f = halves[to : to + n]
        for i in range(n):
            f[i] = _half(bits[i])


@inner
def _level(x):  # type: ignore[no-untyped-def]
    return min(max(x, np.float32(0)), np.float32(255))


@inner
def _change_colors(levels, pixels, channels, jitter, grey):  # type: ignore[no-untyped-def]
    """Brightness, contrast, saturation, hue, in this order, of levels f32[pixels * channels] in 0 ... 255.

    grey : f32[3], the weights of the channels in a pixel's grey level, in the order of the channels
    """
    n = pixels * channels
    by = jitter[0]
    if by != np.float32(1):
        for i in range(n):
            levels[i] = _level(levels[i] * by)
    by = jitter[1]
    if by != np.float32(1):
        total = 0.0
        if channels == 3:
            for i in range(pixels):
                total += grey[0] * levels[3 * i] + grey[1] * levels[3 * i + 1] + grey[2] * levels[3 * i + 2]
        else:
            for i in range(n):
                total += levels[i]
        rest = np.float32(total / pixels) * (np.float32(1) - by)
        for i in range(n):
            levels[i] = _level(levels[i] * by + rest)
    by = jitter[2]
    if by != np.float32(1) and channels == 3:
        for i in range(pixels):
            a, b, c = levels[3 * i], levels[3 * i + 1], levels[3 * i + 2]
            rest = (grey[0] * a + grey[1] * b + grey[2] * c) * (np.float32(1) - by)
            levels[3 * i] = _level(a * by + rest)
            levels[3 * i + 1] = _level(b * by + rest)
            levels[3 * i + 2] = _level(c * by + rest)
    if jitter[3] != np.float32(0) and channels == 3:
        _turn_hue(levels, pixels, jitter[3], grey)


@inner
def _turn_hue(levels, pixels, turns, grey):  # type: ignore[no-untyped-def]
    """Turn the plane of I and Q by this part of a circle: grey levels stay."""
    cosine, sine = np.float32(math.cos(2 * math.pi * turns)), np.float32(math.sin(2 * math.pi * turns))
    red = 0 if grey[0] > grey[2] else 2
    blue = 2 - red
    for i in range(pixels):
        r, g, b = levels[3 * i + red], levels[3 * i + 1], levels[3 * i + blue]
        y = grey[red] * r + grey[1] * g + grey[blue] * b
        p = np.float32(_I[0]) * r + np.float32(_I[1]) * g + np.float32(_I[2]) * b
        q = np.float32(_Q[0]) * r + np.float32(_Q[1]) * g + np.float32(_Q[2]) * b
        p, q = p * cosine - q * sine, p * sine + q * cosine
        levels[3 * i + red] = _level(y + np.float32(_BACK_I[0]) * p + np.float32(_BACK_Q[0]) * q)
        levels[3 * i + 1] = _level(y + np.float32(_BACK_I[1]) * p + np.float32(_BACK_Q[1]) * q)
        levels[3 * i + blue] = _level(y + np.float32(_BACK_I[2]) * p + np.float32(_BACK_Q[2]) * q)


@kernel
def picture_row(picture, shape, window, size, jitter, colors, kind, planar, work, numbers, out):  # type: ignore[no-untyped-def]
    """Write the window of a picture u8[h * w * c], pixel after pixel, as a row of the batch.

    shape : (height, width, channels) of the picture, channels 1 or 3
    window : f64[5], see WINDOW; inside the picture
    size : (height, width) of the row
    jitter : f32[4], see JITTER
    colors : f32[9]: three factors and three summands of the channels' levels 0 ... 255, three weights of a grey level
    kind : U8, F32 or F16
    planar : the channels lie one after the other in the row
    work, numbers : f32 and i64, see `work_floats` and `work_numbers`
    out : (u8, f32, u16), of which that of the kind is the row, and the others are not used
    """
    height, width, channels = shape
    out_height, out_width = size
    jitters = jitter[0] != 1 or jitter[1] != 1 or jitter[2] != 1 or jitter[3] != 0
    top, left = np.int64(math.floor(window[0])), np.int64(math.floor(window[1]))
    n = channels * (min(np.int64(math.ceil(window[1] + window[3])), width) - left)
    run, plane = channels * out_width, out_height * out_width

    most_x, most_y = _most_taps(window[3], out_width), _most_taps(window[2], out_height)
    at = n + channels * most_x
    line = work[:at]
    res = work[at : at + run]
    at += run
    weights_x = work[at : at + out_width * most_x]
    at += out_width * most_x
    weights_y = work[at : at + out_height * most_y]
    at += out_height * most_y
    first_x, first_y = numbers[:out_width], numbers[out_width : out_width + out_height]
    across = _weigh(window[1], window[3], width - left, window[4] != 0, first_x, weights_x)
    down = _weigh(window[0], window[2], height - top, False, first_y, weights_y)
    for i in range(n, len(line)):  # read where a weight is 0
        line[i] = 0

    stride = width * channels
    direct = kind == F32 and (channels == 1 or not planar) and not jitters
    levels = work[at : at + run * out_height] if jitters else res
    for y in range(out_height):
        begin = (top + first_y[y]) * stride + left * channels
        _add_lines(picture, begin, stride, n, down, weights_y[y * down : (y + 1) * down], line)
        if jitters:
            _add_pixels(line, channels, first_x, across, weights_x, _AS_IS, levels, y * run)
        elif direct:
            _add_pixels(line, channels, first_x, across, weights_x, colors, out[1], y * run)
        else:
            _add_pixels(line, channels, first_x, across, weights_x, colors, res, 0)
            _store(res, channels, planar, kind, out, y * (out_width if planar else run), plane)
    if not jitters:
        return
    _change_colors(levels, plane, channels, jitter, colors[6:9])
    for y in range(out_height):
        part = levels[y * run : (y + 1) * run]
        for c in range(channels):
            for x in range(out_width):
                part[x * channels + c] = part[x * channels + c] * colors[c] + colors[3 + c]
        _store(part, channels, planar, kind, out, y * (out_width if planar else run), plane)
