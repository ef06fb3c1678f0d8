"""The xformers backend without a GPU: its masks, what it gathers, and whole calls with a dense operator in place of
xformers' own, which runs on CUDA only."""

from __future__ import annotations

import dataclasses
import logging
import math
import sys
from typing import Any

import pytest
import torch

from lamella.attention.choice import choose_backend
from lamella.attention.reference import ReferenceBackend
from lamella.attention.torch_backend import TorchBackend
from lamella.attention.xformers_backend import XformersBackend, page_rows, pages_per_id
from lamella.attention.xformers_masks import PAGED_TOKENS, pack_keys
from lamella.errors import ConfigError, InvariantError
from tests.helpers.attention_cases import AttentionCase, Ragged, make_case, memo_entries, write_earlier_tokens
from tests.helpers.pairwise import pairwise
from tests.helpers.triton_cases import make_spec

PAGE = 8
RULES = [
    ("full", 0),
    *(("window", window) for window in (1, PAGE - 1, PAGE, PAGE + 1, 1000)),
    *(("chunk", chunk) for chunk in (PAGE - 1, PAGE, 20)),
]
EDGES = [0, 1, PAGE - 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, 3 * PAGE + 3]
BATCHES = {
    "decodes": [Ragged(prior) for prior in EDGES],
    "one decode": [Ragged(2 * PAGE - 1)],
    "first chunks": [Ragged(0, 2), Ragged(0, PAGE), Ragged(0, 3 * PAGE + 1)],
    "later chunks": [Ragged(prior, 2 + 5 * (i % 4)) for i, prior in enumerate(EDGES)],
    "two new tokens": [Ragged(40, 2)],
    "mixed": [Ragged(33), Ragged(0), Ragged(0, 17), Ragged(40, 3), Ragged(7, 1)],
    "resumed": [Ragged(30, 1, 27), Ragged(9, 1, 9), Ragged(25, 9, 25), Ragged(40, 20, 33), Ragged(40, 5, 38)],
}


def sees(rule: tuple[str, int], query: int, key: int) -> bool:
    name, reach = rule
    if key > query:
        return False
    if name == "window":
        return query - key < reach
    return name == "full" or key // reach == query // reach


def is_allowed(bias: torch.Tensor) -> torch.Tensor:
    assert ((bias == 0) | (bias == -math.inf)).all()
    return bias == 0


@pytest.mark.parametrize("batch", list(BATCHES))
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_masks_over_gathered_keys_show_each_query_its_own(rule: tuple[str, int], batch: str) -> None:
    """Every row that is gathered is looked up among the tokens that were stored; the mask's columns are these."""
    case = make_case(make_spec(*rule), BATCHES[batch], num_heads=1, page_tokens=PAGE, num_null_columns=1)
    _, arena = case.run(ReferenceBackend())  # which stores the new tokens
    cache = case.cache(ReferenceBackend(), arena)
    stored = {
        tuple(row.flatten().tolist()): (i, case.first_kept[i] + j)
        for i, rows in enumerate(case.keys)
        for j, row in enumerate(rows)
    }
    num_decodes, num_requests = case.metadata.num_decodes, len(case.requests)
    for requests in (range(num_decodes), range(num_decodes, num_requests)):
        if not len(requests):
            continue
        packed = pack_keys(case.params.spec, case.metadata, requests)
        gathered = [stored[tuple(row.flatten().tolist())] for row in cache.keys[packed.page_ids, packed.offsets]]
        values = cache.values[packed.page_ids, packed.offsets]
        expected_values = [case.values[i][position - case.first_kept[i]] for i, position in gathered]
        assert torch.equal(values, torch.stack(expected_values))
        assert len(set(gathered)) == len(gathered)
        queries = [(i, p) for i in requests for p in range(case.requests[i].num_prior, case.requests[i].seq_len)]
        allowed = is_allowed(packed.mask.materialize((len(queries), len(gathered))))
        used = set()
        for row, (i, query) in enumerate(queries):
            seen = {gathered[column] for column in allowed[row].nonzero()[:, 0].tolist()}
            first_key = case.requests[i].first_key
            assert seen == {(i, key) for key in range(first_key, query + 1) if sees(rule, query, key)}
            used |= seen
        assert used == set(gathered)  # nothing is gathered that no query sees


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_bias: Any,
    scale: float,
    op: Any = None,
) -> torch.Tensor:
    """What xformers documents, in float64. Masked keys are multiplied by weight 0, so that a NaN among them shows."""
    assert query.shape[0] == key.shape[0] == value.shape[0] == 1
    assert query.dtype == key.dtype == value.dtype
    assert query.shape[2:-1] == key.shape[2:-1] == value.shape[2:-1]
    num_queries, num_keys = query.shape[1], key.shape[1]
    heads = query.shape[2:-1]
    q, k, v = (x[0].double().flatten(1, -2) if x.ndim == 5 else x[0].double() for x in (query, key, value))
    if op is None:
        allowed = is_allowed(attn_bias.materialize((num_queries, num_keys)))
        read = torch.ones_like(allowed)
    else:
        allowed = paged_keys(attn_bias, num_queries, num_keys)
        read = blocks_read(allowed)
    out = torch.empty(num_queries, q.shape[1], v.shape[2], dtype=torch.float64)
    for row in range(num_queries):
        columns = read[row].nonzero()[:, 0]
        scores = torch.einsum("hd,nhd->hn", q[row], k[columns]) * scale
        scores = scores.masked_fill(~allowed[row, columns], -math.inf)
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v[columns])
    return out.to(query.dtype).view(1, num_queries, *heads, v.shape[2])


