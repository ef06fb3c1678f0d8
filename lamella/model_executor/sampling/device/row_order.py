"""The order of a row's tokens, as Triton functions: largest logit first, lower id first among equals.

Every filter keeps a beginning of that order, so a filter is a place in it: where a count (top_k) or a mass (top_p, the
draw itself) is reached. `search` finds it by bisection over the logits' bits, read as integers of the same order. Each
step counts and sums what lies above a value, block by block, without the blocks that lie wholly below the range in
question; then the range shrinks to logits that occur, so that many equal ones cost no more steps. When no more than a
block's worth of tokens are in question, these are gathered and the row is not read again. No row is sorted, and nothing
depends on how many rows there are.

Weights exp((logit - largest) / temperature) are float32, their sums float64 in an order that is fixed: lane by lane
over the blocks, then the lanes. So a sum over more tokens is never smaller, and rounding cannot lead bisection astray.
"""

from __future__ import annotations

import triton
import triton.language as tl

NO_INDEX = tl.constexpr(2**31 - 1)
LOWEST = tl.constexpr(-(2**31))
WITHOUT_SIGN = tl.constexpr(2**31 - 1)
NAN_KEY = tl.constexpr(2**31 - 2)  # above the key of +inf, and still below the largest int32
MINUS_INFINITY_KEY = tl.constexpr(-2139095041)
NUM_VALUE_STEPS = tl.constexpr(12)
JUST_BELOW_ONE = tl.constexpr(1.0 - 2.0**-52)


