"""Kernels that choose a token per row: statistics of each block of columns, then one program per row."""

from __future__ import annotations

import triton
import triton.language as tl

from lamella.model_executor.sampling.device.row_order import (
    NO_INDEX,
    key_at_least,
    key_value,
    kth_of_maxima,
    load_block,
    load_maxima,
    measure,
    nth_in_range,
    order_key,
    search,
)

# Parameters of a row: float64 [NUM_PARAMETERS, S].
TEMPERATURE = tl.constexpr(0)  # 0: greedy
TOP_K = tl.constexpr(1)  # 0: off
TOP_P = tl.constexpr(2)  # 1: off
LOG_MIN_P = tl.constexpr(3)  # log of the least weight that is kept
IS_FILTERED = tl.constexpr(4)
UNIFORM = tl.constexpr(5)
NUM_PARAMETERS = 6


@triton.jit
def block_weights(values, largest, inverse_temperature):
    """float32 weights of a block's tokens relative to the value `largest`."""
    base = tl.where(largest == float("-inf"), 0.0, largest)
    return tl.exp((values - base) * inverse_temperature)


@triton.jit
def first_above(cumulative, weights, target, places):
    """The first place whose cumulative sum exceeds the target, never one without weight: the last one that has some
    where rounding puts the target at the total."""
    has_weight = weights > 0.0
    first = tl.min(tl.where((cumulative > target) & has_weight, places, NO_INDEX), 0)
    last = tl.max(tl.where(has_weight, places, 0), 0)
    return tl.where(first == NO_INDEX, last, first)