def paged_keys(mask: Any, num_queries: int, num_rows: int) -> torch.Tensor:
    """bool [num_queries, num_rows of pages]"""
    assert num_rows % mask.page_size == 0
    assert mask.block_tables.dtype == torch.int32
    bias = mask.materialize((num_queries, num_queries * mask.block_tables.shape[1] * mask.page_size))
    assert bias.shape[1] <= num_rows
    return torch.nn.functional.pad(is_allowed(bias), (0, num_rows - bias.shape[1]))


def blocks_read(allowed: torch.Tensor) -> torch.Tensor:
    """The paged kernel reads blocks of PAGED_TOKENS keys that have a visible one, to the last visible one."""
    blocks = allowed.unflatten(1, (-1, PAGED_TOKENS))
    positions = torch.arange(PAGED_TOKENS)
    last = torch.where(blocks, positions, -1).amax(2, keepdim=True)
    return (positions <= last).flatten(1)


FACTORS: dict[str, list[Any]] = {
    "rule": RULES,
    "batch": list(BATCHES),
    "heads": [(1, 1), (4, 1), (6, 2), (3, 3)],
    "head_dims": [(16, 16), (8, 24), (40, 8)],
    "page_tokens": [1, PAGE, 16, PAGED_TOKENS],
    "dtype": [torch.float32, torch.float16, torch.bfloat16],
    "query_dtype": [None, torch.float32],
    "scale": [None, 0.3],
    "num_null_columns": [0, 2],
}
ROUNDING = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def backend_with(operator: Any) -> XformersBackend:
    return XformersBackend(operator, TorchBackend())


def make(row: dict[str, Any], **overrides: Any) -> AttentionCase:
    num_heads, num_kv_heads = row["heads"]
    k_dim, v_dim = row["head_dims"]
    spec = make_spec(
        *row["rule"], num_kv_heads=num_kv_heads, k_dim=k_dim, v_dim=v_dim, itemsize_bytes=row["dtype"].itemsize
    )
    names = ("page_tokens", "dtype", "query_dtype", "scale", "num_null_columns")
    arguments = {name: row[name] for name in names} | overrides
    return make_case(spec, BATCHES[row["batch"]], num_heads=num_heads, **arguments)


