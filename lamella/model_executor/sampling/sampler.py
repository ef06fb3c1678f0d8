"""From logits to one token per row.

A row's token depends on its own logits, parameters, seed and draw index, on nothing else: each row's
arithmetic has the same shape and order whatever its neighbours are. All filters (top_k, top_p, min_p)
keep a beginning of one order, most likely first and lower id first among equals, so that a filtered row
is a handful of columns. Those are found through the maxima of blocks of columns, which the greedy choice
needs anyhow: reducing blocks is several times faster than `argmax` on a CPU, and the k largest values
lie in the k blocks with the largest maxima. No row is ever sorted whole unless its filter keeps it whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from lamella.errors import InvariantError, LamellaError
from lamella.model_executor.sampling.logit_edits import edit_whole_rows, edited, whole_rows, without_rows
from lamella.model_executor.step_plan import SamplingBatch, StepResult, TokenLogprobs

_BLOCK_COLUMNS = 256
_COPY_COLUMNS = 4096  # a strided copy of this many columns stays in a core's cache
_COPY_ROWS = 16  # rows copied out at once: one cache line of a column-major float32 matrix
_FIRST_CANDIDATES = 64
_CANDIDATES_GROWTH = 8
_SMALLEST_WEIGHT = np.nextafter(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens that may be drawn, most likely first, lower id first among equals."""

    token_ids: np.ndarray  # int64 [n], n >= 1
    weights: np.ndarray  # float64 [n], exp((logit - largest logit) / temperature), all above 0

    @property
    def probabilities(self) -> np.ndarray:
        """float64 [n], sum 1."""
        return self.weights / self.weights.sum()


class Sampler:
    """Chooses tokens on the host. It keeps no state between calls."""

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> StepResult:
        """Choose a token per row.

        logits: float32 [S, vocab] on any device, row- or column-major; entries that are edited are
        overwritten during the call and put back. Row i follows entry i of `batch`.

        First the row's logits are edited, in the order masks, bans, biases, the request's own functions,
        penalties (`logit_edits`).
        Greedy rows (temperature 0) then take the largest logit, the lowest id among equals. For the others
        logits are divided by the temperature, then min_p drops tokens less likely than min_p times the
        most likely one, then top_k keeps exactly k, then top_p keeps the fewest whose share of what is
        left reaches top_p; one uniform number picks from what is kept. Log-probabilities are those of
        the logits as given, before edits, temperature and filters.

        A row whose largest logit is NaN or infinite (the model's output is unusable, or every token of the
        row is banned), or whose own functions fail, is in the result's `unusable`, and the others are what they are
        without it.
        """
        num_rows = len(batch.temperature)
        if logits.dim() != 2 or logits.shape[0] != num_rows:
            raise InvariantError(f"logits of shape {list(logits.shape)} for {num_rows} rows; give [{num_rows}, vocab]")
        if num_rows == 0:
            return StepResult(token_ids=np.empty(0, dtype=np.int64), logprobs={})
        if batch.masks or batch.processors:
            token_ids, best_logits, problems = _choose_with_whole_rows(logits, batch)
        else:
            (token_ids, best_logits), problems = _choose_edited(logits, batch), {}
        unusable = unusable_rows(best_logits) | problems
        asking = np.flatnonzero((batch.num_logprobs >= 0) & np.isfinite(best_logits))
        logprobs = _logprobs(logits, token_ids, batch.num_logprobs, asking)
        return StepResult(token_ids=token_ids, logprobs=logprobs, unusable=unusable)

    @torch.inference_mode()
    def score(self, logits: torch.Tensor, token_ids: np.ndarray, num_logprobs: np.ndarray) -> list[TokenLogprobs]:
        """Log-probabilities of a given token (token_ids: int64 [S]) per row of logits (as above), with those of the
        num_logprobs (int64 [S]) most likely ones. A row that has a NaN gives NaN."""
        found = _logprobs(logits, token_ids, num_logprobs, np.arange(len(token_ids)))
        return [found[row] for row in range(len(token_ids))]


