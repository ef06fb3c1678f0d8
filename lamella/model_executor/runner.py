"""Runs one step: copies pages, builds each group's attention metadata, runs the model, samples."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from lamella.attention.contract import AttentionBackend, AttentionParams
from lamella.attention.metadata import require_covering_tables, to_device
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.page_transfers import PageMoves
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.decode_graphs import (
    CAPTURABLE_BACKENDS,
    DecodeBuffers,
    DecodeGraphs,
    GraphMaker,
    batch_sizes,
)
from lamella.model_executor.device_tables import DeviceTables
from lamella.model_executor.layers.adapters import Adapter, RowAdapters
from lamella.model_executor.layers.contract import HeadScores
from lamella.model_executor.receptive_field import ReceptiveField
from lamella.model_executor.sampling.head_sampling import sample_from_head
from lamella.model_executor.sampling.sampler import Sampler
from lamella.model_executor.sampling.sampler_choice import choose_sampler
from lamella.model_executor.sampling.timed_scores import TimedScores
from lamella.model_executor.step_attention import LayerPlace, StepAttention
from lamella.model_executor.step_buffers import StepInputs, StepUpload, host_inputs, send_step
from lamella.model_executor.step_clock import StepClock
from lamella.model_executor.step_plan import ScoredTokens, StepPlan, StepResult, TokenLogprobs
from lamella.model_executor.weights.kv_scales import KVScales

if TYPE_CHECKING:
    from lamella.model_executor.sampling.device.device_sampler import DeviceSampler

ALL_TOKENS: Mapping[int, np.ndarray] = MappingProxyType({})  # every layer takes in all tokens

# So many logits rows are written at a time to score a prompt: all of a long prompt's would take gigabytes.
_SCORED_ROWS = 64


class RunnableModel(Protocol):
    """A model with its weights: a `Stack` of native layers, or a transformers model."""

    dtype: torch.dtype
    device: torch.device

    def attention_params(self, specs: list[KVCacheSpec]) -> list[AttentionParams]:
        """specs: what each layer sees (not how long its KV is kept)."""
        ...

    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        step: StepAttention,
        is_long: torch.Tensor | None = None,
        adapters: RowAdapters | None = None,
    ) -> torch.Tensor:
        """token_ids, positions: int64 [T], the tokens that the first layer takes in; is_long: bool [T], which take the
        rotary embedding of long texts, None: none; adapters: of the T tokens, None: none has one. Returns [S, width], a
        row for each token that leaves the last layer."""
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor | HeadScores:
        """Rows of what a call returned -> float32 [S, vocab_size] (may be a transposed view), or what computes only
        those that are asked for."""
        ...


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device has been given. token_ids: int64 [S], its samples, on the device: the next step can be
    launched with them before `result` is asked for."""

    token_ids: torch.Tensor
    wait: Callable[[], StepResult]

    def result(self) -> StepResult:
        """What the step computed, on the host; waits for it. Raises what the step raised."""
        return self.wait()


