"""Steps that only decode, as captured graphs: one launch instead of hundreds.

A graph is captured for each of a few batch sizes; a step takes the smallest that holds it, and the rows left over are
padding that reads and writes nothing. What a graph launches is fixed when it is captured, so a step's numbers can reach
it only through memory. Everything that differs from step to step is therefore in `DecodeBuffers` and the block tables
by row (`DeviceTables`), whose addresses do not change; what the host decides (grids, strides) follows from the batch
size and fixed widths.

The graph ends with the last hidden states. Logits and sampling are launched after it. Logits are as wide as the
vocabulary, so keeping some for each graph would take more memory than all else, and launching two or three kernels
costs no time while the graph runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from lamella.kv_cache.page_transfers import PageCopies
from lamella.kv_cache.step_memory import GroupPlan
from lamella.model_executor.device_tables import DeviceTables
from lamella.model_executor.step_buffers import NO_SLOT, NULL_PAGE, PackedShape, StepInputs, StepUpload, send_step
from lamella.model_executor.step_plan import SamplingBatch, StepPlan

LARGEST_BATCH = 512
CAPTURABLE_BACKENDS = ("triton",)  # their launches do not depend on the metadata's host arrays


def batch_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes to capture, ascending: 1, 2, 4, multiples of 8, and the largest batch itself up to 512."""
    largest = min(max_num_seqs, LARGEST_BATCH)
    return (*(size for size in (1, 2, 4, *range(8, largest, 8)) if size < largest), largest)


class GraphMaker(Protocol):
    def capture(self, run: Callable[[], None]) -> Callable[[], object]:
        """Call `run`, which touches only memory that outlives the graph; what is returned does the same device work
        again, on what is in that memory then, without calling it."""
        ...


class CudaGraphs:
    """Graphs that share one memory pool: capture the largest first, and the others fit into what it took. They run one
    at a time, in stream order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Callable[[], object]:
        with torch.cuda.device(self._device):
            run()  # compiles kernels and makes workspaces, which a capture cannot
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                run()
        return graph.replay


class DecodeBuffers:
    """Where graphs read a step, in memory that stays: arrays of `max_num_requests` rows, and the block tables.

    table_widths: blocks of each group that a decoding request's table covers at most.
    """

    def __init__(
        self, tables: DeviceTables, *, max_num_requests: int, table_widths: Sequence[int], page_tokens: int
    ) -> None:
        shape = PackedShape(max_num_requests, max_num_requests, len(table_widths))
        self.page_tokens, self.table_widths = page_tokens, tuple(table_widths)
        tables.reserve(max_num_requests, table_widths)
        self.tables, self._entries = tables, tables.entries
        self.packed = torch.zeros(shape.num_fixed, dtype=torch.int64, device=tables.entries.device)

    def inputs(self, num_requests: int) -> StepInputs:
        """The inputs of a batch of that size. Their arrays on the host are those of padding and say nothing of any
        step."""
        plan = padding_plan(num_requests, self.table_widths)
        shape = PackedShape(num_requests, num_requests, len(self.table_widths))
        return shape.inputs(self.packed, self.tables, plan, self.page_tokens)

    def holds(self, plan: StepPlan) -> bool:
        """Whether the plan's block tables are no wider than a graph's launches reach, and are where graphs read."""
        num_blocks = -(-plan.seq_lens // self.page_tokens)
        needs = [int((num_blocks - group.first_blocks).max(initial=0)) for group in plan.groups]
        if any(need > width for need, width in zip(needs, self.table_widths, strict=True)):
            return False
        return self.tables.entries is self._entries

    def load(self, packed: torch.Tensor, shape: PackedShape) -> None:
        """Take in a step of one token for each request; its changes are in the tables."""
        self.packed[: shape.num_fixed].copy_(packed[: shape.num_fixed])


class DecodeGraphs:
    """Captures `forward` for each of `sizes`, then runs plans that only decode. `forward` itself is not kept here; the
    maker may keep it.

    forward: inputs of B requests with one token each -> hidden states [B, width].
    """

    def __init__(
        self,
        forward: Callable[[StepInputs], torch.Tensor],
        buffers: DecodeBuffers,
        upload: StepUpload,
        maker: GraphMaker,
        sizes: Sequence[int],
    ) -> None:
        self.buffers = buffers
        self.sizes = np.array(sorted(sizes), dtype=np.int64)
        self._upload = upload
        self._replays: dict[int, Callable[[], object]] = {}
        largest = int(self.sizes[-1])
        padding = padding_plan(0, (0,) * len(buffers.table_widths))
        self.load(padding, largest)
        # [largest batch, width]: the results of the last replay.
        self.hidden = torch.empty_like(forward(buffers.inputs(largest)))
        for size in self.sizes[::-1].tolist():
            self.load(padding, size)
            self._replays[size] = maker.capture(_Pass(forward, buffers, size, self.hidden))

    def size_for(self, plan: StepPlan) -> int | None:
        """The batch size whose graph runs the plan; None where none can: a request has several tokens, or the batch or
        a table is larger than any graph's."""
        num_requests = len(plan.seq_lens)
        index = int(np.searchsorted(self.sizes, num_requests))
        if plan.num_decodes < num_requests or index == len(self.sizes) or not self.buffers.holds(plan):
            return None
        return int(self.sizes[index])

    def load(self, plan: StepPlan, size: int) -> torch.Tensor:
        """Bring the plan where the graph of `size` reads it. Returns the token ids there, int64 [size]: they may be
        changed before `replay`."""
        packed, shape = send_step(self._upload, self.buffers.tables, plan, num_requests=size)
        self.buffers.load(packed, shape)
        return self.buffers.packed[:size]

    def replay(self, size: int, num_requests: int) -> torch.Tensor:
        """Run what was loaded: hidden states [num_requests, width], which hold until the next replay."""
        self._replays[size]()
        return self.hidden[:num_requests]


class _Pass:
    """One pass of the model over the buffers. It makes its own metadata, so that what a backend derives from the
    metadata is computed inside of the graph, too."""

    def __init__(
        self, forward: Callable[[StepInputs], torch.Tensor], buffers: DecodeBuffers, size: int, hidden: torch.Tensor
    ) -> None:
        self._forward, self._buffers, self._size, self._hidden = forward, buffers, size, hidden

    def __call__(self) -> None:
        self._hidden[: self._size].copy_(self._forward(self._buffers.inputs(self._size)))


def padding_plan(num_requests: int, table_widths: Sequence[int]) -> StepPlan:
    """A step of padded requests only: it reads and writes no page, and samples nothing."""
    none, zeros = np.zeros(0, dtype=np.int64), np.zeros(num_requests, dtype=np.int64)
    groups = tuple(
        GroupPlan(
            block_tables=np.broadcast_to(np.int64(NULL_PAGE), (num_requests, width)),
            first_blocks=zeros,
            first_keys=zeros,
            slot_mapping=np.full(num_requests, NO_SLOT, dtype=np.int64),
            copies=PageCopies(none, none),
        )
        for width in table_widths
    )
    return StepPlan(
        token_ids=zeros,
        positions=zeros,
        query_start=np.arange(num_requests + 1),
        seq_lens=zeros,
        num_decodes=num_requests,
        moves=(),
        groups=groups,
        first_step_slot=0,
        num_sampled=zeros,
        sampling=SamplingBatch(
            temperature=np.zeros(0),
            top_k=none,
            top_p=np.zeros(0),
            min_p=np.zeros(0),
            seeds=np.zeros(0, dtype=np.uint64),
            draw_index=none,
            num_logprobs=none,
            banned_token_ids={},
        ),
    )
