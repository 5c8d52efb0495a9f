"""The kernels of backend ``triton``: attention over pages in pieces, the merge of pieces, the writing of K and V.

An *item* is a piece of work: a few queries of one row, and a range of that row's keys. Query heads that read one KV
head stand below each other in the tile of queries (``BLOCK_M``), so each key is read once for all of them. An item that
has all keys of its queries writes their answer; others write a part, with the logarithm of its weight, and a second
kernel merges the parts of a tile. What the numbers of items and merges are is said where they are made
(``_triton_plan``).

What a mask hides is never loaded, K and V alike: a weight of zero does not undo a NaN.

Sources: Dao et al., 2022, "FlashAttention" (running softmax); Dao et al., 2023, "Flash-Decoding" (split keys, merged
afterwards); Kwon et al., 2023 (pages).
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""Whether these kernels run in Triton's interpreter: decided when they are imported."""

LOW = tl.constexpr(-1e30)


@triton.jit
def attend(
    query, keys, values, out, part, weight, pages, items, inner, outer, window, q_token, q_head,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    CAPPED: tl.constexpr, WINDOWED: tl.constexpr, FP8: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """One item and one KV head: ``out [tokens, heads, V_DIM]``, or ``part [parts, KV_HEADS, BLOCK_M, V_DIM]`` and
    ``weight [parts, KV_HEADS, BLOCK_M]`` (base 2)."""
    head = tl.program_id(0) % KV_HEADS  # neighbours read what lies side by side
    item = items + tl.program_id(0) // KV_HEADS * 8
    token = tl.load(item)
    if token < 0:
        return
    count, position = tl.load(item + 1), tl.load(item + 2)
    begin, end, table, number = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5), tl.load(item + 6)

    m = tl.arange(0, BLOCK_M)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    mine = m // GROUP < count  # so GROUP * count is at most BLOCK_M
    tokens = token.to(tl.int64) + m // GROUP
    heads = head * GROUP + m % GROUP
    q = tl.load(
        query + (tokens * q_token + heads * q_head)[:, None] + d[None, :],
        mask=mine[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    last = position + m // GROUP  # the last key that a query sees

    top = tl.full([BLOCK_M], LOW, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for first in range(begin, end, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside = n < end
        page = tl.load(pages + table + n // PAGE, mask=inside, other=0).to(tl.int64)
        slot = (page * PAGE + n % PAGE) * KV_HEADS + head
        k = tl.load(keys + (slot * DIM)[None, :] + d[:, None], mask=inside[None, :] & (d < DIM)[:, None], other=0)
        if FP8:
            k = _from_fp8(k, q.dtype)
        scores = _product(q, k, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), PRECISION, WIDEN) * inner
        if CAPPED:
            scores = outer * _tanh(scores)
        seen = inside[None, :] & (n[None, :] <= last[:, None])
        if WINDOWED:
            seen = seen & (n[None, :] > last[:, None] - window)
        scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(values + (slot * V_DIM)[:, None] + e[None, :], mask=inside[:, None] & (e < V_DIM)[None, :], other=0)
        if FP8:
            v = _from_fp8(v, q.dtype)
        sums = _product(weights.to(v.dtype), v, sums * fade[:, None], PRECISION, WIDEN)
        top = higher

    whole = tl.where(total == 0.0, 1.0, total)
    sums = sums / whole[:, None]
    shown = mine[:, None] & (e < V_DIM)[None, :]
    if number < 0:
        places = (tokens * (KV_HEADS * GROUP) + heads) * V_DIM
        tl.store(out + places[:, None] + e[None, :], sums.to(out.dtype.element_ty), shown)
    else:
        places = (number.to(tl.int64) * KV_HEADS + head) * BLOCK_M + m
        tl.store(part + (places * V_DIM)[:, None] + e[None, :], sums, shown)
        tl.store(weight + places, tl.where(total == 0.0, -float("inf"), top + tl.log2(whole)), mine)


@triton.jit
def merge(
    out, part, weight, merges,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The parts of one tile and one KV head, in order; a tile in one piece has its answer already."""
    head = tl.program_id(0) % KV_HEADS
    record = merges + tl.program_id(0) // KV_HEADS * 4
    parts = tl.load(record + 3)
    if parts < 2:
        return
    token, count, number = tl.load(record), tl.load(record + 1), tl.load(record + 2)
    m, e = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_V)
    mine = m // GROUP < count
    shown = mine[:, None] & (e < V_DIM)[None, :]
    top = tl.full([BLOCK_M], LOW, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for at in range(parts):
        places = ((number.to(tl.int64) + at) * KV_HEADS + head) * BLOCK_M + m
        weights = tl.load(weight + places, mask=mine, other=-float("inf"))
        piece = tl.load(part + (places * V_DIM)[:, None] + e[None, :], mask=shown, other=0.0)
        higher = tl.maximum(top, weights)
        fade, share = tl.exp2(top - higher), tl.exp2(weights - higher)
        sums = sums * fade[:, None] + piece * share[:, None]
        total = total * fade + share
        top = higher
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    places = ((token.to(tl.int64) + m // GROUP) * (KV_HEADS * GROUP) + head * GROUP + m % GROUP) * V_DIM
    tl.store(out + places[:, None] + e[None, :], sums.to(out.dtype.element_ty), shown)


@triton.jit(do_not_specialize=["tokens"])
def write(
    new_keys, new_values, keys, values, slots, tokens, k_token, k_head, v_token, v_head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """K and V of ``BLOCK_R`` heads of tokens, token after token, into the tokens' slots."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = row // KV_HEADS, row % KV_HEADS
    here = token < tokens
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    k_mask, v_mask = here[:, None] & (d < DIM)[None, :], here[:, None] & (e < V_DIM)[None, :]
    k = tl.load(new_keys + (token * k_token + head * k_head)[:, None] + d[None, :], mask=k_mask)
    v = tl.load(new_values + (token * v_token + head * v_head)[:, None] + e[None, :], mask=v_mask)
    if FP8:
        k, v = _to_fp8(k.to(tl.float32)), _to_fp8(v.to(tl.float32))
    place = tl.load(slots + token, mask=here, other=0) * KV_HEADS + head
    tl.store(keys + (place * DIM)[:, None] + d[None, :], k, k_mask)
    tl.store(values + (place * V_DIM)[:, None] + e[None, :], v, v_mask)


@triton.jit
def _product(a, b, sums, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """``sums + a @ b``. WIDEN: in float32, since the interpreter takes the bits of bfloat16 for whole numbers."""
    if WIDEN:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def _tanh(x):
    """Without infinities on the way."""
    shrink = tl.exp2(tl.abs(x) * -2.8853900817779268)  # exp(-2 |x|)
    size = (1.0 - shrink) / (1.0 + shrink)
    return tl.where(x < 0, -size, size)


@triton.jit
def _from_fp8(bits, dtype: tl.constexpr):
    """Numbers of e4m3 (``float8_e4m3fn``) from their bits. By hand, since GPUs before sm_89 cannot: seven bits, moved
    to where float16 has exponent and mantissa, are 2**8 too small."""
    wide = bits.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    half = tl.where((wide & 0x7F) == 0x7F, float("nan"), half * 256.0)
    return half.to(dtype)


@triton.jit
def _to_fp8(x):
    """Bits of the nearest number of e4m3 (of two equally near, the even one); what is beyond ±448 becomes ±448."""
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    size = tl.minimum(tl.abs(x), 448.0)
    bits = size.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960  # 8 times the difference of the exponents' biases
    # 16384's last bit is worth the smallest number of e4m3.
    small = (size + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, small, normal) | sign
    return tl.where(x == x, code, 0x7F).to(tl.uint8)
