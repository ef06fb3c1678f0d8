"""Some of a step's new tokens alone: what the others would have got makes no difference to them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lamella.attention.contract import attend
from lamella.attention.native_backend import NativeBackend
from lamella.attention.reference import ReferenceBackend
from lamella.attention.torch_backend import TorchBackend
from lamella.errors import InvariantError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, SlidingWindowSpec
from lamella.native.attention import attention_kernels
from tests.helpers.attention_cases import Ragged, make_case

SHAPE = {"num_kv_heads": 2, "k_dim": 16, "v_dim": 16, "itemsize_bytes": 4}
SPECS = [
    FullAttentionSpec(**SHAPE),
    SlidingWindowSpec(window_tokens=11, **SHAPE),
    ChunkedLocalAttentionSpec(attention_chunk_tokens=12, **SHAPE),
]
REQUESTS = [Ragged(20), Ragged(3), Ragged(9, 40), Ragged(0, 7), Ragged(0), Ragged(1, 30)]
BACKENDS = [ReferenceBackend(), TorchBackend()]
if (kernels := attention_kernels()) is not None:
    BACKENDS.append(NativeBackend(kernels))


def case_of(spec, backend):
    return make_case(spec, REQUESTS, num_heads=4, page_tokens=16, panels=backend.name == "native")


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: type(spec).__name__)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_each_token_gets_what_it_gets_among_all(backend, spec, share):
    case = case_of(spec, backend)
    expected, arena = case.run(backend)
    num_tokens = len(case.query)
    tokens = np.flatnonzero(np.random.default_rng(4).random(num_tokens) < share)
    before = arena.clone()
    metadata = case.metadata.of_tokens(tokens)
    assert metadata.num_tokens == len(tokens)
    assert metadata.slot_mapping.tolist() == case.metadata.slot_mapping[tokens].tolist()
    out = attend(backend, case.params, case.cache(backend, arena), case.query[tokens], None, None, metadata)
    if backend.name == "torch":
        torch.testing.assert_close(out, expected[tokens], rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(out, expected[tokens])
    assert torch.equal(arena, before)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_k_and_v_of_some_tokens_and_queries_of_others(backend):
    """The window of the last query of the third request, positions 38 to 48; nothing else of it is written."""
    case = case_of(SPECS[1], backend)
    expected, _ = case.run(backend)
    written, asked = np.arange(2 + 29, 2 + 40), np.array([2 + 39])
    arena = case.arena.clone()
    out = attend(
        backend, case.params, case.cache(backend, arena), case.query[asked], case.new_keys[written],
        case.new_values[written], case.metadata.of_tokens(written), queries=case.metadata.of_tokens(asked),
    )  # fmt: skip
    torch.testing.assert_close(out, expected[asked], rtol=1e-5, atol=1e-6)


def test_neighbours_of_one_request_stay_one():
    """Tokens 0 and 1 are decodes, 2 to 41 positions 9 to 48, 42 to 48 positions 0 to 6, 49 a request of one, 50 to 79
    positions 1 to 30."""
    metadata = case_of(SPECS[0], ReferenceBackend()).metadata
    some = metadata.of_tokens(np.array([1, 2, 5, 6, 7, 41, 42, 43, 49, 50, 78, 79]))
    assert some.query_start_host.tolist() == [0, 1, 2, 5, 6, 8, 9, 10, 12]
    assert some.seq_lens_host.tolist() == [4, 10, 15, 49, 2, 1, 2, 31]
    assert some.block_tables_host.tolist() == [
        metadata.block_tables_host[request].tolist() for request in (1, 2, 2, 2, 3, 4, 5, 5)
    ]
    assert some.num_decodes == 2, "as many as come before the first that has several"
    for on_host, tensor in (
        (some.query_start_host, some.query_start),
        (some.seq_lens_host, some.seq_lens),
        (some.first_blocks_host, some.first_blocks),
        (some.first_keys_host, some.first_keys),
        (some.block_tables_host, some.block_tables[some.table_rows]),
    ):
        assert tensor.tolist() == on_host.tolist()
    assert metadata.of_tokens(np.array([3, 9])) is metadata.of_tokens(np.array([3, 9]))


def test_queries_that_are_not_the_metadata_s_tokens_are_refused():
    case = case_of(SPECS[0], ReferenceBackend())
    with pytest.raises(InvariantError, match=r"queries of 80 tokens and metadata of 2; pass one query for each token"):
        attend(
            ReferenceBackend(), case.params, case.cache(ReferenceBackend(), case.arena), case.query, None, None,
            case.metadata.of_tokens(np.array([4, 5])),
        )  # fmt: skip