def _choose_edited(logits: torch.Tensor, batch: SamplingBatch) -> tuple[np.ndarray, np.ndarray]:
    """Each row's token int64 [S] and largest logit float32 [S], with the edits of single entries."""
    with edited(logits, batch):
        return _choose(logits, batch)


def _choose_with_whole_rows(
    logits: torch.Tensor, batch: SamplingBatch
) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """The same where some rows have masks or functions; and why rows failed."""
    rows = whole_rows(batch)
    num_rows = len(batch.temperature)
    token_ids, best_logits = np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.float32)
    if len(rows) < num_rows:
        token_ids, best_logits = _choose_edited(logits, without_rows(batch, rows))
    problems: dict[int, str] = {}
    for start in range(0, len(rows), _COPY_ROWS):
        part = rows[start : start + _COPY_ROWS]
        copied, batch_part = _copy_rows(logits, part), batch.part(part)
        problems |= {int(part[place]): problem for place, problem in edit_whole_rows(copied, batch_part).items()}
        token_ids[part], best_logits[part] = _choose(copied, batch_part)
    return token_ids, best_logits, problems


def _choose(logits: torch.Tensor, batch: SamplingBatch) -> tuple[np.ndarray, np.ndarray]:
    """Each row's token int64 [S] and largest logit float32 [S], of logits as they are."""
    maxima = _block_maxima(logits)
    token_ids, best_logits = _largest_of_blocks(logits, maxima)
    sampled_rows = np.flatnonzero((batch.temperature > 0) & np.isfinite(best_logits))
    if len(sampled_rows):
        token_ids = token_ids.copy()
        token_ids[sampled_rows] = _draw_rows(logits, maxima, best_logits, batch, sampled_rows)
    return token_ids, best_logits


def uniform(seed: int, draw_index: int) -> float:
    """The number in [0, 1) that decides draw `draw_index` of `seed`: 53 bits of Philox4x64-10 with the
    seed as key and the index as counter, so that any draw can be made alone and in any order."""
    bits = np.random.Philox(key=int(seed), counter=int(draw_index)).random_raw()
    return float(int(bits) >> 11) * 2.0**-53


