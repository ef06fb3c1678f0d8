"""From logits to one token per row on a GPU: the same choice as `Sampler`'s, without the host waiting for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import triton

from lamella.attention.metadata import to_device
from lamella.errors import InvariantError
from lamella.model_executor.sampling.device.choose import (
    IS_FILTERED,
    LOG_MIN_P,
    NUM_PARAMETERS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    UNIFORM,
    block_statistics_kernel,
    choose_kernel,
)
from lamella.model_executor.sampling.device.logprobs import logprobs_kernel
from lamella.model_executor.sampling.logit_edits import LogitEdits, edit_whole_rows, whole_rows, without_rows
from lamella.model_executor.sampling.philox import uniforms
from lamella.model_executor.sampling.sampler import unusable_rows
from lamella.model_executor.step_plan import SamplingBatch, StepResult, TokenLogprobs

BLOCK_COLUMNS = 2048
# No fused multiply-adds: the same roundings from every version of the compiler.
LAUNCH_OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
_SMALLEST_WEIGHT = np.nextafter(0.0, 1.0)


@dataclass(frozen=True, slots=True)
class DeviceLogprobs:
    """Log-probabilities of the A rows that asked for some. Of row i the first num_tops[i] of top_ids and top_logits
    count, in order of id."""

    rows: np.ndarray  # int64 [A]
    num_tops: np.ndarray  # int64 [A]
    log_totals: torch.Tensor  # float64 [A]
    token_logits: torch.Tensor  # float64 [A]
    ranks: torch.Tensor  # int64 [A]
    top_ids: torch.Tensor  # int64 [A, k]
    top_logits: torch.Tensor  # float32 [A, k]


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """What a step sampled, or will have once the device gets there.

    token_ids: int64 [S] on the device, for what is put on its stream next; ids of the vocabulary even in a row whose
    logits are unusable, which only `result` can tell. The other tensors are the host's, to be read after `event`.
    """

    token_ids: torch.Tensor
    host_token_ids: torch.Tensor  # int64 [S]
    host_best_logits: torch.Tensor  # float32 [S]
    logprobs: DeviceLogprobs | None
    event: torch.cuda.Event | None
    problems: Mapping[int, str] = field(default_factory=dict)  # rows whose own functions failed, with the reason

    def result(self) -> StepResult:
        """Wait for the device. Rows whose largest logit is NaN or infinite are `unusable`."""
        if self.event is not None:
            self.event.synchronize()
        unusable = {**unusable_rows(self.host_best_logits.numpy()), **self.problems}
        token_ids = self.host_token_ids.numpy().copy()
        logprobs = _token_logprobs(self.logprobs, token_ids)
        for row in unusable:
            logprobs.pop(row, None)
        return StepResult(token_ids=token_ids, logprobs=logprobs, unusable=unusable)


class DeviceSampler:
    """Chooses tokens on the device. It keeps no state between calls. block_columns: how many columns a program reads at
    a time, a power of two."""

    def __init__(self, block_columns: int = BLOCK_COLUMNS) -> None:
        self.block_columns = block_columns

    @torch.inference_mode()
    def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> DeviceSample:
        """Choose a token per row, by the definitions of `Sampler`; returns before the device is done.

        logits: float32, float16 or bfloat16 [S, vocab]. Edited entries are overwritten and put back.
        Masses are sums of float32 weights, so that a uniform number within about 1e-6 of the border between two tokens
        can fall to either; log-probabilities are good to about 1e-6. A row's token depends on nothing but the row.
        """
        num_rows = len(batch.temperature)
        if logits.dim() != 2 or logits.shape[0] != num_rows:
            raise InvariantError(f"logits of shape {list(logits.shape)} for {num_rows} rows; give [{num_rows}, vocab]")
        device = logits.device
        if num_rows == 0:
            empty = torch.empty(0, dtype=torch.int64, device=device)
            return DeviceSample(empty, empty.cpu(), torch.empty(0), None, None)
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        if batch.masks or batch.processors:
            token_ids, best_logits, problems = self._choose_with_whole_rows(logits, batch)
        else:
            (token_ids, best_logits), problems = self._choose_edited(logits, batch), {}
        logprobs = self._logprobs(logits, token_ids, batch.num_logprobs)
        host_token_ids, host_best_logits = _to_host(token_ids), _to_host(best_logits)
        event = None
        if device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return DeviceSample(token_ids, host_token_ids, host_best_logits, logprobs, event, problems)

    @torch.inference_mode()
    def score(self, logits: torch.Tensor, token_ids: np.ndarray, num_logprobs: np.ndarray) -> list[TokenLogprobs]:
        """As Sampler.score; waits for the device."""
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        scored = self._logprobs(logits, to_device(token_ids, logits.device), num_logprobs)
        if logits.device.type == "cuda":
            torch.cuda.current_stream(logits.device).synchronize()
        found = _token_logprobs(scored, token_ids)
        return [found[row] for row in range(len(token_ids))]

    def _choose_edited(self, logits: torch.Tensor, batch: SamplingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """`choose`, logits with contiguous rows, with the edits of single entries."""
        edits = LogitEdits.of(batch)
        if edits is not None and logits.dtype != torch.float32:
            logits = logits.float()  # otherwise edited logits would be rounded to 16 bits
        if edits is None:
            return self.choose(logits, row_parameters(batch, logits.shape[1]))
        edits = edits.to(logits.device)
        saved = edits.apply(logits)
        chosen = self.choose(logits, row_parameters(batch, logits.shape[1]))
        edits.undo(logits, saved)
        return chosen

    def _choose_with_whole_rows(
        self, logits: torch.Tensor, batch: SamplingBatch
    ) -> tuple[torch.Tensor, torch.Tensor, dict[int, str]]:
        """The same where some rows have masks or functions; and why rows failed."""
        rows = whole_rows(batch)
        part, places = batch.part(rows), to_device(rows, logits.device)
        copied = logits.index_select(0, places).float()
        problems = {int(rows[place]): problem for place, problem in edit_whole_rows(copied, part).items()}
        token_ids, best_logits = self.choose(copied, row_parameters(part, logits.shape[1]))
        if len(rows) < len(batch.temperature):
            ids, values = self._choose_edited(logits, without_rows(batch, rows))
            token_ids, best_logits = ids.index_copy(0, places, token_ids), values.index_copy(0, places, best_logits)
        return token_ids, best_logits, problems

    def choose(self, logits: torch.Tensor, parameters: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids int64 [S] and largest logits float32 [S] of logits [S, vocab] as they are, their rows contiguous.

        parameters: float64 [NUM_PARAMETERS, S], see `row_parameters`.
        """
        num_rows, vocab_size = logits.shape
        has_draws = bool((parameters[TEMPERATURE.value] > 0).any())
        on_device = to_device(parameters, logits.device)
        rows = torch.arange(num_rows, device=logits.device)
        maxima, first_ids, masses = self._statistics(logits, rows, on_device, has_draws=has_draws)
        best_logits = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
        token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
        choose_kernel[(num_rows,)](
            logits,
            on_device,
            maxima,
            first_ids,
            masses,
            self._scratch(num_rows, logits.device),
            best_logits,
            token_ids,
            logits.stride(0),
            vocab_size,
            maxima.shape[1],
            num_rows,
            HAS_DRAWS=has_draws,
            BLOCKS_PADDED=triton.next_power_of_2(maxima.shape[1]),
            BLOCK=self.block_columns,
            **LAUNCH_OPTIONS,
        )
        return token_ids, best_logits

    def _statistics(
        self, logits: torch.Tensor, rows: torch.Tensor, parameters: torch.Tensor, *, has_draws: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each block of `rows` (int64 [R]): largest key, its lowest id (int32 [R, blocks]) and mass (float64)."""
        vocab_size = logits.shape[1]
        shape = (len(rows), triton.cdiv(vocab_size, self.block_columns))
        maxima = torch.empty(shape, dtype=torch.int32, device=logits.device)
        first_ids = torch.empty_like(maxima)
        masses = torch.empty(shape, dtype=torch.float64, device=logits.device)
        block_statistics_kernel[shape](
            logits,
            rows,
            parameters,
            maxima,
            first_ids,
            masses,
            logits.stride(0),
            vocab_size,
            shape[1],
            shape[0],
            HAS_DRAWS=has_draws,
            BLOCK=self.block_columns,
            **LAUNCH_OPTIONS,
        )
        return maxima, first_ids, masses

    def _scratch(self, num_rows: int, device: torch.device) -> torch.Tensor:
        """int32 [R, block_columns], a block of keys for each program that searches."""
        return torch.empty((num_rows, self.block_columns), dtype=torch.int32, device=device)

    def _logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_logprobs: np.ndarray
    ) -> DeviceLogprobs | None:
        asking = np.flatnonzero(num_logprobs >= 0)
        if not len(asking):
            return None
        device, vocab_size = logits.device, logits.shape[1]
        num_tops = np.minimum(num_logprobs[asking], vocab_size)
        plain = np.zeros((NUM_PARAMETERS, len(asking)))
        plain[TEMPERATURE.value] = 1.0
        rows = to_device(asking, device)
        parameters = to_device(plain, device)
        maxima, _, masses = self._statistics(logits, rows, parameters, has_draws=True)
        log_totals = torch.empty(len(asking), dtype=torch.float64, device=device)
        token_logits = torch.empty_like(log_totals)
        ranks = torch.empty(len(asking), dtype=torch.int64, device=device)
        top_ids = torch.zeros((len(asking), int(num_tops.max())), dtype=torch.int64, device=device)
        top_logits = torch.zeros(top_ids.shape, dtype=torch.float32, device=device)
        logprobs_kernel[(len(asking),)](
            logits,
            rows,
            token_ids,
            to_device(num_tops, device),
            maxima,
            masses,
            self._scratch(len(asking), device),
            log_totals,
            token_logits,
            ranks,
            top_ids,
            top_logits,
            logits.stride(0),
            vocab_size,
            maxima.shape[1],
            top_ids.shape[1],
            BLOCKS_PADDED=triton.next_power_of_2(maxima.shape[1]),
            BLOCK=self.block_columns,
            **LAUNCH_OPTIONS,
        )
        return DeviceLogprobs(
            rows=asking,
            num_tops=num_tops,
            log_totals=_to_host(log_totals),
            token_logits=_to_host(token_logits),
            ranks=_to_host(ranks),
            top_ids=_to_host(top_ids),
            top_logits=_to_host(top_logits),
        )


def row_parameters(batch: SamplingBatch, vocab_size: int) -> np.ndarray:
    """What the kernels are told of each row: float64 [NUM_PARAMETERS, S]."""
    top_k = np.where(batch.top_k < vocab_size, batch.top_k, 0)
    parameters = np.zeros((NUM_PARAMETERS, len(top_k)))
    parameters[TEMPERATURE.value] = batch.temperature
    parameters[TOP_K.value] = top_k
    parameters[TOP_P.value] = batch.top_p
    parameters[LOG_MIN_P.value] = np.log(np.maximum(batch.min_p, _SMALLEST_WEIGHT))
    parameters[IS_FILTERED.value] = (top_k > 0) | (batch.top_p < 1.0) | (batch.min_p > 0.0)
    drawn = np.flatnonzero(batch.temperature > 0)
    if len(drawn):
        parameters[UNIFORM.value, drawn] = uniforms(batch.seeds[drawn], batch.draw_index[drawn])
    return parameters


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy to the host without waiting. The result may be read once the device has come so far."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _token_logprobs(logprobs: DeviceLogprobs | None, token_ids: np.ndarray) -> dict[int, TokenLogprobs]:
    if logprobs is None:
        return {}
    results = {}
    for index, (row, num_top) in enumerate(zip(logprobs.rows.tolist(), logprobs.num_tops.tolist(), strict=True)):
        log_total = float(logprobs.log_totals[index])
        ids = logprobs.top_ids[index, :num_top].numpy()
        logits = logprobs.top_logits[index, :num_top].numpy()
        order = np.argsort(-logits, kind="stable")  # ids ascend, so equals stay in their order
        results[row] = TokenLogprobs(
            token_id=int(token_ids[row]),
            logprob=float(logprobs.token_logits[index]) - log_total,
            rank=int(logprobs.ranks[index]),
            top_ids=ids[order],
            top_logprobs=(logits[order].astype(np.float64) - log_total).astype(np.float32),
        )
    return results
