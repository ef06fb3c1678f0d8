"""What a KV memory of a given size holds of a model, and how ways to divide it compare. No weights are read."""

from __future__ import annotations

from dataclasses import dataclass

from lamella.argument_checks import MOST_DRAFT_TOKENS, MOST_TOKENS, WholeRange
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
    "mean_tokens": WholeRange(1, MOST_TOKENS // 4),
    "num_draft_tokens": WholeRange(0, MOST_DRAFT_TOKENS),
}
SMALL_PARTS = (0.25, 0.5, 1.0)  # of the smallest usable ratio, for what is lost below it
RATIOS = (0.05, 0.1, 0.2, 0.4, 0.8, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """memory_bytes: of the KV arena, weights not counted. context_tokens: prompt + output of one request.
    chunk_tokens: most prompt tokens computed in one step. interval_tokens: None: one page. ratios: fixed pools to
    compare with; None: the model's default ratio, or RATIOS, where the model has both kinds of layers. mean_tokens: of
    requests on average; None: all have context_tokens. num_draft_tokens: most drafts that a step verifies of a
    request."""

    memory_bytes: int
    context_tokens: int
    page_tokens: int = 16
    chunk_tokens: int = 2048
    interval_tokens: int | None = None
    ratios: tuple[float, ...] | None = None
    mean_tokens: int | None = None
    num_draft_tokens: int = 0

    def __post_init__(self) -> None:
        for name, allowed in _RANGES.items():
            if name not in ("interval_tokens", "mean_tokens") or getattr(self, name) is not None:
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
class SmallestRatio:
    """The ratio at which the windows that are kept are as many as the prefixes in the full pool.

    A cached prefix of mean_tokens takes as many tokens of the full pool and, so that a prompt can start at its end,
    window_tokens + interval_tokens + page_tokens of the windowed one. With less than the quotient, windows run out
    first, and what the full pool holds beyond them cannot be resumed at its end.
    """

    window_tokens: int  # the longest
    interval_tokens: int
    page_tokens: int
    mean_tokens: int

    @property
    def held_tokens(self) -> int:
        return self.window_tokens + self.interval_tokens + self.page_tokens

    @property
    def ratio(self) -> float:
        return self.held_tokens / self.mean_tokens

    def hits(self, cell: Cell) -> tuple[int, int, float]:
        """Prefixes that the full pool holds, windows that the windowed one holds, and the share of those prefixes that
        a prompt can start at the end of."""
        prefixes, windows = cell.num_full_tokens // self.mean_tokens, cell.num_windowed_tokens // self.held_tokens
        return prefixes, windows, min(1.0, windows / prefixes) if prefixes else 0.0


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`curves`: system -> requests that fit at each of `curve_contexts` (0 where refused)."""

    model: str
    options: PlanOptions
    memory_report: str
    outcomes: tuple[Outcome, ...]
    cells: tuple[Cell, ...]
    smallest_ratio: SmallestRatio | None  # None: the model has not both kinds of layers
    small_cells: tuple[Cell, ...]  # below it and at it
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
        if self.smallest_ratio is not None:
            parts += [self._smallest_ratio_text(self.smallest_ratio), self._hit_table(self.smallest_ratio)]
        return "\n\n".join(parts)

    def _smallest_ratio_text(self, least: SmallestRatio) -> str:
        return (
            f"Smallest usable ratio: r_min = (W + I + P) / mean length = ({least.window_tokens} + "
            f"{least.interval_tokens} + {least.page_tokens}) / {least.mean_tokens:,} = {least.ratio:.4f}; below it a "
            "pool of cached prefixes has more ends than windows to resume at"
        )

    def _hit_table(self, least: SmallestRatio) -> str:
        rows = []
        for cell in (*self.small_cells, *self.cells):
            prefixes, windows, share = least.hits(cell)
            rows.append([f"r={cell.ratio:.3g}", f"{prefixes:,}", f"{windows:,}", f"{share:.1%}"])
        return format_table(["ratio", "cached prefixes", "windows", "hits"], rows)

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
    ratios = options.ratios or (default_ratios(layers) if is_splittable(layout) else ())
    pool = _size(layout, options, options.context_tokens)

    def outcomes(context_tokens: int) -> tuple[Outcome, ...]:
        return (
            _elastic("elastic", layout, options, context_tokens),
            *(_split(layout, ratio, options, context_tokens) for ratio in ratios),
            _elastic("uniform (hybrid off)", uniform, options, context_tokens),
        )

    least = _smallest_ratio(layout, options) if ratios else None
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
            num_draft_tokens=options.num_draft_tokens,
        ),
        outcomes=outcomes(options.context_tokens),
        smallest_ratio=least,
        small_cells=tuple(_cell(layout, least.ratio * part, options.memory_bytes) for part in SMALL_PARTS)
        if least
        else (),
        cells=tuple(_cell(layout, ratio, options.memory_bytes) for ratio in ratios),
        curve_contexts=contexts,
        curves={
            of_system[0].system: tuple(outcome.num_requests for outcome in of_system)
            for of_system in zip(*per_context, strict=True)
        },
    )


def default_ratios(layers: LayerSpecs) -> tuple[float, ...]:
    return RATIOS if layers.default_ratio is None else (layers.default_ratio,)


def _smallest_ratio(layout: KVLayout, options: PlanOptions) -> SmallestRatio:
    reaches = [group.spec.reach_tokens for group in layout.groups]
    return SmallestRatio(
        window_tokens=max(reach for reach in reaches if reach is not None),
        interval_tokens=_interval(options),
        page_tokens=options.page_tokens,
        mean_tokens=options.mean_tokens or options.context_tokens,
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
        num_draft_tokens=options.num_draft_tokens,
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
        num_draft_tokens=options.num_draft_tokens,
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
            num_draft_tokens=options.num_draft_tokens,
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
        num_draft_tokens=options.num_draft_tokens,
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