def kept_tokens(
    row: torch.Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> KeptTokens:
    """What the filters leave of one row of logits (float32 [vocab]) at a temperature above 0."""
    logits = row.unsqueeze(0)
    maxima = _block_maxima(logits)
    _, best_logits = _largest_of_blocks(logits, maxima)
    for problem in unusable_rows(best_logits).values():
        raise LamellaError(problem)
    best_logit = float(best_logits[0])
    top_k = top_k if 0 < top_k < len(row) else 0
    mass = _row_mass(row.contiguous(), best_logit, temperature) if _needs_row_mass(top_k, top_p, min_p) else None
    return _filter(row, maxima[0].cpu().numpy(), best_logit, temperature, top_k, top_p, min_p, mass)


def _block_maxima(logits: torch.Tensor) -> torch.Tensor:
    """Largest logit of each block of columns: [S, num_blocks]; a NaN makes its block's maximum NaN."""
    # The reduction runs at memory speed only when its output has the layout of its input.
    column_major = logits.stride(1) > logits.stride(0)
    matrix, columns = (logits.t(), 0) if column_major else (logits, 1)
    num_whole = logits.shape[1] // _BLOCK_COLUMNS
    whole = matrix.narrow(columns, 0, num_whole * _BLOCK_COLUMNS)
    rest = matrix.narrow(columns, whole.shape[columns], logits.shape[1] - whole.shape[columns])
    parts = []
    if num_whole:
        parts.append(whole.unflatten(columns, (num_whole, _BLOCK_COLUMNS)).amax(columns + 1))
    if rest.shape[columns]:
        parts.append(rest.amax(columns, keepdim=True))
    maxima = torch.cat(parts, columns)
    return maxima.t().contiguous() if column_major else maxima


def _largest_of_blocks(logits: torch.Tensor, maxima: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Each row's argmax (the lowest id among equals) int64 [S] and its logit float32 [S]."""
    first = maxima.argmax(1, keepdim=True) * _BLOCK_COLUMNS  # [S, 1]; argmax takes the first of equals
    columns = first + torch.arange(_BLOCK_COLUMNS, device=logits.device)
    # Repeats of the last column come after it, so they are never the first of equals.
    columns.clamp_(max=logits.shape[1] - 1)
    block = logits.gather(1, columns)
    within = block.argmax(1, keepdim=True)
    return (
        columns.gather(1, within).squeeze(1).cpu().numpy(),
        block.gather(1, within).squeeze(1).cpu().numpy(),
    )


def unusable_rows(best_logits: np.ndarray, rows: np.ndarray | None = None) -> dict[int, str]:
    """Rows whose largest logit is NaN or infinite -> the reason to give. rows: the rows' numbers, where they do not
    just count up from 0."""
    problems = {}
    for place in np.flatnonzero(~np.isfinite(best_logits)).tolist():
        problems[place if rows is None else int(rows[place])] = (
            f"the largest logit is {best_logits[place]}, so no token can be chosen; a NaN or +inf comes from the "
            "model's weights or dtype, -inf from banning every token"
        )
    return problems


def _needs_row_mass(top_k: int, top_p: float, min_p: float) -> bool:
    """Whether top_p is a share of the whole row's mass, which the largest columns alone do not tell."""
    return top_p < 1.0 and top_k == 0 and min_p == 0.0


def _draw_rows(
    logits: torch.Tensor, maxima: torch.Tensor, best_logits: np.ndarray, batch: SamplingBatch, rows: np.ndarray
) -> np.ndarray:
    """Draw a token for each of `rows` (int64 [n], ascending): int64 [n]."""
    vocab_size = logits.shape[1]
    maxima_host = maxima.cpu().numpy()
    token_ids = np.empty(len(rows), dtype=np.int64)
    whole: list[int] = []  # indices into `rows` of the rows that need all their columns
    for place, row in enumerate(rows):
        top_k, top_p, min_p = _filters_of(batch, row, vocab_size)
        if _needs_row_mass(top_k, top_p, min_p) or (top_k, top_p, min_p) == (0, 1.0, 0.0):
            whole.append(place)
            continue
        kept = _filter(
            logits[row], maxima_host[row], float(best_logits[row]), float(batch.temperature[row]), top_k, top_p, min_p
        )
        token_ids[place] = _draw_kept(kept, uniform(batch.seeds[row], batch.draw_index[row]))
    for start in range(0, len(whole), _COPY_ROWS):
        places = whole[start : start + _COPY_ROWS]
        for place, values in zip(places, _copy_rows(logits, rows[places]), strict=True):
            row = rows[place]
            best_logit, temperature = float(best_logits[row]), float(batch.temperature[row])
            number = uniform(batch.seeds[row], batch.draw_index[row])
            top_p = float(batch.top_p[row])
            if top_p < 1.0:
                mass = _row_mass(values, best_logit, temperature)
                kept = _filter(values, maxima_host[row], best_logit, temperature, 0, top_p, 0.0, mass)
                token_ids[place] = _draw_kept(kept, number)
            else:
                token_ids[place] = _draw_whole(values, best_logit, temperature, number)
    return token_ids


def _filters_of(batch: SamplingBatch, row: int, vocab_size: int) -> tuple[int, float, float]:
    """top_k (0 is off), top_p, min_p."""
    top_k = int(batch.top_k[row])
    return (top_k if 0 < top_k < vocab_size else 0), float(batch.top_p[row]), float(batch.min_p[row])


def _copy_rows(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """The given rows, contiguous: [n, vocab]."""
    index = torch.from_numpy(rows).to(logits.device)
    if logits.stride(1) == 1:
        return logits.index_select(0, index)
    copied = logits.new_empty(len(rows), logits.shape[1])
    for start in range(0, logits.shape[1], _COPY_COLUMNS):
        part = logits[:, start : start + _COPY_COLUMNS]
        copied[:, start : start + _COPY_COLUMNS].copy_(part.index_select(0, index))
    return copied


def _most_likely(row: torch.Tensor, maxima: np.ndarray, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """The beginning of the row's order, at least `num_tokens` long: ids int64 [n], logits float64 [n].

    row: float32 [vocab]; maxima: its block maxima on the host.
    """
    vocab_size = row.shape[0]
    num_blocks = len(maxima)
    if num_tokens >= vocab_size:
        token_ids = np.arange(vocab_size)
        threshold = -np.inf
    elif num_tokens <= num_blocks:
        # At least num_tokens values are as large as the num_tokens-th largest maximum, namely the maxima down to it.
        threshold = np.partition(maxima, num_blocks - num_tokens)[num_blocks - num_tokens]
        blocks = np.flatnonzero(maxima >= threshold)
        token_ids = (blocks[:, None] * _BLOCK_COLUMNS + np.arange(_BLOCK_COLUMNS)).ravel()
        token_ids = token_ids[token_ids < vocab_size]
    else:
        row = row.contiguous()
        threshold = row.topk(num_tokens).values[-1].item()
        token_ids = (row >= threshold).nonzero().squeeze(1).cpu().numpy()
    logits = row[torch.from_numpy(token_ids).to(row.device)].cpu().numpy()
    reaching = logits >= threshold
    token_ids, logits = token_ids[reaching], logits[reaching]
    order = np.argsort(-logits, kind="stable")  # ids ascend, so a stable sort leaves equals in their order
    return token_ids[order], logits[order].astype(np.float64)


def draw_from_top(token_ids: np.ndarray, logits: np.ndarray, batch: SamplingBatch, row: int) -> int:
    """Draw for a row whose top_k is on, from the beginning of its order: ids int64 [n], logits float32 [n], n >= top_k
    unless the vocabulary is smaller."""
    limit = int(batch.top_k[row])
    values = logits[:limit].astype(np.float64)
    weights = np.exp((values - values[0]) / float(batch.temperature[row]))
    num_kept = int(np.count_nonzero(weights >= max(float(batch.min_p[row]), _SMALLEST_WEIGHT)))
    top_p = float(batch.top_p[row])
    if top_p < 1.0:
        cumulative = np.cumsum(weights[:num_kept])
        num_kept = int(np.searchsorted(cumulative, top_p * cumulative[-1], side="left")) + 1
    kept = KeptTokens(token_ids=token_ids[:num_kept], weights=weights[:num_kept])
    return _draw_kept(kept, uniform(batch.seeds[row], batch.draw_index[row]))


def _filter(
    row: torch.Tensor,
    maxima: np.ndarray,
    best_logit: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    row_mass: float | None = None,
) -> KeptTokens:
    """Apply min_p, top_k and top_p. row_mass: sum of all the row's weights, if top_p is a share of it."""
    vocab_size = row.shape[0]
    limit = top_k if 0 < top_k < vocab_size else vocab_size
    num_candidates = limit if limit < vocab_size else min(limit, _FIRST_CANDIDATES)
    floor = max(min_p, _SMALLEST_WEIGHT)  # a token whose weight underflows to 0 cannot be drawn
    while True:
        token_ids, logits = _most_likely(row, maxima, num_candidates)
        weights = np.exp((logits[:limit] - best_logit) / temperature)
        num_kept = int(np.count_nonzero(weights >= floor))
        complete = num_kept < len(weights) or len(weights) == limit
        if complete or row_mass is not None:
            cumulative = np.cumsum(weights[:num_kept])
            enough = top_p * (cumulative[-1] if row_mass is None else row_mass)
            if top_p < 1.0 and cumulative[-1] >= enough:
                num_kept = int(np.searchsorted(cumulative, enough, side="left")) + 1
                complete = True
        if complete:
            return KeptTokens(token_ids=token_ids[:num_kept], weights=weights[:num_kept])
        num_candidates = min(limit, num_candidates * _CANDIDATES_GROWTH)


def _block_weights(row: torch.Tensor, best_logit: float, temperature: float, dtype: torch.dtype) -> torch.Tensor:
    """exp((logit - best_logit) / temperature) of a contiguous row, by block, the last one padded with
    zeros: [num_blocks, _BLOCK_COLUMNS]."""
    num_blocks = -(-row.shape[0] // _BLOCK_COLUMNS)
    padded = row.new_zeros(num_blocks * _BLOCK_COLUMNS, dtype=dtype)
    weights = padded[: row.shape[0]]
    weights.copy_(row).sub_(best_logit).div_(temperature).exp_()
    return padded.view(num_blocks, _BLOCK_COLUMNS)


def _block_masses(weights: torch.Tensor) -> np.ndarray:
    """float64 [num_blocks]. Summing by block fixes the order, which a sum over all would leave to the threads."""
    return weights.sum(1, dtype=torch.float64).cpu().numpy()


def _row_mass(row: torch.Tensor, best_logit: float, temperature: float) -> float:
    return float(_block_masses(_block_weights(row, best_logit, temperature, torch.float64)).sum())


def _draw_kept(kept: KeptTokens, number: float) -> int:
    cumulative = np.cumsum(kept.weights)
    return int(kept.token_ids[_pick(cumulative, number * cumulative[-1])])


def _draw_whole(row: torch.Tensor, best_logit: float, temperature: float, number: float) -> int:
    """Draw from all tokens of a contiguous row, in order of id: first the block, then the token in it."""
    weights = _block_weights(row, best_logit, temperature, torch.float32)
    block_ends = np.cumsum(_block_masses(weights))
    target = number * block_ends[-1]
    block = _pick(block_ends, target)
    before = block_ends[block - 1] if block else 0.0
    ends = np.cumsum(weights[block].cpu().numpy().astype(np.float64))
    return block * _BLOCK_COLUMNS + _pick(ends, target - before)


def _pick(cumulative: np.ndarray, target: float) -> int:
    """The first entry whose cumulative sum exceeds `target`: never one of weight 0.

    Rounding can put the target at the total; then it is the last entry that has weight.
    """
    index = int(np.searchsorted(cumulative, target, side="right"))
    return min(index, int(np.searchsorted(cumulative, cumulative[-1], side="left")))


def _logprobs(
    logits: torch.Tensor, token_ids: np.ndarray, num_logprobs: np.ndarray, asking: np.ndarray
) -> dict[int, TokenLogprobs]:
    """Log-probabilities of the rows `asking` (int64), by row."""
    results: dict[int, TokenLogprobs] = {}
    for start in range(0, len(asking), _COPY_ROWS):
        rows = asking[start : start + _COPY_ROWS]
        for row, values in zip(rows, _copy_rows(logits, rows), strict=True):
            results[int(row)] = _row_logprobs(values, int(token_ids[row]), int(num_logprobs[row]))
    return results


def _row_logprobs(row: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    maxima = _block_maxima(row.unsqueeze(0))[0].cpu().numpy()
    best_logit = float(maxima.max())
    log_total = best_logit + float(np.log(_row_mass(row, best_logit, 1.0)))
    logit = row[token_id]
    top_ids, top_logits = _most_likely(row, maxima, num_top) if num_top else (np.empty(0, np.int64), np.empty(0))
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logit) - log_total,
        rank=1 + int((row > logit).sum()),
        top_ids=top_ids[:num_top],
        top_logprobs=(top_logits[:num_top] - log_total).astype(np.float32),
    )