class ModelRunner:
    """Owns the model and its view of the KV arena (uint8 [bytes]); knows nothing of requests.

    attention_specs: what each layer sees; `layout` says where its KV lies. The model gives K and V for every layer
    that keeps KV and None for those that read another's.

    kv_dtype: what K and V are stored in; None: the model's dtype. kv_scales: one per layer; None: all 1.
    prunes: layers compute only the tokens that something depends on (`ReceptiveField`), and the model goes by
    `StepAttention.output_rows`. False: they compute all. sampler: None takes the one for the arena's device.
    clock: may be set at any time; it is told where the time of steps goes.
    """

    def __init__(
        self,
        model: RunnableModel,
        backend: AttentionBackend,
        layout: KVLayout,
        attention_specs: list[KVCacheSpec],
        arena: torch.Tensor,
        *,
        kv_dtype: torch.dtype | None = None,
        kv_scales: Sequence[KVScales] | None = None,
        prunes: bool = True,
        sampler: Sampler | DeviceSampler | None = None,
    ) -> None:
        self.model = model
        self.backend = backend
        self.layout = layout
        self.arena = arena
        self.sampler = choose_sampler(arena.device) if sampler is None else sampler
        self.receptive_field = ReceptiveField(layout, attention_specs)
        self.prunes = prunes
        self.device = arena.device
        self.graphs: DecodeGraphs | None = None
        self.clock: StepClock | None = None
        self.adapters: dict[int, Adapter] = {}  # by the numbers that plans name them by
        self._upload = StepUpload(arena.device)
        self.tables = DeviceTables(arena.device, layout)
        # Kernels for devices read what is sent to one, and so they do where they are interpreted on a CPU.
        self._reads_host = arena.device.type == "cpu" and backend.name not in CAPTURABLE_BACKENDS
        # The samples of the step launched last.
        self._last_token_ids = torch.zeros(0, dtype=torch.int64, device=arena.device)
        self.places = []
        for layer, (spec, params) in enumerate(
            zip(attention_specs, model.attention_params(attention_specs), strict=True)
        ):
            group, offset_bytes = layout.layer_address(layer)
            cache = backend.layer_cache(
                arena,
                spec=spec,
                dtype=kv_dtype or model.dtype,
                page_tokens=layout.page_tokens,
                unit_bytes=layout.unit_bytes,
                offset_bytes=offset_bytes,
            )
            if kv_scales is not None:
                # A layer without K and V of its own reads those that their owner has scaled, so it needs the owner's
                # scales.
                scales = kv_scales[layout.owners[layer]]
                params = replace(params, k_scale=scales.k_scale, v_scale=scales.v_scale)
            self.places.append(LayerPlace(group, params, cache))
        self._seen_specs = list(dict.fromkeys((place.group, place.params.spec) for place in self.places))

    @torch.inference_mode()
    def reserve_tables(self, num_rows: int, table_widths: Sequence[int]) -> None:
        """Make room on the device for the block tables of so many rows, and so many blocks of each group. Where it does
        not suffice it grows with a step; graphs that were captured before then run no more. On a CPU whose backend
        reads the plans' own arrays there is none."""
        if not self._reads_host:
            self.tables.reserve(num_rows, table_widths)

    @torch.inference_mode()
    def capture_decodes(self, maker: GraphMaker, *, max_num_seqs: int, table_widths: Sequence[int]) -> None:
        """From now on run steps that only decode as graphs made by `maker`, where they fit: up to `max_num_seqs`
        requests and block tables of `table_widths` per group. Once, and only on a backend whose launches do not depend
        on the metadata's host arrays (`CAPTURABLE_BACKENDS`)."""
        sizes = batch_sizes(max_num_seqs)
        buffers = DecodeBuffers(
            self.tables,
            max_num_requests=sizes[-1],
            table_widths=table_widths,
            page_tokens=self.layout.page_tokens,
        )
        self.graphs = DecodeGraphs(self._forward, buffers, self._upload, maker, sizes)

    def trim_memory(self) -> None:
        """Give the memory back that torch holds in reserve on a device, in pieces that may be too small for a step."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def execute(self, plan: StepPlan) -> StepResult:
        return self.launch(plan).result()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Give the step to the device. Tokens that `plan.token_sources` names are samples of the step launched
        before."""
        hidden = self.compute(plan)
        computed = time.monotonic()
        launched = self._sample(hidden, plan)
        if self.clock is not None:
            self.clock.sampling += time.monotonic() - computed
        self._last_token_ids = launched.token_ids
        return launched

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> torch.Tensor:
        """The step without its sampling: hidden states [S, width] of the tokens that leave the last layer."""
        start = time.monotonic()
        self._copy_pages(plan)
        copied = time.monotonic()
        # Graphs were captured with the rotary embedding of short texts, and without adapters.
        graphs = None if plan.is_long_text is not None or plan.adapter_ids is not None else self.graphs
        size = None if graphs is None else graphs.size_for(plan)
        hidden = self._run_eager(plan) if size is None else self._run_graph(plan, size)
        if self.clock is not None:
            self.clock.copies += copied - start
            self.clock.layers += time.monotonic() - copied
        return hidden

    def _sample(self, hidden: torch.Tensor, plan: StepPlan) -> LaunchedStep:
        if plan.scored is not None:
            return self._score_and_sample(hidden, plan, plan.scored)
        num_samples = plan.num_samples
        if not num_samples:
            return self._finished(StepResult(token_ids=np.zeros(0, dtype=np.int64), logprobs={}))
        if len(hidden) > num_samples:  # the model gave the states of all tokens
            hidden = hidden[to_device(plan.sampled_tokens, hidden.device)]
        return self._sample_from(hidden, plan)

    def _sample_from(self, hidden: torch.Tensor, plan: StepPlan) -> LaunchedStep:
        """hidden: [S, width], of the tokens behind which one is sampled."""
        start = time.monotonic()
        scores = self.model.logits(hidden)
        if self.clock is not None:
            seconds = time.monotonic() - start
            self.clock.head += seconds
            self.clock.sampling -= seconds  # `launch` adds the whole
            if not isinstance(scores, torch.Tensor):
                scores = TimedScores(scores, self.clock)
        if not isinstance(scores, torch.Tensor):
            return self._finished(sample_from_head(Sampler(), scores, plan.sampling))
        sampled = self.sampler(scores, plan.sampling)
        if isinstance(sampled, StepResult):
            return self._finished(sampled)
        return LaunchedStep(sampled.token_ids, sampled.result)

    def _score_and_sample(self, hidden: torch.Tensor, plan: StepPlan, scored: ScoredTokens) -> LaunchedStep:
        """hidden: of all tokens, or of the plan's output tokens."""
        outputs = plan.output_tokens
        if len(hidden) > len(outputs):
            hidden = hidden[to_device(outputs, hidden.device)]
        found: list[TokenLogprobs] = []
        for start in range(0, len(scored.tokens), _SCORED_ROWS):
            part = slice(start, start + _SCORED_ROWS)
            places = np.searchsorted(outputs, scored.tokens[part])
            scores = self.model.logits(hidden[to_device(places, hidden.device)])
            if isinstance(scores, torch.Tensor):
                found += self.sampler.score(scores, scored.target_ids[part], scored.num_logprobs[part])
            else:
                logits = scores.logits(torch.arange(len(places)))
                found += Sampler().score(logits, scored.target_ids[part], scored.num_logprobs[part])
        if not plan.num_samples:
            return self._finished(StepResult(token_ids=np.zeros(0, dtype=np.int64), logprobs={}, scored=found))
        places = np.searchsorted(outputs, plan.sampled_tokens)
        launched = self._sample_from(hidden[to_device(places, hidden.device)], plan)
        return LaunchedStep(launched.token_ids, lambda: replace(launched.result(), scored=found))

    def _finished(self, result: StepResult) -> LaunchedStep:
        return LaunchedStep(to_device(result.token_ids, self.device), lambda: result)

    def _run_eager(self, plan: StepPlan) -> torch.Tensor:
        """Hidden states [S, width] of the tokens that leave the last layer."""
        inputs = self._inputs(plan)
        if plan.token_sources is not None:
            inputs = replace(inputs, token_ids=self._with_last_samples(plan.token_sources, inputs.token_ids))
        needed_tokens = self.receptive_field.needed_tokens(plan) if self.prunes else {}
        return self._forward(inputs, needed_tokens, plan)

    def _run_graph(self, plan: StepPlan, size: int) -> torch.Tensor:
        """The same for a plan that only decodes: hidden states [R, width], nothing is pruned."""
        assert self.graphs is not None
        for group, spec in self._seen_specs:  # backends check this when they are called, which no replay does
            part = plan.groups[group]
            require_covering_tables(
                spec,
                page_tokens=self.layout.page_tokens,
                query_start=plan.query_start,
                seq_lens=plan.seq_lens,
                first_blocks=part.first_blocks,
                first_keys=part.first_keys,
            )
        token_ids = self.graphs.load(plan, size)[: len(plan.token_ids)]
        if plan.token_sources is not None:
            token_ids.copy_(self._with_last_samples(plan.token_sources, token_ids))
        return self.graphs.replay(size, len(plan.seq_lens))

    def _inputs(self, plan: StepPlan) -> StepInputs:
        page_tokens = self.layout.page_tokens
        if self._reads_host:
            return host_inputs(plan, page_tokens)
        packed, shape = send_step(self._upload, self.tables, plan)
        return shape.inputs(packed, self.tables, plan, page_tokens)

    def _forward(
        self,
        inputs: StepInputs,
        needed_tokens: Mapping[int, np.ndarray] = ALL_TOKENS,
        plan: StepPlan | None = None,
    ) -> torch.Tensor:
        """plan: where texts may take the rotary embedding of long ones, or have adapters."""
        token_ids, positions = inputs.token_ids, inputs.positions
        is_long = adapters = None
        if plan is not None and plan.adapter_ids is not None:
            of_tokens = np.repeat(plan.adapter_ids, np.diff(plan.query_start))
            ids = of_tokens[needed_tokens[0]] if 0 in needed_tokens else of_tokens
            adapters = RowAdapters(ids, self.adapters, token_ids.device)
        if plan is not None and plan.is_long_text is not None:
            of_tokens = np.repeat(plan.is_long_text, np.diff(plan.query_start))
            is_long = to_device(of_tokens[needed_tokens[0]] if 0 in needed_tokens else of_tokens, token_ids.device)
        if 0 in needed_tokens:
            rows = to_device(needed_tokens[0], token_ids.device)
            token_ids, positions = token_ids[rows], positions[rows]
        attention = StepAttention(self.backend, self.layout, self.places, inputs.metadata, needed_tokens, self.clock)
        if is_long is None and adapters is None:
            return self.model(token_ids, positions, attention)
        if adapters is None:
            return self.model(token_ids, positions, attention, is_long)
        return self.model(token_ids, positions, attention, is_long, adapters)

    def _with_last_samples(self, token_sources: np.ndarray, token_ids: torch.Tensor) -> torch.Tensor:
        """`token_ids` (int64 [T]) with the last step's samples in the places that `token_sources` gives (see
        StepPlan)."""
        sources = to_device(token_sources, self.device)
        return torch.where(sources < 0, token_ids, self._last_token_ids[sources.clamp(min=0)])

    def _copy_pages(self, plan: StepPlan) -> None:
        """Move pages in the order of the moves, for one may depend on another, then make the copies on write, which are
        independent."""
        self.move_pages(plan.moves)
        for group, part in enumerate(plan.groups):
            if len(part.copies.src_pages):
                self._copy(group, part.copies.src_pages, part.copies.dst_pages)

    def move_pages(self, moves: Sequence[PageMoves]) -> None:
        """Move pages in the order of the moves."""
        for move in moves:
            self._copy(move.group, move.src_pages, move.dst_pages)

    def _copy(self, group: int, src_pages: np.ndarray, dst_pages: np.ndarray) -> None:
        """Copy whole pages, and so all layers of the group at once."""
        page_bytes, unit_bytes = self.layout.groups[group].page_bytes, self.layout.unit_bytes
        num_ids = (self.arena.numel() - page_bytes) // unit_bytes + 1
        # Copied in the widest words that fit: byte by byte it would take six times as long.
        word = next(
            word for word in (torch.int64, torch.int32, torch.int16, torch.uint8) if unit_bytes % word.itemsize == 0
        )
        words = self.arena[: self.arena.numel() // word.itemsize * word.itemsize].view(word)
        pages = words.as_strided((num_ids, page_bytes // word.itemsize), (unit_bytes // word.itemsize, 1))
        sources = to_device(src_pages, self.arena.device)
        pages[to_device(dst_pages, self.arena.device)] = pages[sources]
