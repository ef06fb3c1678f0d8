"""Kernel for the log-probabilities of the rows that ask for them."""

from __future__ import annotations

import triton
import triton.language as tl

from lamella.model_executor.sampling.device.row_order import (
    MINUS_INFINITY_KEY,
    key_value,
    kth_of_maxima,
    load_block,
    load_maxima,
    measure,
    order_key,
    search,
)


@triton.jit
def logprobs_kernel(
    logits,
    rows,
    token_ids,
    num_tops,
    maxima,
    masses,
    scratch,
    log_totals,
    token_logits,
    ranks,
    top_ids,
    top_logits,
    row_stride,
    vocab_size,
    num_blocks,
    top_stride,
    BLOCKS_PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program i: of row rows[i], log of the sum of exp(logit), the logit and the rank of its token, and its num_tops[i]
    largest logits in order of id. From `block_statistics_kernel` of the same rows at temperature 1."""
    index = tl.program_id(0).to(tl.int64)
    place = tl.load(rows + index)
    row = logits + place * row_stride
    row_maxima = maxima + index * num_blocks
    blocks, block_maxima = load_maxima(row_maxima, num_blocks, BLOCKS_PADDED)
    best_key = tl.max(block_maxima, 0)
    best = key_value(best_key.to(tl.int32))
    row_masses = tl.load(masses + index * num_blocks + blocks, mask=blocks < num_blocks, other=0.0)
    row_masses = row_masses * tl.exp(key_value(block_maxima.to(tl.int32)).to(tl.float64) - best.to(tl.float64))
    total = tl.sum(tl.where(blocks < num_blocks, row_masses, 0.0), 0)
    tl.store(log_totals + index, tl.log(total) + best.to(tl.float64))

    logit = tl.load(row + tl.load(token_ids + place)).to(tl.float32)
    above = order_key(logit).to(tl.int64) + 1
    num_above, _mass_above, _lowest, _highest = measure(
        row, row_maxima, above, above, best, 1.0, vocab_size, num_blocks, BLOCK
    )
    tl.store(token_logits + index, logit)
    tl.store(ranks + index, num_above + 1)

    num_top = tl.load(num_tops + index)
    if num_top > 0:
        low = best_key * 0 + MINUS_INFINITY_KEY
        if num_top <= num_blocks:
            low = kth_of_maxima(block_maxima, best_key, num_top)
        num_low, mass_low, low, _highest = measure(row, row_maxima, low, low, best, 1.0, vocab_size, num_blocks, BLOCK)
        low, high, _num_low, _mass_low, num_high, _mass_high = search(
            row, row_maxima, scratch + index * BLOCK, low, num_low, mass_low, num_top, best_key, best, 1.0, vocab_size,
            num_blocks, False, False, BLOCK,
        )  # fmt: skip
        # So many of the tokens in [low, high) are among the top: those with the lowest ids.
        num_equal = num_top - num_high
        num_written = num_top * 0
        for block in range(num_blocks):
            if tl.load(row_maxima + block) >= low:
                columns, values = load_block(row, block, vocab_size, BLOCK)
                keys = order_key(values)
                is_equal = ((keys >= low) & (keys < high) & (columns < vocab_size)).to(tl.int32)
                is_top = (keys >= high) | ((is_equal == 1) & (tl.cumsum(is_equal, 0) <= num_equal))
                places = num_written + tl.cumsum(is_top.to(tl.int32), 0) - 1
                is_top = is_top & (places < num_top)
                tl.store(top_ids + index * top_stride + places, columns.to(tl.int64), mask=is_top)
                tl.store(top_logits + index * top_stride + places, values, mask=is_top)
                num_equal -= tl.sum(is_equal, 0)
                num_written += tl.sum(is_top.to(tl.int32), 0)
