"""Steps planned by hand, run: each sampled position gets what a step that ends there gives it, and what transformers
does; several of a request in one step, as for drafts that are to be verified, among them. Pages move and are copied
before the step reads them.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from lamella.engine.config import EngineConfig
from lamella.engine.model_setup import load_engine
from lamella.kv_cache.page_transfers import PageCopies, PageMoves
from lamella.model_executor.runner import ModelRunner
from lamella.model_executor.step_plan import SamplingBatch, StepPlan, StepResult
from tests.helpers.hand_plans import PagedSequences, Turn, sampled_places
from tests.helpers.sampling import make_batch
from tests.helpers.tiny_decoders import save_tiny_decoder
from tests.helpers.tiny_gemma import save_tiny_gemma

SEQUENCES = [np.random.default_rng(3).integers(6, 320, size=length).tolist() for length in (21, 52, 47, 25)]
# One step of each: a decode, a chunk that does not end its prompt, a draft of two tokens, a prompt of which all count.
ALL_AT_ONCE = [Turn(0, 0, 1, 1), Turn(1, 0, 40, 0), Turn(2, 0, 47, 3), Turn(3, 0, 25, 25)]
EARLIER = [Turn(0, 0, 20, 0), Turn(1, 0, 31, 0), Turn(2, 0, 44, 0), Turn(3, 0, 17, 0)]
LATER = [Turn(0, 20, 21, 1), Turn(1, 31, 52, 0), Turn(2, 44, 47, 3), Turn(3, 17, 25, 2)]
# Log-probabilities take whole rows of logits; without them, the head finds the few columns that a row needs.
ASKS = {"logprobs": {"num_logprobs": 5}, "few columns": {"top_k": 9}}


# Windows above full attention: there is something that the last layers need not compute.
GEMMA_LAYERS = [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full", "sliding", "sliding")]


@pytest.fixture(scope="module", params=["gemma 3", "qwen2 as a hybrid"])
def model(request, tmp_path_factory):
    """(its folder, transformers' logits of each sequence)"""
    folder = tmp_path_factory.mktemp("model")
    if request.param == "gemma 3":
        oracle = save_tiny_gemma(folder, seed=5, layer_types=GEMMA_LAYERS)
    else:
        oracle = save_tiny_decoder(folder, request.param, seed=5)
    with torch.inference_mode():
        return str(folder), [oracle(torch.tensor([tokens])).logits[0].float() for tokens in SEQUENCES]


def make_runner(folder: str, backend: str, *, prunes: bool) -> ModelRunner:
    config = EngineConfig(model=folder, attention_backend=backend, max_model_len=128, kv_cache_memory_bytes=2**23)
    runner = load_engine(config).runner
    runner.prunes = prunes
    return runner


def sampling_of(places: list[tuple[int, int]], **asks) -> SamplingBatch:
    """Greedy and random by turns; a draw goes by its place alone."""
    return make_batch(
        *(
            {"temperature": 0.9 * ((sequence + position) % 2), "seed": sequence, "draw_index": position, **asks}
            for sequence, position in places
        )
    )


def planned(paged: PagedSequences, turns: list[Turn], **asks) -> StepPlan:
    return paged.plan(turns, sampling_of(list(sampled_places(turns)), **asks))


def rows_of(result: StepResult) -> list[tuple]:
    assert result.unusable == {}
    found = []
    for row, token_id in enumerate(result.token_ids.tolist()):
        each = result.logprobs.get(row)
        of_row = () if each is None else (each.logprob, each.rank, each.top_ids.tolist(), each.top_logprobs.tolist())
        found.append((token_id, *of_row))
    return found


def alone(runner: ModelRunner, sequence: int, position: int, **asks) -> tuple:
    """What a step of this sequence alone gives that computes it up to the position."""
    paged = PagedSequences(runner, [SEQUENCES[sequence]], keeps_windows=True)
    plan = paged.plan([Turn(0, 0, position + 1, 1)], sampling_of([(sequence, position)], **asks))
    return rows_of(runner.execute(plan))[0]


@pytest.mark.parametrize("prunes", [True, False])
@pytest.mark.parametrize("asks", ASKS.values(), ids=ASKS)
def test_each_position_gets_the_bits_of_a_step_that_ends_there(model, asks, prunes):
    folder, _ = model
    runner = make_runner(folder, "native", prunes=prunes)
    paged = PagedSequences(runner, SEQUENCES, keeps_windows=False)
    plan = planned(paged, ALL_AT_ONCE, **asks)
    leaving = runner.receptive_field.needed_tokens(plan)
    num_layers = len(runner.places)
    assert leaving[num_layers].tolist() == [0, 85, 86, 87, *range(88, 113)]
    assert len(leaving[num_layers - 1]) < len(plan.token_ids), "no layer but the last leaves anything out"
    at_once = rows_of(runner.execute(plan))

    paged = PagedSequences(runner, SEQUENCES, keeps_windows=True)
    assert rows_of(runner.execute(planned(paged, EARLIER))) == []
    later = rows_of(runner.execute(planned(paged, LATER, **asks)))

    for turns, found in ((ALL_AT_ONCE, at_once), (LATER, later)):
        places = list(sampled_places(turns))
        assert len(found) == len(places)
        for place, row in zip(places, found, strict=True):
            assert row == alone(runner, *place, **asks), place


@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("prunes", [True, False])
def test_each_position_gets_what_transformers_gives_it(model, backend, prunes):
    folder, logits = model
    runner = make_runner(folder, backend, prunes=prunes)
    paged = PagedSequences(runner, SEQUENCES, keeps_windows=False)
    result = runner.execute(planned(paged, ALL_AT_ONCE, num_logprobs=5))
    for row, (sequence, position) in enumerate(sampled_places(ALL_AT_ONCE)):
        expected, found = logits[sequence][position].log_softmax(-1), result.logprobs[row]
        assert found.token_id == result.token_ids[row]
        if (sequence + position) % 2 == 0:
            assert found.token_id == int(expected.argmax())
        assert found.logprob == pytest.approx(float(expected[found.token_id]), abs=1e-4)
        np.testing.assert_allclose(found.top_logprobs, expected[found.top_ids].numpy(), atol=1e-4)
        np.testing.assert_allclose(found.top_logprobs, expected.topk(5).values.numpy(), atol=1e-4)


def test_a_later_step_takes_any_of_the_samples_of_the_one_before(model):
    """As StepPlan.token_sources says: the two samples behind the first of the four that the draft's row has, and the
    decode's."""
    folder, _ = model
    runner = make_runner(folder, "native", prunes=True)
    turns = [Turn(0, 0, 20, 1), Turn(2, 0, 40, 4)]
    result = runner.execute(planned(PagedSequences(runner, SEQUENCES, keeps_windows=True), turns))
    known = [list(tokens) for tokens in SEQUENCES]
    known[0][20], known[2][40:42] = int(result.token_ids[0]), result.token_ids[2:4].tolist()
    following = [Turn(0, 20, 21, 1), Turn(2, 40, 42, 2)]
    found = []
    for sequences, sources in ((known, None), (SEQUENCES, np.array([0, 2, 3]))):
        paged = PagedSequences(runner, sequences, keeps_windows=True)
        runner.execute(planned(paged, turns))
        sampling = sampling_of(list(sampled_places(following)), num_logprobs=3)
        found.append(rows_of(runner.execute(paged.plan(following, sampling, sources))))
    assert found[0] == found[1]
    assert known[0][20] != SEQUENCES[0][20]
    assert known[2][40:42] != SEQUENCES[2][40:42]


def test_what_is_launched_is_on_the_device_before_anybody_waits_for_it(model):
    folder, _ = model
    runner = make_runner(folder, "native", prunes=True)
    paged = PagedSequences(runner, SEQUENCES, keeps_windows=True)
    launched = runner.launch(planned(paged, [Turn(0, 0, 20, 2), Turn(3, 0, 25, 1)], num_logprobs=1))
    assert launched.token_ids.dtype == torch.int64
    result = launched.result()
    assert launched.token_ids.tolist() == result.token_ids.tolist()
    assert rows_of(launched.result()) == rows_of(result)
    assert [row[0] for row in rows_of(result)] == [
        alone(runner, 0, 18)[0],
        alone(runner, 0, 19)[0],
        alone(runner, 3, 24)[0],
    ]


def test_a_step_without_samples_gives_none_and_writes_what_later_ones_read(model):
    folder, _ = model
    runner = make_runner(folder, "native", prunes=True)
    paged = PagedSequences(runner, SEQUENCES, keeps_windows=True)
    result = runner.execute(planned(paged, [Turn(1, 0, 40, 0)]))
    assert (result.token_ids.tolist(), result.logprobs, result.unusable) == ([], {}, {})
    (row,) = rows_of(runner.execute(planned(paged, [Turn(1, 40, 52, 1)])))
    assert row == alone(runner, 1, 51)


@pytest.mark.parametrize("as_moves", [False, True])
def test_pages_are_copied_before_the_step_reads_them(model, as_moves):
    """The second prompt begins with the first's 20 tokens and computes the rest, its first pages being copies."""
    folder, _ = model
    runner = make_runner(folder, "native", prunes=True)
    sequences = [SEQUENCES[1][:21], SEQUENCES[1][:40]]
    paged = PagedSequences(runner, sequences, keeps_windows=True)
    runner.execute(planned(paged, [Turn(0, 0, 20, 0)]))
    plan = planned(paged, [Turn(1, 20, 40, 1)], num_logprobs=3)
    num_blocks = -(-20 // runner.layout.page_tokens)
    targets = [part.block_tables[0, :num_blocks] for part in plan.groups]
    sources = [part.block_tables[0, :num_blocks] for part in planned(paged, [Turn(0, 20, 21, 1)]).groups]
    if as_moves:
        moves = tuple(PageMoves(group, *pair) for group, pair in enumerate(zip(sources, targets, strict=True)))
        plan = replace(plan, moves=moves)
    else:
        groups = zip(plan.groups, sources, targets, strict=True)
        plan = replace(plan, groups=tuple(replace(part, copies=PageCopies(*pages)) for part, *pages in groups))
    found = rows_of(runner.execute(plan))
    whole = PagedSequences(runner, [SEQUENCES[1]], keeps_windows=True)
    sampling = sampling_of([(1, 39)], num_logprobs=3)
    assert found == rows_of(runner.execute(whole.plan([Turn(0, 0, 40, 1)], sampling)))
    assert found[0] == alone(runner, 1, 39, num_logprobs=3)
