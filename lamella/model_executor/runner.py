"""Runs one step: copies pages, builds each group's attention metadata, runs the model, samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from lamella.attention.backend import AttentionBackend
from lamella.attention.metadata import AttentionMetadata
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.head_sampling import sample_from_head
from lamella.model_executor.kv_scales import KVScales
from lamella.model_executor.models.gemma3 import Gemma3ForCausalLM
from lamella.model_executor.receptive_field import ReceptiveField
from lamella.model_executor.sampler import Sampler
from lamella.model_executor.step_attention import LayerPlace, StepAttention
from lamella.model_executor.step_plan import GroupPlan, StepPlan, StepResult


class ModelRunner:
    """Owns the model and its view of the KV arena (uint8 [bytes]); knows nothing of requests.

    attention_specs: what each layer sees; `layout` says where its KV lies. The model gives K and V for every layer
    that keeps KV and None for those that read another's.

    kv_dtype: what K and V are stored in; None: the model's dtype. kv_scales: one per layer; None: all 1.
    prunes: layers compute only the tokens that something depends on (`ReceptiveField`), and the model goes by
    `StepAttention.output_rows`. False: they compute all.
    """

    def __init__(
        self,
        model: Gemma3ForCausalLM,
        backend: AttentionBackend,
        layout: KVLayout,
        attention_specs: list[KVCacheSpec],
        arena: torch.Tensor,
        *,
        kv_dtype: torch.dtype | None = None,
        kv_scales: Sequence[KVScales] | None = None,
        prunes: bool = True,
    ) -> None:
        self.model = model
        self.backend = backend
        self.layout = layout
        self.arena = arena
        self.sampler = Sampler()
        self.receptive_field = ReceptiveField(layout, attention_specs)
        self.prunes = prunes
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
                # A layer without K and V of its own reads what their owner has scaled.
                scales = kv_scales[layout.owners[layer]]
                params = dataclasses.replace(params, k_scale=scales.k_scale, v_scale=scales.v_scale)
            self.places.append(LayerPlace(group, params, cache))

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        self._copy_pages(plan)
        device = self.arena.device
        metadata = [self._metadata(plan, group) for group in plan.groups]

        needed_tokens = self.receptive_field.needed_tokens(plan) if self.prunes else {}
        token_ids, positions = plan.token_ids, plan.positions
        if 0 in needed_tokens:
            token_ids, positions = token_ids[needed_tokens[0]], positions[needed_tokens[0]]
        hidden = self.model(
            torch.from_numpy(token_ids).to(device),
            torch.from_numpy(positions).to(device),
            StepAttention(self.backend, self.layout, self.places, metadata, needed_tokens),
        )
        if not len(plan.sample_requests):
            return StepResult(token_ids=np.zeros(0, dtype=np.int64), logprobs={})
        if len(hidden) > len(plan.sample_requests):  # it gave all tokens
            hidden = hidden[torch.from_numpy(plan.sampled_tokens).to(device)]
        scores = self.model.logits(hidden)
        if isinstance(scores, torch.Tensor):
            return self.sampler(scores, plan.sampling)
        return sample_from_head(self.sampler, scores, plan.sampling)

    def _copy_pages(self, plan: StepPlan) -> None:
        """Moved pages in their order, then copies on write, whose sources and targets nothing else touches."""
        for move in plan.moves:
            self._copy(move.group, move.src_pages, move.dst_pages)
        for group, part in enumerate(plan.groups):
            if len(part.copies.src_pages):
                self._copy(group, part.copies.src_pages, part.copies.dst_pages)

    def _copy(self, group: int, src_pages: np.ndarray, dst_pages: np.ndarray) -> None:
        """All layers of the group at once."""
        page_bytes = self.layout.groups[group].page_bytes
        num_ids = (self.arena.numel() - page_bytes) // self.layout.unit_bytes + 1
        pages = self.arena.as_strided((num_ids, page_bytes), (self.layout.unit_bytes, 1))
        sources = torch.from_numpy(src_pages).to(self.arena.device)
        pages[torch.from_numpy(dst_pages).to(self.arena.device)] = pages[sources]

    def _metadata(self, plan: StepPlan, group: GroupPlan) -> AttentionMetadata:
        device = self.arena.device
        return AttentionMetadata(
            page_tokens=self.layout.page_tokens,
            num_decodes=plan.num_decodes,
            query_start=torch.from_numpy(plan.query_start).to(device),
            seq_lens=torch.from_numpy(plan.seq_lens).to(device),
            first_blocks=torch.from_numpy(group.first_blocks).to(device),
            first_keys=torch.from_numpy(group.first_keys).to(device),
            block_tables=torch.from_numpy(group.block_tables).to(device),
            slot_mapping=torch.from_numpy(group.slot_mapping).to(device),
            query_start_host=plan.query_start,
            seq_lens_host=plan.seq_lens,
            first_blocks_host=group.first_blocks,
            first_keys_host=group.first_keys,
            block_tables_host=group.block_tables,
        )
