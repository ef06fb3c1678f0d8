"""Step pages: who gets them, and what is left of them."""

from __future__ import annotations

from lamella.kv_cache import step_pages
from lamella.kv_cache.chunk_pages import ChunkPages
from lamella.kv_cache.row_commits import RowCommits
from lamella.kv_cache.step_pages import StepPages
from tests.helpers.planted_faults.planting import replaces


@replaces(RowCommits, "_commit_new_blocks")
def step_page_committed_to_the_tree(original, commits, row, blocks, **options):
    first, commits._first_step_page = commits._first_step_page, 2**62
    nodes = original(commits, row, blocks, **options)
    commits._first_step_page = first
    return nodes


@replaces(ChunkPages, "drop")
def step_pages_kept_after_the_step(original, chunks, row):
    pass


@replaces(ChunkPages, "drop")
def step_page_freed_to_the_arena(original, chunks, row):
    for group, first, last in chunks.step_blocks.get(row, ()):
        for page in chunks._rows.pages[group, row, first:last].tolist():
            chunks._supply.arena.free(group, page)
    original(chunks, row)


@replaces(ChunkPages, "passing_blocks")
def window_at_the_end_kept_one_block_late(original, chunks, *args):
    passing = original(chunks, *args)
    return [*passing[:-1], *((group, first, last + 1) for group, first, last in passing[-1:])]


@replaces(ChunkPages, "passing_blocks")
def window_where_prompts_part_not_kept(original, chunks, row, *args):
    junctions = chunks._rows.junction
    junction, junctions[row] = int(junctions[row]), -1
    passing = original(chunks, row, *args)
    junctions[row] = junction
    return passing


@replaces(step_pages, "can_have_step_pages")
def kv_that_is_read_later_in_step_pages(original, layout, group):
    return layout.groups[group].spec.is_windowed


@replaces(StepPages, "__init__")
def region_begins_in_the_last_slab(original, pages, layout, num_slabs, num_bytes):
    original(pages, layout, num_slabs, num_bytes)
    pages.first_page -= layout.groups[0].page_units


@replaces(StepPages, "__init__")
def region_ends_a_page_later(original, pages, layout, num_slabs, num_bytes):
    original(pages, layout, num_slabs, num_bytes)
    pages._num_pages = [count and count + 1 for count in pages._num_pages]


@replaces(StepPages, "reset")
def region_never_free_again(original, pages):
    pass


@replaces(StepPages, "take")
def step_page_given_twice(original, pages, group, count):
    taken = pages._num_taken[group]
    given = original(pages, group, count)
    pages._num_taken[group] = taken
    return given


@replaces(StepPages, "give_back")
def step_pages_of_a_failed_attempt_lost(original, pages, group, count):
    pass
