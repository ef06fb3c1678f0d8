"""What a KV memory of a given size holds of a model, and how ways to divide it compare. No weights are read."""

from __future__ import annotations

from dataclasses import dataclass

from lamella.argument_checks import MOST_TOKENS, WholeRange
from lamella.errors import CapacityError, ConfigError
from lamella.kv_cache.capacity import num_requests_that_fit
from lamella.kv_cache.layout import KVLayout
from lamella.kv_cache.report import format_bytes, format_table, kv_cache_report
from lamella.kv_cache.sizing import PoolSize, held_chunk_tokens, size_pool
from lamella.kv_cache.split import (
    DEFAULT_RATIO,
    cell_bytes,
    check_ratio,
    group_token_bytes,
    is_splittable,
    split_pools,
    split_tokens,
)
from lamella.planner.layer_specs import LayerSpecs

_RANGES = {
    "memory_bytes": WholeRange(1, 2**60),
    "context_tokens": WholeRange(1, MOST_TOKENS // 4),  # plans look at four times the context as well
    "page_tokens": WholeRange(1, 2**16),
    "chunk_tokens": WholeRange(1, 2**24),
    "interval_tokens": WholeRange(1, MOST_TOKENS),
}
RATIOS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """memory_bytes: of the KV arena, weights not counted. context_tokens: prompt + output of one request.
    chunk_tokens: most prompt tokens computed in one step. interval_tokens: None: one page. ratios: fixed pools to
    compare with; None: RATIOS, where the model has both kinds of layers."""

    memory_bytes: int
    context_tokens: int
    page_tokens: int = 16
    chunk_tokens: int = 2048
    interval_tokens: int | None = None
    ratios: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            if name != "interval_tokens" or self.interval_tokens is not None:
                allowed.check(name, getattr(self, name), ConfigError)
        for ratio in self.ratios or ():
            check_ratio(ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one way to divide the memory achieves.

    num_requests of context_tokens run at once, with prefill chunks of up to chunk_tokens; 0 where `refusal` says
    why the engine would not start.
    """

    system: str
    num_requests: int
    chunk_tokens: int
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """A ratio's arithmetic. num_units: bytes of a token of full capacity in units of one full layer's token (F)."""

    ratio: float
    system: str  # the outcome's
    num_units: float
    windowed_share: float
    num_full_tokens: int
    num_windowed_tokens: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`curves`: system -> requests that fit at each of `curve_contexts` (0 where refused)."""

    model: str
    options: PlanOptions
    memory_report: str
    outcomes: tuple[Outcome, ...]
    cells: tuple[Cell, ...]
    curve_contexts: tuple[int, ...]
    curves: dict[str, tuple[int, ...]]

    def report(self) -> str:
        options = self.options
        memory = f"{options.memory_bytes:,} B ({format_bytes(options.memory_bytes)})"
        rows = [
            [
                outcome.system,
                f"{outcome.num_requests:,}" if outcome.refusal is None else "refused",
                f"{outcome.chunk_tokens:,}" if outcome.refusal is None else "-",
            ]
            for outcome in self.outcomes
        ]
        parts = [
            f"{self.model}: {memory} of KV memory, weights not counted",
            self.memory_report,
            f"Requests of {options.context_tokens:,} tokens that run at once, none sharing a prefix",
            format_table(["memory", "requests", "prefill chunk"], rows),
        ]
        refusals = [f"{outcome.system}: {outcome.refusal}" for outcome in self.outcomes if outcome.refusal]
        if refusals:
            parts.append("\n".join(refusals))
        if self.cells:
            parts += ["Fixed pools, F = bytes of one token in one full layer", self._cell_table()]
        return "\n\n".join(parts)

    def _cell_table(self) -> str:
        default = next((cell for cell in self.cells if cell.ratio == DEFAULT_RATIO), None)
        rows = [
            [
                f"r={cell.ratio:g}",
                f"{cell.num_units:.1f} F",
                f"{cell.windowed_share:.1%}",
                f"{cell.num_full_tokens:,}",
                f"{cell.num_windowed_tokens:,}",
                f"{default.num_units / cell.num_units:.2f}x" if default else "-",
            ]
            for cell in self.cells
        ]
        header = ["ratio", "cell", "SWA share", "full tokens", "SWA tokens", f"full vs r={DEFAULT_RATIO:g}"]
        return format_table(header, rows)


def plan_memory(model: str, layers: LayerSpecs, options: PlanOptions) -> MemoryPlan:
    """Compare elastic memory, fixed pools at `options.ratios` (where there are both kinds of layers) and uniform
    allocation, which keeps every layer's KV like a full layer's.

    model: a name to print. Raises CapacityError when not even elastic memory holds one request, ConfigError for a
    ratio that cannot be.
    """
    layout = layers.layout(options.page_tokens)
    uniform = layers.uniform_layout(options.page_tokens)
    ratios = options.ratios or (RATIOS if is_splittable(layout) else ())
    pool = _size(layout, options, options.context_tokens)

    def outcomes(context_tokens: int) -> tuple[Outcome, ...]:
        return (
            _elastic("elastic", layout, options, context_tokens),
            *(_split(layout, ratio, options, context_tokens) for ratio in ratios),
            _elastic("uniform (hybrid off)", uniform, options, context_tokens),
        )

    contexts = tuple(length for step in range(6, -1, -1) if (length := options.context_tokens * 4 >> step))
    per_context = [outcomes(context) for context in contexts]
    return MemoryPlan(
        model=model,
        options=options,
        memory_report=kv_cache_report(
            layout,
            pool.num_slabs,
            max_model_len=options.context_tokens,
            chunk_tokens=pool.chunk_tokens,
            interval_tokens=_interval(options),
            step_pages_bytes=pool.step_pages_bytes,
        ),
        outcomes=outcomes(options.context_tokens),
        cells=tuple(_cell(layout, ratio, options.memory_bytes) for ratio in ratios),
        curve_contexts=contexts,
        curves={
            of_system[0].system: tuple(outcome.num_requests for outcome in of_system)
            for of_system in zip(*per_context, strict=True)
        },
    )


def _interval(options: PlanOptions) -> int:
    return options.interval_tokens or options.page_tokens


def _size(layout: KVLayout, options: PlanOptions, context_tokens: int) -> PoolSize:
    return size_pool(
        layout,
        memory_bytes=options.memory_bytes,
        max_model_len=context_tokens,
        longest_model_len=context_tokens,
        chunk_tokens=options.chunk_tokens,
        interval_tokens=_interval(options),
    )


def _elastic(system: str, layout: KVLayout, options: PlanOptions, context_tokens: int) -> Outcome:
    try:
        pool = _size(layout, options, context_tokens)
    except CapacityError as error:
        return Outcome(system=system, num_requests=0, chunk_tokens=0, refusal=str(error))
    num_requests = num_requests_that_fit(
        layout,
        pool.num_slabs,
        context_tokens=context_tokens,
        chunk_tokens=held_chunk_tokens(layout, chunk_tokens=pool.chunk_tokens, step_pages_bytes=pool.step_pages_bytes),
        interval_tokens=_interval(options),
    )
    return Outcome(system=system, num_requests=num_requests, chunk_tokens=pool.chunk_tokens)


def _split(layout: KVLayout, ratio: float, options: PlanOptions, context_tokens: int) -> Outcome:
    system = _split_name(ratio)
    try:
        pools = split_pools(
            layout,
            memory_bytes=options.memory_bytes,
            ratio=ratio,
            max_model_len=context_tokens,
            longest_model_len=context_tokens,
            chunk_tokens=options.chunk_tokens,
            interval_tokens=_interval(options),
            max_num_seqs=1,  # without effect where a ratio is given
            enable_prefix_caching=True,
        )
    except CapacityError as error:
        return Outcome(system=system, num_requests=0, chunk_tokens=0, refusal=str(error))
    num_requests = num_requests_that_fit(
        layout,
        pools.num_slabs,
        context_tokens=context_tokens,
        chunk_tokens=pools.chunk_tokens,
        interval_tokens=pools.interval_tokens,
        slab_quota=pools.slab_quota,
    )
    return Outcome(system=system, num_requests=num_requests, chunk_tokens=pools.chunk_tokens)


def _split_name(ratio: float) -> str:
    return f"fixed pools, r={ratio:g}"


def _cell(layout: KVLayout, ratio: float, memory_bytes: int) -> Cell:
    """The pools as the formula gives them, before they are rounded to slabs."""
    cell = cell_bytes(layout, ratio)
    full = [group for group in layout.groups if not group.spec.is_windowed]
    tokens = split_tokens(layout, memory_bytes, ratio)
    windowed_tokens = [count for count, group in zip(tokens, layout.groups, strict=True) if group.spec.is_windowed]
    return Cell(
        ratio=ratio,
        system=_split_name(ratio),
        num_units=float(cell / full[0].spec.token_bytes),
        windowed_share=float(1 - sum(map(group_token_bytes, full)) / cell),
        num_full_tokens=tokens[layout.groups.index(full[0])],
        num_windowed_tokens=windowed_tokens[0],
    )