@triton.jit
def block_statistics_kernel(
    logits,
    rows,
    parameters,
    maxima,
    first_ids,
    masses,
    row_stride,
    vocab_size,
    num_blocks,
    num_rows,
    HAS_DRAWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (i, block): of row rows[i], the block's largest key, its lowest id, and its mass relative to the block's
    own maximum where the row is drawn from without filters. Without HAS_DRAWS no masses."""
    index = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row = logits + tl.load(rows + index) * row_stride
    columns, values = load_block(row, block, vocab_size, BLOCK)
    keys = order_key(values)
    largest = tl.max(keys, 0)
    place = index * num_blocks + block
    tl.store(maxima + place, largest)
    tl.store(first_ids + place, tl.min(tl.where(keys == largest, columns, NO_INDEX), 0))
    if HAS_DRAWS:
        temperature = tl.load(parameters + TEMPERATURE * num_rows + index)
        is_filtered = tl.load(parameters + IS_FILTERED * num_rows + index)
        if (temperature > 0.0) & (is_filtered == 0.0):
            weights = block_weights(values, key_value(largest), (1.0 / temperature).to(tl.float32))
            tl.store(masses + place, tl.sum(weights.to(tl.float64), 0))


@triton.jit
def draw_unfiltered(
    row, row_masses, blocks, block_maxima, best, temperature, uniform, vocab_size, num_blocks, BLOCK: tl.constexpr
):
    """Id of a token. In order of id: first the block, then the token in it."""
    masses = tl.load(row_masses + blocks, mask=blocks < num_blocks, other=0.0)
    below_best = key_value(block_maxima.to(tl.int32)).to(tl.float64) - best.to(tl.float64)
    masses = masses * tl.exp(below_best / temperature)
    masses = tl.where(masses > 0.0, masses, 0.0)  # there is NaN beyond the last block
    cumulative = tl.cumsum(masses, 0)
    target = uniform * tl.max(cumulative, 0)
    block = first_above(cumulative, masses, target, blocks)
    before = tl.sum(tl.where(blocks == block - 1, cumulative, 0.0), 0)
    share = (target - before) / tl.sum(tl.where(blocks == block, masses, 0.0), 0)

    columns, values = load_block(row, block, vocab_size, BLOCK)
    weights = block_weights(values, tl.max(values, 0), (1.0 / temperature).to(tl.float32)).to(tl.float64)
    cumulative = tl.cumsum(weights, 0)
    return first_above(cumulative, weights, share * tl.max(cumulative, 0), columns)


@triton.jit
def draw_filtered(
    row,
    row_maxima,
    scratch,
    block_maxima,
    best_key,
    best,
    temperature,
    top_k,
    top_p,
    log_min_p,
    uniform,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Id of a token. Most likely first.

    The filters keep `kept_count` tokens of mass `kept_mass`, all with keys of at least `low`. `num_low` tokens of mass
    `mass_low` have such keys; there are more of them than are kept only where several logits equal that of the last
    token kept.
    """
    inverse_temperature = (1.0 / temperature).to(tl.float32)
    widest = best.to(tl.float64)
    low = key_at_least(widest + temperature * log_min_p)
    if (top_k > 0) & (top_k <= num_blocks):
        low = tl.maximum(low, kth_of_maxima(block_maxima, best_key, top_k))
    num_low, mass_low, low, _ = measure(
        row, row_maxima, low, low, best, inverse_temperature, vocab_size, num_blocks, BLOCK
    )
    kept_count = num_low
    kept_mass = mass_low

    if (top_k > 0) & (top_k < num_low):
        low, _, num_low, mass_low, num_high, mass_high = search(
            row, row_maxima, scratch, low, num_low, mass_low, top_k, best_key, best, inverse_temperature, vocab_size,
            num_blocks, False, False, BLOCK,
        )  # fmt: skip
        weight = (mass_low - mass_high) / (num_low - num_high).to(tl.float64)
        kept_count = top_k
        kept_mass = mass_high + weight * (top_k - num_high).to(tl.float64)

    if top_p < 1.0:
        # Tokens below this weigh less than what is dropped, even all together.
        dropped = (1.0 - top_p) * kept_mass / vocab_size
        low = tl.maximum(low, key_at_least(widest + temperature * (tl.log(dropped) - 0.01)))
        num_low, mass_low, low, _ = measure(
            row, row_maxima, low, low, best, inverse_temperature, vocab_size, num_blocks, BLOCK
        )
        enough = top_p * kept_mass
        low, _, num_low, mass_low, num_high, mass_high = search(
            row, row_maxima, scratch, low, num_low, mass_low, enough, best_key, best, inverse_temperature, vocab_size,
            num_blocks, True, False, BLOCK,
        )  # fmt: skip
        weight = (mass_low - mass_high) / (num_low - num_high).to(tl.float64)
        num_more = tl.ceil((enough - mass_high) / weight).to(tl.int64)
        num_more = tl.minimum(tl.maximum(num_more, 1), num_low - num_high)
        kept_count = tl.minimum(kept_count, num_high + num_more)
        kept_mass = mass_high + weight * (kept_count - num_high).to(tl.float64)

    target = uniform * kept_mass
    low, high, num_low, mass_low, num_high, mass_high = search(
        row, row_maxima, scratch, low, num_low, mass_low, target, best_key, best, inverse_temperature, vocab_size,
        num_blocks, True, True, BLOCK,
    )  # fmt: skip
    weight = (mass_low - mass_high) / (num_low - num_high).to(tl.float64)
    n = tl.floor((target - mass_high) / weight).to(tl.int64)
    n = tl.minimum(n, tl.minimum(num_low, kept_count) - num_high - 1)
    return nth_in_range(row, row_maxima, low, high, tl.maximum(n, 0), vocab_size, num_blocks, BLOCK)


@triton.jit
def choose_kernel(
    logits,
    parameters,
    maxima,
    first_ids,
    masses,
    scratch,
    best_logits,
    token_ids,
    row_stride,
    vocab_size,
    num_blocks,
    num_rows,
    HAS_DRAWS: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i: the token of row i, and its largest logit. From `block_statistics_kernel` of the same rows."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * row_stride
    row_maxima = maxima + index * num_blocks
    blocks, block_maxima = load_maxima(row_maxima, num_blocks, BLOCKS_PADDED)
    best_key = tl.max(block_maxima, 0)
    best = key_value(best_key.to(tl.int32))
    ids = tl.load(first_ids + index * num_blocks + blocks, mask=blocks < num_blocks, other=NO_INDEX)
    token = tl.min(tl.where(block_maxima == best_key, ids, NO_INDEX), 0)
    tl.store(best_logits + index, best)
    if HAS_DRAWS:
        temperature = tl.load(parameters + TEMPERATURE * num_rows + index)
        if (temperature > 0.0) & (tl.abs(best) < float("inf")):
            uniform = tl.load(parameters + UNIFORM * num_rows + index)
            if tl.load(parameters + IS_FILTERED * num_rows + index) != 0.0:
                top_k = tl.load(parameters + TOP_K * num_rows + index).to(tl.int64)
                top_p = tl.load(parameters + TOP_P * num_rows + index)
                log_min_p = tl.load(parameters + LOG_MIN_P * num_rows + index)
                token = draw_filtered(
                    row, row_maxima, scratch + index * BLOCK, block_maxima, best_key, best, temperature, top_k, top_p,
                    log_min_p, uniform, vocab_size, num_blocks, BLOCK,
                )  # fmt: skip
            else:
                row_masses = masses + index * num_blocks
                token = draw_unfiltered(
                    row, row_masses, blocks, block_maxima, best, temperature, uniform, vocab_size, num_blocks, BLOCK
                )
    tl.store(token_ids + index, token.to(tl.int64))