@triton.jit
def order_key(values):
    """int32 in the order of float32 values: -0 equals 0, NaN is above all."""
    values = tl.where(values == 0.0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    keys = bits ^ ((bits >> 31) & WITHOUT_SIGN)
    return tl.where(values != values, NAN_KEY, keys)


@triton.jit
def key_value(key):
    """The float32 that belongs to an int32 key, which is not NAN_KEY."""
    bits = key ^ ((key >> 31) & WITHOUT_SIGN)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def key_at_least(bound):
    """int64: the lowest key whose value is at least `bound` (float64)."""
    rounded = bound.to(tl.float32)
    key = order_key(rounded).to(tl.int64)
    return tl.where(rounded.to(tl.float64) < bound, key + 1, key)


@triton.jit
def load_block(row, block, vocab_size, BLOCK: tl.constexpr):
    """(columns, float32 logits; -inf beyond the row, which ties with a logit -inf but has a higher column)."""
    columns = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(row + columns, mask=columns < vocab_size, other=float("-inf"))
    return columns, values.to(tl.float32)


@triton.jit
def load_maxima(row_maxima, num_blocks, BLOCKS_PADDED: tl.constexpr):
    """(blocks, int64 maxima; LOWEST beyond the last)."""
    blocks = tl.arange(0, BLOCKS_PADDED)
    return blocks, tl.load(row_maxima + blocks, mask=blocks < num_blocks, other=LOWEST).to(tl.int64)


@triton.jit
def measure(row, row_maxima, low, middle, best, inverse_temperature, vocab_size, num_blocks, BLOCK: tl.constexpr):
    """(count int64, mass float64, lowest key int64) of the row's tokens with keys from `middle` on, and the highest key
    int64 of those below, if one is at least `low`."""
    low_key = low.to(tl.int32)
    middle_key = middle.to(tl.int32)
    counts = tl.zeros([BLOCK], dtype=tl.int32)
    masses = tl.zeros([BLOCK], dtype=tl.float64)
    above = tl.full([BLOCK], NO_INDEX, dtype=tl.int32)
    below = tl.full([BLOCK], LOWEST, dtype=tl.int32)
    for block in range(num_blocks):
        if tl.load(row_maxima + block) >= low_key:
            columns, values = load_block(row, block, vocab_size, BLOCK)
            keys = order_key(values)
            reaches = (keys >= middle_key) & (columns < vocab_size)
            counts += reaches.to(tl.int32)
            weights = tl.exp((values - best) * inverse_temperature)
            masses += tl.where(reaches, weights, 0.0).to(tl.float64)
            above = tl.minimum(above, tl.where(reaches, keys, NO_INDEX))
            below = tl.maximum(below, tl.where(keys < middle_key, keys, LOWEST))
    lowest = tl.min(above, 0).to(tl.int64)
    highest = tl.max(below, 0).to(tl.int64)
    return tl.sum(counts, 0).to(tl.int64), tl.sum(masses, 0), lowest, highest


@triton.jit
def halve(low, high, step):
    """A key above `low` and below `high`."""
    # First halve by value: as many keys belong to values close to 0 as to all others, so halving keys would spend its
    # first steps there.
    halfway = key_value(low.to(tl.int32)) * 0.5 + key_value((high - 1).to(tl.int32)) * 0.5
    middle = tl.where(step < NUM_VALUE_STEPS, order_key(halfway).to(tl.int64), (low + high) >> 1)
    return tl.minimum(tl.maximum(middle, low + 1), high - 1)


@triton.jit
def gather_keys(row, row_maxima, low, high, scratch, vocab_size, num_blocks, BLOCK: tl.constexpr):
    """int32 [BLOCK]: keys of the row's tokens, at most BLOCK, that lie in [low, high); then LOWEST. scratch: int32
    [BLOCK] of this program's own."""
    lanes = tl.arange(0, BLOCK)
    tl.debug_barrier()  # all threads have read what was in scratch before
    num_found = tl.sum(tl.zeros([BLOCK], dtype=tl.int32), 0)
    for block in range(num_blocks):
        if tl.load(row_maxima + block) >= low:
            columns, values = load_block(row, block, vocab_size, BLOCK)
            keys = order_key(values)
            is_member = (keys >= low) & (keys < high) & (columns < vocab_size)
            places = num_found + tl.cumsum(is_member.to(tl.int32), 0) - 1
            tl.store(scratch + places, keys, mask=is_member & (places < BLOCK))
            num_found += tl.sum(is_member.to(tl.int32), 0)
    tl.debug_barrier()
    return tl.load(scratch + lanes, mask=lanes < num_found, other=LOWEST)


@triton.jit
def search(
    row,
    row_maxima,
    scratch,
    low,
    num_low,
    mass_low,
    target,
    best_key,
    best,
    inverse_temperature,
    vocab_size,
    num_blocks,
    BY_MASS: tl.constexpr,
    STRICTLY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Where the order's running count (BY_MASS: mass) first reaches `target` (STRICTLY: exceeds it).

    num_low, mass_low: of the tokens from key `low` on, which reach it (by mass, a target that rounding puts at the
    total is lowered); `low` is the key of one. Returns (low, high, num_low, mass_low, num_high, mass_high): the place
    is among the tokens with keys in [low, high), whose logits are equal; `num_high` tokens of mass `mass_high` come
    before them.
    """
    high = best_key + 1
    num_high = num_low * 0
    mass_high = mass_low * 0.0
    if BY_MASS:
        target = tl.minimum(target, mass_low * JUST_BELOW_ONE)
    step = 0
    while (high - low > 1) & (num_low - num_high > BLOCK):
        middle = halve(low, high, step)
        count, mass, lowest, highest = measure(
            row, row_maxima, low, middle, best, inverse_temperature, vocab_size, num_blocks, BLOCK
        )
        measured = mass if BY_MASS else count
        reached = measured > target if STRICTLY else measured >= target
        low = tl.where(reached, lowest, low)
        num_low = tl.where(reached, count, num_low)
        mass_low = tl.where(reached, mass, mass_low)
        high = tl.where(reached, high, highest + 1)
        num_high = tl.where(reached, num_high, count)
        mass_high = tl.where(reached, mass_high, mass)
        step += 1

    if (high - low > 1) & (num_low - num_high > 1):
        # So few tokens are left that they are gathered, and the row is not read again.
        keys = gather_keys(row, row_maxima, low, high, scratch, vocab_size, num_blocks, BLOCK)
        weights = tl.exp((key_value(keys) - best) * inverse_temperature).to(tl.float64)
        weights = tl.where(keys == LOWEST, 0.0, weights)
        num_before = num_high
        mass_before = mass_high
        mass_low = mass_before + tl.sum(weights, 0)
        if BY_MASS:
            target = tl.minimum(target, mass_low * JUST_BELOW_ONE)
        while (high - low > 1) & (num_low - num_high > 1):
            middle = halve(low, high, step)
            reaches = keys >= middle
            count = num_before + tl.sum(reaches.to(tl.int32), 0)
            mass = mass_before + tl.sum(tl.where(reaches, weights, 0.0), 0)
            measured = mass if BY_MASS else count
            reached = measured > target if STRICTLY else measured >= target
            lowest = tl.min(tl.where(reaches, keys, NO_INDEX), 0).to(tl.int64)
            highest = tl.max(tl.where(reaches, LOWEST, keys), 0).to(tl.int64)
            low = tl.where(reached, lowest, low)
            num_low = tl.where(reached, count, num_low)
            mass_low = tl.where(reached, mass, mass_low)
            high = tl.where(reached, high, highest + 1)
            num_high = tl.where(reached, num_high, count)
            mass_high = tl.where(reached, mass_high, mass)
            step += 1
    return low, high, num_low, mass_low, num_high, mass_high


@triton.jit
def kth_of_maxima(block_maxima, best_key, k):
    """The k-th largest of block maxima (int64 [n], padded with LOWEST): at least k tokens of the row reach it."""
    low = best_key * 0 + LOWEST
    high = best_key + 1
    while high - low > 1:
        middle = (low + high) >> 1
        reached = tl.sum((block_maxima >= middle).to(tl.int32), 0) >= k
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    return low


@triton.jit
def nth_in_range(row, row_maxima, low, high, n, vocab_size, num_blocks, BLOCK: tl.constexpr):
    """Id of the n-th token, from 0 and by id, of those with keys in [low, high)."""
    found = n.to(tl.int32) * 0
    before = n * 0
    for block in range(num_blocks):
        if tl.load(row_maxima + block) >= low:
            columns, values = load_block(row, block, vocab_size, BLOCK)
            keys = order_key(values)
            is_member = ((keys >= low) & (keys < high) & (columns < vocab_size)).to(tl.int32)
            places = before + tl.cumsum(is_member, 0) - 1
            found += tl.sum(tl.where((places == n) & (is_member == 1), columns, 0), 0)
            before += tl.sum(is_member, 0)
    return found
