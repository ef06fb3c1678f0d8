"""What of an arena lies in free pages that the group in need cannot take: request-shaped traffic, without a model.

A request holds full pages for its whole length and sliding pages for its window; a tick is the time in which a
decoding request fills one page. Requests of random lengths are admitted as long as all that are alive would need
less than `demand` times the arena; phases of few long requests (full-heavy) alternate with phases of many short
ones (sliding-heavy). Part of those that finish stay cached: nobody owns their pages, and the oldest go when an
allocation fails. If it fails with nothing left to evict, that is a *failure*: it is measured, and the youngest
request is preempted.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from lamella.kv_cache.arena import NULL_PAGE, Arena
from lamella.kv_cache.layout import KVLayout

COMPACT = ("never", "before-eviction", "after-eviction")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Lengths in blocks: (least, most), drawn log-uniformly; `long` for full-heavy phases, `short` for the other.

    A long request is cut to what fits in half of the arena. compact: when a failed allocation is met with
    `Arena.compact`, one of COMPACT; "after-eviction" is when nothing is left to evict.
    """

    long_prompt: tuple[int, int] = (64, 1024)
    long_output: tuple[int, int] = (4, 64)
    short_prompt: tuple[int, int] = (2, 24)
    short_output: tuple[int, int] = (2, 32)
    demand: float = 1.1
    phase_ticks: int = 60
    chunk_blocks: int = 32
    chunks_per_tick: int = 4
    cached_share: float = 0.5
    compact: str = COMPACT[1]


@dataclass(slots=True)
class Fragmentation:
    """What one run saw. Shares are of the arena without its null slab."""

    unusable: list[float] = field(default_factory=list)  # at each failure: in no page, no use to the failing group
    idle: list[float] = field(default_factory=list)  # at each tick: in lent slabs, but in no page
    num_allocated_units: int = 0
    num_moved_units: int = 0
    num_evicted_units: int = 0


class _Holder:
    """A request, or what is cached of one: pages by block, per group."""

    __slots__ = ("computed", "pages", "prompt", "target", "total")

    def __init__(self, num_groups: int, prompt: int, total: int) -> None:
        self.pages: list[dict[int, int]] = [{} for _ in range(num_groups)]
        self.prompt = prompt
        self.total = total
        self.computed = 0
        self.target = 0  # after a preemption: what had been computed, and is prefilled again

    @property
    def prefill_end(self) -> int:
        return max(self.prompt, self.target)


