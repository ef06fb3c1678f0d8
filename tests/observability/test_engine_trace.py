"""The trace against the lives of the requests and what the engine counts."""

import itertools
import json
from collections import defaultdict

import pytest

from lamella import LLM, Engine, SamplingParams
from lamella.errors import ConfigError
from lamella.observability.trace_file import read_trace
from tests.helpers.tiny_gemma import save_tiny_gemma

SHARED = [5 + place % 50 for place in range(40)]
PARTS = {"schedule", "launch", "wait", "update", "outputs"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_gemma(path)
    return str(path)


def run(folder, path, **arguments):
    """(outputs by id, calls of step, stats, slabs that each group has at the end)."""
    arguments = {"max_model_len": 256, "kv_cache_memory_bytes": 2**20, "max_num_seqs": 4, **arguments}
    outputs, num_calls = {}, 0
    with Engine(model=folder, profile=str(path), **arguments) as engine:
        for index in range(9):
            params = SamplingParams(max_tokens=60 + 12 * index, temperature=0, ignore_eos=True)
            engine.add_request(f"r{index}", [*SHARED, *[60 + index] * (1 + 2 * index)], params)
        while engine.has_unfinished_requests():
            num_calls += 1
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
            if num_calls == 12:
                outputs |= {output.request_id: output for output in engine.abort("r1")}
        parts = engine.inspect()
        lent = parts.manager.inspect().arena.slab_group
        slabs = {index: int((lent == index).sum()) for index in range(len(parts.layout.groups))}
        return outputs, num_calls, engine.stats(), slabs


def spans(events):
    """(request, name) -> [(start, end)], each begin with its end."""
    open_spans, found = {}, defaultdict(list)
    for event in events:
        key = event.get("id"), event["name"]
        if event["ph"] == "b":
            assert key not in open_spans
            open_spans[key] = event["ts"]
        elif event["ph"] == "e":
            found[key].append((open_spans.pop(key), event["ts"]))
    assert open_spans == {}
    return found


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("memory_bytes", [2**20, 18 * 2**14])
def test_steps_requests_and_hits(folder, tmp_path, is_async, memory_bytes):
    path = tmp_path / "trace.json"
    outputs, num_calls, stats, slabs = run(folder, path, async_scheduling=is_async, kv_cache_memory_bytes=memory_bytes)
    events = json.loads(path.read_text())
    assert list(read_trace(path)) == events

    slices = [event for event in events if event["ph"] == "X"]
    names = [event["name"] for event in slices]
    assert names.count("step") == num_calls
    assert names.count("launch") == stats.num_steps == names.count("outputs")
    assert set(names) - {"step", "copies", "products", "attention", "head", "sampling"} == PARTS
    assert {"products", "attention", "head"} <= set(names)
    steps = [event for event in slices if event["name"] == "step"]
    for before, after in itertools.pairwise(steps):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.2
    for event in slices:
        assert any(
            one["ts"] - 0.2 <= event["ts"] and event["ts"] + event["dur"] <= one["ts"] + one["dur"] + 0.5
            for one in steps
        )
    computed = stats.num_prompt_tokens - stats.num_cached_tokens + stats.num_generated_tokens - len(outputs)
    if not stats.num_preemptions:
        assert sum(event["args"]["tokens"] for event in steps) >= computed
        assert is_async or sum(event["args"]["tokens"] for event in steps) == computed

    found = spans(events)
    ends = {event["id"]: event["args"] for event in events if event["ph"] == "e" and event["name"] == "request"}
    assert set(ends) == set(outputs)
    for request_id, output in outputs.items():
        sample = output.outputs[0]
        assert ends[request_id] == {
            "finish_reason": sample.finish_reason,
            "output_tokens": len(sample.token_ids),
            "cached_tokens": output.num_cached_tokens,
            "preemptions": output.metrics.num_preemptions,
        }
        ((start, end),) = found[request_id, "request"]
        phases = sorted(
            (*span, name) for name in ("queued", "prefill", "decode", "preempted") for span in found[request_id, name]
        )
        # One phase follows the other without a gap, from the first to the last moment.
        assert phases[0][0] == start
        assert phases[-1][1] == end
        assert [one[1] for one in phases[:-1]] == [one[0] for one in phases[1:]]
        assert phases[0][2] == "queued"
        assert sum(name == "preempted" for *_, name in phases) == output.metrics.num_preemptions
    assert (stats.num_preemptions > 0) == (memory_bytes < 2**20)

    hits = {event["args"]["request"]: event["args"]["tokens"] for event in events if event["name"] == "prefix hit"}
    assert hits == {name: output.num_cached_tokens for name, output in outputs.items() if output.num_cached_tokens}
    assert hits
    held = {}
    for event in events:
        if event["name"] == "arena":
            held |= {slab: group for slab, group, _ in event["args"]["changes"]}
    assert {group: list(held.values()).count(group) for group in slabs} == slabs
    slid = sum(event["args"]["rows"] for event in events if event["name"] == "windows slid")
    assert slid > 0


def test_what_a_killed_process_leaves_is_readable(folder, tmp_path):
    path = tmp_path / "trace.json"
    run(folder, path)
    whole = list(read_trace(path))
    data = path.read_bytes()
    for size in (1, len(data) // 3, len(data) // 2, len(data) - 1):
        cut = tmp_path / "cut.json"
        cut.write_bytes(data[:size])
        found = list(read_trace(cut))
        assert found == whole[: len(found)]
        assert len(found) >= data[:size].count(b"\n") - 1


def test_files_that_cannot_be_written_are_refused_before_loading(tmp_path):
    with pytest.raises(ConfigError, match=r"profile=.*folder does not exist"):
        Engine(model="nowhere", profile=str(tmp_path / "none" / "trace.json"))


def test_a_full_disk_ends_the_trace_and_not_the_engine(folder, caplog):
    arguments = {"max_model_len": 256, "kv_cache_memory_bytes": 2**20, "max_num_seqs": 4}
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    with LLM(folder, profile="/dev/full", **arguments) as llm:
        (output,) = llm.generate([SHARED], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 5
    assert [record.getMessage() for record in caplog.records if "/dev/full" in record.getMessage()] == [
        "the trace /dev/full ends here, because it cannot be written: [Errno 28] No space left on device"
    ]


def test_what_is_no_trace_is_refused_with_its_line(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('[\n{"ph":"M","name":"a"},\nhello\n]\n')
    with pytest.raises(ConfigError, match=r"other\.json:3 is no event"):
        list(read_trace(path))
