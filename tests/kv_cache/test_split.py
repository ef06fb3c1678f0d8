"""Fixed pools: the article's arithmetic, refusals, whole slabs, and the scheduler inside them."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lamella.engine.scheduling.scheduler import Scheduler
from lamella.errors import CapacityError, ConfigError
from lamella.kv_cache.arena import Arena
from lamella.kv_cache.block_manager import BlockManager
from lamella.kv_cache.capacity import batch_pages, num_requests_that_fit
from lamella.kv_cache.layout import build_layout, without_sliding
from lamella.kv_cache.report import format_bytes, kv_cache_report
from lamella.kv_cache.spec import FullAttentionSpec, SlidingWindowSpec
from lamella.kv_cache.split import cell_bytes, split_pools, split_tokens
from tests.helpers.fake_executor import FakeExecutor
from tests.helpers.simulation import Simulation, chunked, full, kind_of, sliding


def mimo_layout():
    """9 full layers of 4 KV heads and 39 sliding ones of 8, in bfloat16."""
    shape = {"k_dim": 192, "v_dim": 128, "itemsize_bytes": 2}
    full_layer = FullAttentionSpec(num_kv_heads=4, **shape)
    sliding_layer = SlidingWindowSpec(num_kv_heads=8, window_tokens=128, **shape)
    return build_layout([full_layer] * 9 + [sliding_layer] * 39, page_tokens=16)


def pair_layout(window=8):
    """One full and one sliding layer of 4 bytes a token; pages of 4 tokens, 16 bytes; a slab is one page."""
    return build_layout([full(), sliding(window)], page_tokens=4)


def pools(layout, **changes):
    arguments = {
        "memory_bytes": 2**20,
        "ratio": None,
        "max_model_len": 64,
        "longest_model_len": 1024,
        "chunk_tokens": 16,
        "interval_tokens": 4,
        "max_num_seqs": 4,
        "enable_prefix_caching": True,
    }
    return split_pools(layout, **{**arguments, **changes})


# The formula


def test_the_articles_figures_for_mimo_v2_flash():
    layout = mimo_layout()
    full_token_bytes = 4 * (192 + 128) * 2
    assert cell_bytes(layout, 0.8) == Fraction(714, 10) * full_token_bytes  # 9 + 0.8 * 39 * 2
    assert cell_bytes(layout, 0.05) == Fraction(129, 10) * full_token_bytes
    windowed_share = Fraction(4, 5) * 78 / Fraction(714, 10)
    assert float(windowed_share) == pytest.approx(0.874, abs=0.0005)
    at_default, at_small = (split_tokens(layout, 80 << 30, ratio)[0] for ratio in (0.8, 0.05))
    # floor(80 GiB / (71.4 * 2,560 B)) = 469,946 and floor(80 GiB / (12.9 * 2,560 B)) = 2,601,118, to pages of 16.
    assert (at_default, at_small) == (469_936, 2_601_104)
    assert at_small / at_default == pytest.approx(5.535, abs=0.001)


@pytest.mark.parametrize(
    ("memory_bytes", "ratio", "expected"),
    [
        (8_000, 0.5, (1000, 500)),  # cell = 4 + 0.5 * 8
        (8_056, 0.5, (1004, 500)),  # 1,007 tokens are 1,004 in whole pages; half of that, 502, is 500
        (8_000, 1, (664, 664)),  # 666.7
        (8_000, 2.5, (332, 828)),  # a ratio may exceed 1; 333.3, then 830
    ],
)
def test_hand_computed_pools(memory_bytes, ratio, expected):
    layout = build_layout([full(), sliding(8), sliding(8)], page_tokens=4)
    assert split_tokens(layout, memory_bytes, ratio) == expected


def test_a_ratio_means_the_decimal_that_was_typed():
    """0.29 * 100 is 28.999999999999996 in floating point."""
    layout = build_layout([full(), sliding(8)], page_tokens=1)
    assert split_tokens(layout, 516, 0.29) == (100, 29)  # cell = 4 + 0.29 * 4 = 5.16


def test_every_windowed_group_gets_the_ratio():
    layout = build_layout([full(), sliding(8), chunked(6, heads=3), full(heads=2)], page_tokens=4)
    # cell = 4 + 8 + 0.25 * (4 + 12) = 16
    assert split_tokens(layout, 16_000, 0.25) == (1000, 248, 248, 1000)


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 1])
def test_ten_megabytes_are_used_to_within_a_percent(ratio):
    layout = build_layout([full(heads=16), sliding(8, heads=16)], page_tokens=1)
    size = pools(layout, memory_bytes=10_000_000, ratio=ratio)
    num_full, num_windowed = size.slab_quota
    assert num_windowed == int(num_full * ratio)
    assert 0.99 < (num_full + num_windowed + 1) * 64 / 10_000_000 <= 1


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from([full(), full(3), sliding(5), sliding(8, 3), sliding(2, 7), chunked(6)]), min_size=1),
    st.integers(1, 100),
    st.integers(0, 2_000_000),
    st.booleans(),
    st.sampled_from([1, 3, 4]),
)
def test_pools_are_whole_slabs_within_the_memory(specs, percent, memory_bytes, enable_prefix_caching, page_tokens):
    """Also where slabs waste some of their bytes: the arena never gets larger than what was given."""
    layout = build_layout(specs, page_tokens=page_tokens)
    kinds = {spec.is_windowed for spec in specs}
    ratio = percent / 100 if len(kinds) == 2 and enable_prefix_caching else None
    try:
        size = pools(
            layout,
            memory_bytes=memory_bytes,
            ratio=ratio,
            max_model_len=20,
            enable_prefix_caching=enable_prefix_caching,
        )
    except CapacityError:
        return
    assert size.num_slabs == sum(size.slab_quota) + 1
    assert size.num_slabs * layout.slab_bytes <= memory_bytes
    Arena(layout, size.num_slabs, slab_quota=size.slab_quota)
    if ratio is not None:
        cell = sum(spec.token_bytes * (Fraction(percent, 100) if spec.is_windowed else 1) for spec in specs)
        for slabs, group in zip(size.slab_quota, layout.groups, strict=True):
            most_tokens = memory_bytes / cell * (Fraction(percent, 100) if group.spec.is_windowed else 1)
            assert slabs * group.pages_per_slab * page_tokens <= most_tokens


# Refusals


def test_a_windowed_pool_of_window_and_page_is_refused():
    """Seven slabs are three pages, 12 tokens, for each: exactly W + P."""
    layout = pair_layout(window=8)
    with pytest.raises(
        CapacityError, match=r"hold 12 tokens, which must be more than window \+ page = 8 \+ 4"
    ) as error:
        pools(layout, memory_bytes=7 * 16, ratio=1, max_model_len=12)
    named = int(str(error.value).split(" bytes (")[0].split()[-1])
    assert named == 9 * 16
    assert pools(layout, memory_bytes=named, ratio=1, max_model_len=12).slab_quota == (4, 4)
    with pytest.raises(CapacityError):
        pools(layout, memory_bytes=named - 1, ratio=1, max_model_len=12)


def test_mimo_refuses_a_ratio_so_small_that_the_window_does_not_fit():
    """In 1 GiB, r = 0.003 leaves 136 windowed tokens (45,408 * 0.003), r = 0.05 leaves 1,616."""
    layout = mimo_layout()
    arguments = {"memory_bytes": 1 << 30, "max_model_len": 2048, "chunk_tokens": 2048, "interval_tokens": 16}
    with pytest.raises(CapacityError, match=r"more than window \+ page = 128 \+ 16.*swa_full_tokens_ratio from 0\.01"):
        pools(layout, ratio=0.003, **arguments)
    assert pools(layout, ratio=0.05, **arguments).max_model_len == 2048


def test_a_full_pool_below_one_request_is_refused_and_what_would_do_does():
    layout = pair_layout()
    arguments = {"memory_bytes": 33 * 16, "max_model_len": 100}
    with pytest.raises(CapacityError, match="pool of full would hold 17 pages, and one request needs 25") as error:
        pools(layout, ratio=0.8, **arguments)
    named_bytes = int(str(error.value).split(" bytes (")[0].split()[-1])
    named_len = int(str(error.value).split("max_model_len of at most ")[1].split(",")[0])
    assert named_len == 68
    assert pools(layout, ratio=0.8, memory_bytes=named_bytes, max_model_len=100)
    with pytest.raises(CapacityError):
        pools(layout, ratio=0.8, memory_bytes=named_bytes - 1, max_model_len=100)
    # The longest that fits is what "auto" takes.
    assert pools(layout, ratio=0.8, memory_bytes=33 * 16, max_model_len=None).max_model_len == named_len
    low, high = (float(word) for word in str(error.value).split("ratio from ")[1].split(",")[0].split(" to "))
    for ratio in (low, high):
        assert pools(layout, ratio=ratio, **arguments).max_model_len == 100
    for ratio in (low - 0.01, high + 0.01):
        with pytest.raises(CapacityError):
            pools(layout, ratio=ratio, **arguments)


def test_no_memory_at_all_is_refused():
    with pytest.raises(CapacityError, match="hold 0 pages"):
        pools(pair_layout(), memory_bytes=0, ratio=1, max_model_len=None)


def test_chunk_and_interval_are_the_largest_that_fit():
    """Twelve slabs at r = 0.5: 8 full pages, 4 windowed. ceil((8 + c + 2) / 4) <= 4 up to c = 6, and
    ceil((7 + I) / 4) <= 4 up to I = 9. With fifteen, 10 and 5, and a block more: 1 + 2 + ceil((c + 3) / 4) <= 5 up to
    c = 5, and 1 + ceil((7 + I) / 4) <= 5 up to I = 9."""
    arguments = {"ratio": 0.5, "max_model_len": 32, "chunk_tokens": 100, "interval_tokens": 100}
    size = pools(pair_layout(), memory_bytes=13 * 16, num_blocks_more=0, **arguments)
    assert (size.slab_quota, size.chunk_tokens, size.interval_tokens) == ((8, 4), 6, 9)
    size = pools(pair_layout(), memory_bytes=16 * 16, **arguments)
    assert (size.slab_quota, size.chunk_tokens, size.interval_tokens) == ((10, 5), 5, 9)
    roomy = pools(pair_layout(), ratio=0.5, chunk_tokens=100, interval_tokens=100)
    assert (roomy.chunk_tokens, roomy.interval_tokens) == (100, 100)


@pytest.mark.parametrize("ratio", [0, -0.5, float("inf"), float("nan"), "0.5", True])
def test_a_ratio_is_a_positive_number(ratio):
    with pytest.raises(ConfigError, match="must be a positive number"):
        pools(pair_layout(), ratio=ratio)


@pytest.mark.parametrize(
    ("specs", "missing"),
    [
        ([sliding(8)] * 3, "no full-attention layers"),
        ([full()] * 3, "no windowed layers"),
        (without_sliding([full(), sliding(8), sliding(8, heads=3)]), "no windowed layers"),
    ],
)
def test_models_with_one_kind_of_layers_have_no_ratio(specs, missing):
    layout = build_layout(specs, page_tokens=4)
    with pytest.raises(ConfigError, match=missing):
        pools(layout, ratio=0.8)
    for enable_prefix_caching in (True, False):
        size = pools(layout, memory_bytes=101 * layout.slab_bytes, enable_prefix_caching=enable_prefix_caching)
        assert 100 - len(layout.groups) < sum(size.slab_quota) <= 100


# The chunk-cap rule


def test_without_prefix_caching_the_windowed_pool_is_what_requests_can_hold():
    """W = 8, P = 4, two requests, chunks of 16: one decodes with ceil((7 + 4) / 4) = 3 pages, one prefills with
    ceil((8 + 16 + 2) / 4) = 7. Full attention has the other 90 slabs."""
    arguments = {"memory_bytes": 101 * 16, "max_num_seqs": 2, "enable_prefix_caching": False}
    assert pools(pair_layout(), **arguments).slab_quota == (90, 10)
    # An interval of 12 adds two pages to the request that decodes: ceil((7 + 12) / 4) = 5.
    assert pools(pair_layout(), **arguments, interval_tokens=12).slab_quota == (88, 12)


def test_the_rule_never_takes_more_than_the_default_ratio():
    """100 slabs at r = 0.8: cell = 7.2 B, 1,600 B are 222 tokens, 55 pages, and 0.8 * 220 = 176 tokens, 44 pages."""
    arguments = {"memory_bytes": 101 * 16, "max_num_seqs": 1000}
    assert pools(pair_layout(), **arguments, enable_prefix_caching=False).slab_quota == (56, 44)
    assert pools(pair_layout(), **arguments).slab_quota == (55, 44)


def test_an_explicit_ratio_is_kept_even_where_it_is_the_default():
    size = pools(pair_layout(), memory_bytes=101 * 16, ratio=0.8, max_num_seqs=2, enable_prefix_caching=False)
    assert size.slab_quota == (55, 44)


def test_the_rule_gives_full_groups_equal_tokens():
    """Full pages of 16 B and 48 B: slabs of 48 B hold 3 and 1. 90 slabs = 3 n pages + 3 n pages / 3 ..."""
    layout = build_layout([full(), full(heads=3), sliding(8, heads=3)], page_tokens=4)
    size = pools(layout, memory_bytes=101 * 48, max_num_seqs=2, enable_prefix_caching=False)
    assert size.slab_quota[2] == 10
    pages = [slabs * group.pages_per_slab for slabs, group in zip(size.slab_quota, layout.groups, strict=True)]
    assert pages[0] // 3 == pages[1] // 3
    assert sum(size.slab_quota) == 100


# The arena


def quota_arena(quota=(2, 3), num_slabs=6):
    """Full pages of 1 unit, 5 to a slab; SWA pages of 5 units, 1 to a slab."""
    return Arena(build_layout([full()] + [sliding(8)] * 5, page_tokens=4), num_slabs, slab_quota=quota)


def test_a_group_at_its_quota_gets_nothing_though_slabs_are_free():
    arena = quota_arena()
    assert [arena.num_allocatable(group) for group in (0, 1)] == [10, 3]
    assert arena.allocate(0, 11) is None
    pages = arena.allocate(0, 10)
    assert (arena.num_allocatable(0), arena.num_free_slabs) == (0, 3)
    assert arena.allocate(0, 1) is None
    assert len(arena.allocate(1, 3)) == 3  # untouched by the other group's hunger
    assert arena.allocate(1, 1) is None
    for page in pages:
        arena.free(0, page)
    assert arena.num_free_slabs == 2
    assert arena.allocate(1, 1) is None, "a freed slab of group 0 is not for group 1"
    assert len(arena.allocate(0, 10)) == 10


def test_slabs_beyond_all_quotas_stay_free():
    arena = quota_arena(quota=(1, 1), num_slabs=6)
    assert arena.allocate(0, 6) is None
    assert len(arena.allocate(0, 5)) == 5
    assert arena.num_free_slabs == 4


@pytest.mark.parametrize(
    ("quota", "message"), [((3, 3), "sums to 6 slabs.*give 7"), ((5,), "each of 2 groups"), ((-1, 2), "at least 0")]
)
def test_quotas_that_cannot_be_are_refused(quota, message):
    with pytest.raises(ConfigError, match=message):
        quota_arena(quota=quota)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.randoms(use_true_random=False)), max_size=60))
def test_pools_do_not_feel_each_other(actions):
    """What a group can take is its quota less what it has, whatever the others do: no fragmentation crosses pools."""
    layout = build_layout([full(), full(), sliding(8, heads=3), sliding(2, heads=5)], page_tokens=4)
    quota = (2, 1, 3)
    arena = Arena(layout, 7, slab_quota=quota)
    capacity = [slabs * group.pages_per_slab for slabs, group in zip(quota, layout.groups, strict=True)]
    held: list[tuple[int, int]] = []
    for group, count, random in actions:
        room = capacity[group] - sum(owner == group for owner, _ in held)
        assert arena.num_allocatable(group) == room
        pages = arena.allocate(group, count)
        assert (pages is not None) == (count <= room)
        if pages is not None:
            held += [(group, page) for page in pages]
        elif held:
            random.shuffle(held)
            for owner, page in held[: len(held) // 2 + 1]:
                arena.free(owner, page)
            del held[: len(held) // 2 + 1]
        for owner in range(3):
            assert len({page // layout.slab_units for each, page in held if each == owner}) <= quota[owner]
    for owner, page in held:
        arena.free(owner, page)
    assert arena.num_free_slabs == 6


# The scheduler in fixed pools


class SplitSimulation(Simulation):
    """The same, with fixed pools."""

    def __init__(self, specs, *, page_tokens=4, memory_bytes, max_model_len=64, max_num_seqs=4, **changes):
        layout = build_layout(specs, page_tokens=page_tokens)
        size = pools(
            layout, memory_bytes=memory_bytes, max_model_len=max_model_len, max_num_seqs=max_num_seqs, **changes
        )  # fmt: skip
        self.size = size
        self.manager = BlockManager(
            layout, num_slabs=size.num_slabs, num_rows=max_num_seqs, max_model_len=max_model_len,
            interval_tokens=size.interval_tokens, slab_quota=size.slab_quota,
            enable_prefix_caching=changes.get("enable_prefix_caching", True),
        )  # fmt: skip
        self.scheduler = Scheduler(
            self.manager, max_num_seqs=max_num_seqs, max_num_batched_tokens=16, max_model_len=max_model_len,
            chunk_tokens=size.chunk_tokens,
        )  # fmt: skip
        self.executor = FakeExecutor(layout, [kind_of(group.spec) for group in layout.groups])
        self.max_model_len = max_model_len
        self.outputs, self.requests = {}, {}

    def step(self, **options):
        ran = super().step(**options)
        for group, quota in enumerate(self.size.slab_quota):
            assert int((self.manager.inspect().arena.slab_group == group).sum()) <= quota
        return ran


def least_bytes(layout, **arguments):
    with pytest.raises(CapacityError) as error:
        pools(layout, memory_bytes=0, **arguments)
    return int(str(error.value).split(" bytes (")[0].split()[-1])


@pytest.mark.parametrize("page_tokens", [1, 3, 4])
@pytest.mark.parametrize(
    "specs", [[full()] * 3 + [sliding(8)] * 15, [full()] * 5 + [sliding(6), sliding(9)], [sliding(5)]], ids=str
)
def test_the_smallest_pools_run_the_longest_request(specs, page_tokens):
    memory_bytes = least_bytes(build_layout(specs, page_tokens=page_tokens))
    simulation = SplitSimulation(specs, page_tokens=page_tokens, memory_bytes=memory_bytes)
    simulation.add("longest", range(40), 24)
    simulation.add("other", range(100, 120), 30)
    simulation.run()
    assert [len(tokens) for tokens in simulation.outputs.values()] == [24, 30]


def test_requests_fill_the_capped_pool_and_none_is_preempted():
    """The windowed pool of the chunk-cap rule is enough for max_num_seqs requests, in any mix of phases."""
    simulation = SplitSimulation(
        [full(), sliding(8)], memory_bytes=1000 * 16, max_num_seqs=4, enable_prefix_caching=False
    )
    assert simulation.size.slab_quota[1] == 3 * 3 + 7
    for index in range(12):
        simulation.add(f"r{index}", range(index * 100, index * 100 + 9 + 3 * index), 12)
    simulation.run()
    assert all(len(tokens) == 12 for tokens in simulation.outputs.values())
    assert simulation.scheduler.counters().num_preemptions == 0
    assert 3 * 3 <= simulation.manager.inspect().supply.peak_owned[1] <= 16


# Capacity and report


def test_requests_that_fit_counted_by_hand():
    """MiMo-V2-Flash in 8,962 slabs (80 GiB), 32,768 tokens, chunks of 8,192: 107 requests hold 107 * 2,048 full pages
    (8,429 slabs of 26) and 106 * 10 + 522 windowed ones (528 slabs of 3), 8,957 of 8,961; 108 would take 9,039."""
    arguments = {"context_tokens": 32_768, "chunk_tokens": 8192, "interval_tokens": 16}
    layout = mimo_layout()
    assert batch_pages(layout, num_requests=107, **arguments) == (107 * 2048, 106 * 10 + 522)
    assert num_requests_that_fit(layout, 8962, **arguments) == 107
    assert num_requests_that_fit(layout, 8958, **arguments) == 107
    assert num_requests_that_fit(layout, 8957, **arguments) == 106
    # r = 0.8: 1,129 slabs of full pages hold 14.3 requests.
    assert num_requests_that_fit(layout, 8961, slab_quota=(1129, 7831), **arguments) == 14
    # 180 slabs hold 540 windowed pages: the one that prefills and 1 more.
    assert num_requests_that_fit(layout, 8961, slab_quota=(7000, 180), **arguments) == 2
    assert num_requests_that_fit(layout, 8961, slab_quota=(7000, 100), **arguments) == 0


def test_the_report_says_what_the_layout_is():
    layout = build_layout([full(), full(), sliding(8, heads=3), chunked(6), full()], page_tokens=4)
    text = kv_cache_report(layout, 41, max_model_len=2000, chunk_tokens=16, interval_tokens=4, context_lengths=(32, 64))
    lines = [line.split() for line in text.splitlines()]
    assert ["0-1", "full", "full", "all", "1", "2", "2", "4"] in lines
    assert ["2", "sliding_8", "sliding", "window", "8", "3", "2", "2", "12"] in lines
    assert ["3", "chunked_6", "chunked", "local", "6", "1", "2", "2", "4"] in lines
    assert ["4", "full", "full", "all", "1", "2", "2", "4"] in lines
    # Pages of 48, 48 and 16 B: a unit of 16 B, slabs of one wide page.
    assert ["full", "3", "48", "3", "1", "0.00%"] in lines
    assert ["chunked_6", "1", "16", "1", "3", "0.00%"] in lines
    assert "unit: 16 B; slab: 3 units = 48 B" in text
    assert "41 slabs = 1,968 B (1.9 KiB), one of them the null slab; slabs move between groups" in text
    # 32 tokens: 8 full pages, 1 + ceil(11 / 4) = 4 and 1 + ceil((5 + 4) / 4) = 4 windowed: 384 + 192 + 64 B. The first
    # of k takes 1 + 2 + ceil(19 / 4) = 8 of each for its chunk: slabs 8 k + 4 k + 4 + ceil((4 k + 4) / 3) <= 40.
    assert ["32", "2", "640", "B", "8", "4", "4"] in lines
    assert ["64", "1", "1.0", "KiB", "16", "4", "4"] in lines
    split = kv_cache_report(layout, 41, max_model_len=2000, chunk_tokens=16, interval_tokens=4, slab_quota=(20, 15, 5))
    assert "fixed pools" in split
    assert ["chunked_6", "1", "16", "1", "3", "0.00%", "5", "60"] in [line.split() for line in split.splitlines()]
    # Without lengths given: powers of four from 1,024, and the longest.
    assert [line.split()[0] for line in split.splitlines()[-2:]] == ["1,024", "2,000"]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**29, "1.5 GiB"), (2**50, "1024.0 TiB")],
)
def test_sizes_are_readable(num_bytes, text):
    assert format_bytes(num_bytes) == text