class FragmentationRun:
    """Traffic over one arena of `num_slabs` lendable slabs."""

    def __init__(self, layout: KVLayout, num_slabs: int, traffic: Traffic | None = None, *, seed: int = 0) -> None:
        self.layout = layout
        self.traffic = Traffic() if traffic is None else traffic
        self.arena = Arena(layout, num_slabs + 1)
        self.arena_units = num_slabs * layout.slab_units
        self.page_units = [group.page_units for group in layout.groups]
        self.result = Fragmentation()
        self._random = random.Random(seed)
        self._running: list[_Holder] = []
        self._waiting: deque[_Holder] = deque()
        self._cached: deque[_Holder] = deque()
        self._owner: dict[int, tuple[dict[int, int], int]] = {}  # page in use -> who has it, as which block
        self._may_restart = False
        self._tick = 0

    def run(self, num_ticks: int) -> Fragmentation:
        for _ in range(num_ticks):
            self._run_tick()
        return self.result

    def _run_tick(self) -> None:
        self._admit()
        turns = [request for request in self._running for _ in range(self._num_turns(request))]
        self._random.shuffle(turns)
        for request in turns:
            if request in self._running:
                self._advance(request)
        idle_units = sum(self._idle_units(group) for group in range(len(self.page_units)))
        self.result.idle.append(idle_units / self.arena_units)
        self._tick += 1

    # Requests

    def _admit(self) -> None:
        if self._waiting and (self._may_restart or not self._running):
            self._running.append(self._waiting.popleft())
            self._may_restart = False
        demand = sum(self._units_at(one, max(one.computed, one.target)) for one in [*self._running, *self._waiting])
        while not self._waiting and demand < self.traffic.demand * self.arena_units:
            request = self._draw()
            self._running.append(request)
            demand += self._units_at(request, request.prompt)

    def _draw(self) -> _Holder:
        traffic = self.traffic
        is_long = self._tick // traffic.phase_ticks % 2 == 0
        prompt = self._draw_length(traffic.long_prompt if is_long else traffic.short_prompt)
        total = prompt + self._draw_length(traffic.long_output if is_long else traffic.short_output)
        request = _Holder(len(self.page_units), prompt, total)
        while self._units_at(request, request.total) > self.arena_units / 2:
            request.total = request.total * 3 // 4
            request.prompt = min(request.prompt, request.total)
        return request

    def _num_turns(self, request: _Holder) -> int:
        return self.traffic.chunks_per_tick if request.computed < request.prefill_end else 1

    def _draw_length(self, bounds: tuple[int, int]) -> int:
        least, most = bounds
        return round(least * (most / least) ** self._random.random())

    def _first_kept(self, group: int, computed: int) -> int:
        page_tokens = self.layout.page_tokens
        return self.layout.groups[group].spec.first_needed(computed * page_tokens) // page_tokens

    def _units_at(self, request: _Holder, computed: int) -> int:
        return sum(
            units * (computed - self._first_kept(group, computed)) for group, units in enumerate(self.page_units)
        )

    def _advance(self, request: _Holder) -> None:
        if request.computed == request.total:
            self._finish(request)
            return
        for group, pages in enumerate(request.pages):
            first = self._first_kept(group, request.computed)
            for block in [block for block in pages if block < first]:
                self._free(group, pages.pop(block))
        end = request.computed + 1
        if request.computed < request.prefill_end:
            end = min(request.prefill_end, request.computed + self.traffic.chunk_blocks)
        for group, pages in enumerate(request.pages):
            near = pages.get(request.computed - 1, NULL_PAGE)
            taken = self._allocate(group, end - request.computed, near, request)
            if taken is None:
                return
            for block, page in zip(range(request.computed, end), taken, strict=True):
                pages[block] = page
                self._owner[page] = pages, block
        request.computed = end

    def _finish(self, request: _Holder) -> None:
        self._running.remove(request)
        self._may_restart = True
        self._let_go(request)

    def _let_go(self, request: _Holder) -> None:
        """Cache what the request holds, or free it."""
        if self._random.random() < self.traffic.cached_share:
            cached = _Holder(len(self.page_units), 0, 0)
            cached.pages, request.pages = request.pages, cached.pages
            self._cached.append(cached)
        else:
            self._free_all(request)

    def _free_all(self, holder: _Holder) -> None:
        for group, pages in enumerate(holder.pages):
            for page in reversed(pages.values()):
                self._free(group, page)
            pages.clear()

    def _free(self, group: int, page: int) -> None:
        self.arena.free(group, page)
        del self._owner[page]

    # Memory

    def _allocate(self, group: int, count: int, near: int, asker: _Holder) -> list[int] | None:
        """Pages, after evictions and preemptions as needed; None: the asker itself was preempted."""
        while True:
            pages = self._allocate_or_evict(group, count, near)
            if pages is not None:
                self.result.num_allocated_units += count * self.page_units[group]
                return pages
            self.result.unusable.append(self._unusable_units(group) / self.arena_units)
            victim = self._running.pop()
            # Freed, not cached: it is freed because the memory is needed now.
            self._free_all(victim)
            victim.target, victim.computed = max(victim.target, victim.computed), 0
            self._waiting.append(victim)
            if victim is asker:
                return None

    def _allocate_or_evict(self, group: int, count: int, near: int) -> list[int] | None:
        while (pages := self.arena.allocate(group, count, near)) is None:
            if self.traffic.compact == "before-eviction" and self._compact(group):
                near = NULL_PAGE  # it may have moved
            elif self._cached:
                evicted = self._cached.popleft()
                self.result.num_evicted_units += sum(
                    units * len(held) for units, held in zip(self.page_units, evicted.pages, strict=True)
                )
                self._free_all(evicted)
            elif self.traffic.compact == "after-eviction" and self._compact(group):
                near = NULL_PAGE
            else:
                return None
        return pages

    def _compact(self, group: int) -> bool:
        moves = self.arena.compact(group)
        if moves is None:
            return False
        for source, target in zip(moves.src_pages.tolist(), moves.dst_pages.tolist(), strict=True):
            pages, block = self._owner.pop(source)
            pages[block] = target
            self._owner[target] = pages, block
        self.result.num_moved_units += len(moves.src_pages) * self.page_units[moves.group]
        return True

    def _idle_units(self, group: int) -> int:
        """Units of the group's slabs in which it has no page."""
        num_units = self.arena.num_lent_slabs[group] * self.layout.slab_units
        return num_units - self.arena.num_used[group] * self.page_units[group]

    def _unusable_units(self, group: int) -> int:
        idle_units = sum(self._idle_units(other) for other in range(len(self.page_units)))
        return idle_units - len(self.arena.free_pages_of(group)) * self.page_units[group]