def assert_like_reference(case: AttentionCase, backend: XformersBackend) -> None:
    expected, expected_arena = case.run(ReferenceBackend())
    actual, arena = case.run(backend)
    assert torch.equal(arena, expected_arena)
    tolerance = ROUNDING[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("row", pairwise(FACTORS), ids=lambda row: "-".join(map(str, row.values())))
def test_calls_are_the_references(row: dict[str, Any]) -> None:
    assert_like_reference(make(row), backend_with(dense_attention))


PAGED_FACTORS: dict[str, list[Any]] = {
    "rule": [("full", 0), *(("window", PAGED_TOKENS + more) for more in (-1, 0, 1)), ("window", 1), ("chunk", 48)],
    "heads": [(1, 1), (4, 1), (6, 2), (3, 3)],
    "page_tokens": [PAGED_TOKENS, 2 * PAGED_TOKENS],
    "dtype": [torch.float16, torch.bfloat16],
    "units_per_page": [1, 2, 4],
    "num_null_columns": [0, 1],
}


@pytest.mark.parametrize("row", pairwise(PAGED_FACTORS), ids=lambda row: "-".join(map(str, row.values())))
def test_decoding_on_pages_is_the_references(row: dict[str, Any]) -> None:
    num_heads, num_kv_heads = row["heads"]
    spec = make_spec(*row["rule"], num_kv_heads=num_kv_heads, k_dim=16, v_dim=16, itemsize_bytes=2)
    names = ("page_tokens", "dtype", "units_per_page", "num_null_columns")
    edges = (0, PAGED_TOKENS - 1, PAGED_TOKENS, 3 * PAGED_TOKENS + 5)
    case = make_case(spec, [Ragged(edge) for edge in edges], num_heads=num_heads, **{name: row[name] for name in names})
    write_earlier_tokens(case)
    ops = []

    def operator(*tensors: torch.Tensor, op: Any = None, **arguments: Any) -> torch.Tensor:
        ops.append(op)
        return dense_attention(*tensors, op=op, **arguments)

    assert_like_reference(case, backend_with(operator))
    from xformers.ops.fmha.triton_splitk import FwOp

    assert ops == [FwOp]


def test_the_paged_kernel_itself_or_gathered_keys(caplog: pytest.LogCaptureFixture) -> None:
    """In Triton's interpreter, as far as this Triton still has what the kernel is written with."""
    from xformers.ops.fmha.common import Inputs
    from xformers.ops.fmha.triton_splitk import FwOp

    ops = []

    def operator(*tensors: torch.Tensor, attn_bias: Any, scale: float, op: Any) -> torch.Tensor:
        ops.append(op)
        if op is None:
            return dense_attention(*tensors, attn_bias=attn_bias, scale=scale)
        return FwOp.apply(Inputs(*tensors, attn_bias=attn_bias, scale=scale), needs_gradient=False)[0]

    backend = backend_with(operator)
    with caplog.at_level(logging.WARNING, logger="lamella.attention.xformers_backend"):
        for rule, heads in ((("window", 65), (4, 2)), (("full", 0), (2, 2)), (("chunk", 48), (3, 1))):
            spec = make_spec(*rule, num_kv_heads=heads[1], itemsize_bytes=2)
            requests = [Ragged(0), Ragged(63), Ragged(64), Ragged(133)]
            case = make_case(
                spec, requests, num_heads=heads[0], page_tokens=PAGED_TOKENS, dtype=torch.float16, num_null_columns=1
            )
            write_earlier_tokens(case)
            expected, _ = case.run(ReferenceBackend())
            actual, _ = case.run(backend)
            torch.testing.assert_close(actual, expected, rtol=3e-3, atol=3e-3)
    messages = [record.getMessage() for record in caplog.records]
    if messages:
        assert len(messages) == 1
        assert messages[0].startswith("attention by xformers gathers keys in place of reading pages: its paged kernel")
        assert ops == [FwOp, None, None, None]
    else:
        assert ops == [FwOp] * 3


@pytest.mark.parametrize(
    ("change", "num_per_id"),
    [
        ({}, 2),
        ({"units_per_page": 1}, 4),
        ({"units_per_page": 4}, 1),
        ({"units_per_page": 3}, None),  # a unit is no whole number of K pages
        ({"page_tokens": PAGED_TOKENS // 2}, None),
        ({"page_tokens": 96}, None),
        ({"v_dim": 8}, None),
        ({"k_dim": 24, "v_dim": 24}, None),
    ],
    ids=str,
)
def test_which_layouts_are_read_in_place(change: dict[str, int], num_per_id: int | None) -> None:
    arguments = {"page_tokens": PAGED_TOKENS, "units_per_page": 2, "k_dim": 16, "v_dim": 16} | change
    dims = {name: arguments.pop(name) for name in ("k_dim", "v_dim")}
    case = make_case(make_spec("full", num_kv_heads=2, **dims), [Ragged(200), Ragged(3)], num_heads=2, **arguments)
    cache = case.cache(ReferenceBackend(), case.arena)
    assert pages_per_id(cache) == num_per_id
    if num_per_id is not None:
        for pages in (cache.keys, cache.values):
            rows = page_rows(pages)
            assert rows.is_contiguous()
            every_page = rows.unflatten(0, (-1, arguments["page_tokens"]))
            for page_id in case.metadata.block_tables_host[case.metadata.block_tables_host >= 0].tolist():
                assert every_page[page_id * num_per_id].data_ptr() == pages[page_id].data_ptr()


@pytest.mark.parametrize("request_", [Ragged(90, 1, 70), Ragged(100, 1, 70)], ids=["in the window", "below it"])
def test_a_resumed_request_is_not_decoded_on_pages(request_: Ragged) -> None:
    """Its page begins with what was never written: NaN here, which a masked key's weight of 0 does not undo."""
    spec = make_spec("window", 24, k_dim=16, v_dim=16, itemsize_bytes=2)
    case = make_case(spec, [request_, Ragged(5)], num_heads=1, page_tokens=PAGED_TOKENS, dtype=torch.float16)

    def operator(*tensors: torch.Tensor, op: Any = None, **arguments: Any) -> torch.Tensor:
        assert op is None
        return dense_attention(*tensors, **arguments)

    assert pages_per_id(case.cache(ReferenceBackend(), case.arena)) is not None
    assert_like_reference(case, backend_with(operator))


def test_a_sliding_layer_gathers_its_window_whatever_the_context() -> None:
    counts = []

    def operator(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **arguments: Any) -> torch.Tensor:
        counts.append(key.shape[1])
        return dense_attention(query, key, value, **arguments)

    for prior in (100, 100_000):
        case = make_case(make_spec("window", 20), [Ragged(prior), Ragged(prior, 7)], num_heads=1, page_tokens=PAGE)
        assert_like_reference(case, backend_with(operator))
    assert counts == [20, 20 + 7 - 1] * 2


def never(*tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
    raise AssertionError("xformers was asked for what it cannot express")


def no_operator(*tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
    raise NotImplementedError("No operator found")


def test_an_operator_that_is_lacking_is_asked_for_once() -> None:
    num_calls = 0

    def operator(*tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return no_operator()

    backend = backend_with(operator)
    for heads, num_widths in ((8, 1), (8, 1), (16, 2)):
        spec = make_spec("window", 9, k_dim=heads, v_dim=heads)
        case = make_case(spec, BATCHES["mixed"], num_heads=2, page_tokens=PAGE)
        expected, _ = case.run(ReferenceBackend())
        torch.testing.assert_close(case.run(backend)[0], expected, rtol=2e-5, atol=2e-5)
        assert num_calls == num_widths


@pytest.mark.parametrize(
    ("arguments", "operator", "reason"),
    [
        ({"with_sinks": True}, never, "its masks have no attention sinks"),
        ({"softcap": 5.0}, never, "its masks have no soft-cap"),
        ({}, no_operator, "none of its operators takes heads of 16 and 16 dimensions in torch.float32 on cpu"),
    ],
    ids=["sinks", "softcap", "no operator"],
)
def test_what_it_cannot_do_is_done_by_another_and_logged_once(
    arguments: dict[str, Any], operator: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = make_case(make_spec("window", 9), BATCHES["mixed"], num_heads=2, page_tokens=PAGE, **arguments)
    expected, _ = case.run(ReferenceBackend())
    backend = backend_with(operator)
    with caplog.at_level(logging.WARNING, logger="lamella.attention.xformers_backend"):
        for _ in range(2):
            actual, _ = case.run(backend)
            torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    assert [record.getMessage() for record in caplog.records] == [f"attention by torch instead of xformers: {reason}"]


def test_fp8_pages_are_left_to_another() -> None:
    class Recording(TorchBackend):
        calls: tuple[str, ...] = ()

        def decode(self, *arguments: Any) -> None:
            self.calls = (*self.calls, "decode")

        def prefill(self, *arguments: Any) -> None:
            self.calls = (*self.calls, "prefill")

    spec = make_spec("full", itemsize_bytes=1)
    case = make_case(spec, [Ragged(3), Ragged(0, 4)], num_heads=1, page_tokens=PAGE, dtype=torch.float8_e4m3fn)
    other = Recording()
    backend = XformersBackend(never, other)
    cache = case.cache(backend, case.arena)
    query = torch.randn(5, 1, 16)
    backend.decode(case.params, cache, query[:1], case.metadata, torch.empty(1, 1, 16))
    backend.prefill(case.params, cache, query[1:], case.metadata, torch.empty(4, 1, 16))
    assert other.calls == ("decode", "prefill")


@pytest.mark.parametrize("page_tokens", [4, PAGED_TOKENS])
@pytest.mark.parametrize("num_new", [1, 3])
def test_a_table_that_starts_above_the_window_is_refused(page_tokens: int, num_new: int) -> None:
    spec = make_spec("window", 9, itemsize_bytes=2)
    case = make_case(spec, [Ragged(140, num_new)], num_heads=2, page_tokens=page_tokens, dtype=torch.float16)
    case.metadata.first_blocks_host[0] += 1
    with pytest.raises(InvariantError, match="a table must cover every block"):
        case.run(backend_with(dense_attention))


def test_layers_of_a_group_share_the_plan() -> None:
    """And two specs of one metadata do not."""
    case = make_case(make_spec("window", 9), BATCHES["mixed"], num_heads=2, page_tokens=PAGE)
    backend = backend_with(dense_attention)
    case.run(backend)
    plans = memo_entries(case.metadata)
    cache = case.cache(backend, case.arena.clone())
    backend.write_kv(cache, case.new_keys, case.new_values, case.metadata)
    out = torch.empty_like(case.query)
    num_decodes = case.metadata.num_decodes
    backend.decode(case.params, cache, case.query[:num_decodes], case.metadata, out[:num_decodes])
    assert {name: id(plan) for name, plan in memo_entries(case.metadata).items()} == {
        name: id(plan) for name, plan in plans.items()
    }
    narrower = dataclasses.replace(case.params, spec=make_spec("window", 2))
    expected = torch.empty_like(out[:num_decodes])
    for one, result in ((backend, out[:num_decodes]), (ReferenceBackend(), expected)):
        one.decode(narrower, cache, case.query[:num_decodes], case.metadata, result)
    torch.testing.assert_close(out[:num_decodes], expected)


def test_the_choice_of_xformers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    cuda = torch.device("cuda")
    with caplog.at_level(logging.INFO, logger="lamella.attention.choice"):
        assert isinstance(choose_backend("xformers", cuda), XformersBackend)
    assert "attention backend: xformers (asked for 'xformers' on cuda; asked for)" in caplog.text
    with pytest.raises(ConfigError, match="CUDA devices, not on cpu; 'auto' and 'torch' work"):
        choose_backend("xformers", torch.device("cpu"))
    monkeypatch.setitem(sys.modules, "xformers.ops", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"pip install '\.\[xformers\]'"):
        choose_backend("xformers", cuda)
