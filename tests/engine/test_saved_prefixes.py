"""Prefixes by name on whole engines: hints, pins, and files that another engine loads."""

from __future__ import annotations

import re

import pytest

from lamella import LLM, CapacityError, PrefixFileError, RequestError, SamplingParams
from lamella.engine import engine as engine_module
from lamella.engine.prefix_boundaries import tokens_before
from tests.helpers.tiny_gemma import save_tiny_gemma

ENGINE = {"kv_cache_memory_bytes": 2 << 20, "max_model_len": 256, "dtype": "float32", "device": "cpu",
          "check_invariants": True, "use_tqdm_on_load": False}  # fmt: skip
ANSWER = SamplingParams(max_tokens=6, temperature=0, logprobs=3, ignore_eos=True)
PREFIX = [2, *((7 * index) % 300 + 10 for index in range(90))]
QUESTION = [11, 12, 13]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_tiny_gemma(folder)
    return folder


def answer(llm: LLM, tokens: list[int], salt: str | None = None):
    """How much was cached, and the answer's tokens and log-probabilities to the last bit."""
    prompt = {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {})
    output = llm.generate([prompt], ANSWER, use_tqdm=False)[0]
    logprobs = [{token: one.logprob for token, one in step.items()} for step in output.outputs[0].logprobs]
    return output.num_cached_tokens, (output.outputs[0].token_ids, logprobs)


@pytest.fixture(scope="module")
def computed(folder):
    """Without any cache."""
    with LLM(str(folder), **ENGINE, enable_prefix_caching=False) as llm:
        return answer(llm, [*PREFIX, *QUESTION])[1]


def test_a_file_gives_another_engine_the_same_bits(folder, computed, tmp_path):
    with LLM(str(folder), **ENGINE) as llm:
        told = llm.save_prefix(tmp_path / "prefix", {"prompt_token_ids": PREFIX, "cache_salt": "a"})
    assert told.token_ids == PREFIX
    assert told.file_bytes == (tmp_path / "prefix").stat().st_size
    with LLM(str(folder), **ENGINE) as llm:
        assert llm.load_prefix(tmp_path / "prefix").cache_salt == "a"
        assert answer(llm, [*PREFIX, *QUESTION])[0] == 0, "the salt is part of it"
        assert answer(llm, [*PREFIX, *QUESTION], "a") == (91, computed)
        llm.engine.check_invariants()
        assert llm.reset_prefix_cache()
        assert all(usage == (0, 0, 0) for usage in llm.engine.stats().pages.values())


@pytest.mark.parametrize("arguments", [{"kv_cache_dtype": "fp8"}, {"page_size": 5}])
def test_a_file_of_a_page_size_serves_smaller_ones_in_any_dtype(folder, tmp_path, arguments):
    """torch's products depend on what they are computed with, so here the last bits may differ."""
    other = ENGINE | {"attention_backend": "torch"} | arguments
    with LLM(str(folder), **other | {"page_size": 16}) as llm:
        llm.save_prefix(tmp_path / "prefix", PREFIX)
        num_cached, (tokens, logprobs) = answer(llm, [*PREFIX, *QUESTION])
        assert num_cached == 91
    with LLM(str(folder), **other) as llm:
        llm.load_prefix(tmp_path / "prefix")
        num_cached, (found_tokens, found_logprobs) = answer(llm, [*PREFIX, *QUESTION])
    assert (num_cached, found_tokens) == (91, tokens)
    for found, wanted in zip(found_logprobs, logprobs, strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)


def test_files_of_other_engines_are_refused_and_nothing_leaks(folder, tmp_path):
    path = tmp_path / "prefix"
    with LLM(str(folder), **ENGINE) as llm:
        llm.save_prefix(path, PREFIX)
    save_tiny_gemma(tmp_path / "other", seed=1)
    others = [
        ("model", str(tmp_path / "other"), {}),
        ("arithmetic", str(folder), {"attention_backend": "torch"}),
        ("layers", str(folder), {"disable_hybrid_kv_cache": True}),
        ("this engine takes 1 to 63", str(folder), {"max_model_len": 64}),
    ]
    for reason, model, arguments in others:
        with LLM(model, **ENGINE | arguments) as llm:
            with pytest.raises(PrefixFileError, match=reason):
                llm.load_prefix(path)
            llm.engine.check_invariants()
            assert all(usage == (0, 0, 0) for usage in llm.engine.stats().pages.values())
    path.write_bytes(path.read_bytes()[:-1])
    with LLM(str(folder), **ENGINE) as llm:
        with pytest.raises(PrefixFileError, match="copy it again"):
            llm.load_prefix(path)
        with pytest.raises(RequestError, match="run a request with this prompt first"):
            llm.engine.save_prefix(tmp_path / "none", PREFIX)
        assert not (tmp_path / "none").exists()


def test_nothing_enters_of_a_file_that_changes_while_it_is_loaded(folder, tmp_path, monkeypatch):
    path = tmp_path / "prefix"
    with LLM(str(folder), **ENGINE) as llm:
        llm.save_prefix(path, PREFIX)
        answered = answer(llm, [*PREFIX, *QUESTION])
    raw = path.read_bytes()
    find = engine_module.open_prefix

    def change_after_the_check(form, given):
        opened = find(form, given)
        path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        return opened

    with LLM(str(folder), **ENGINE) as llm:
        monkeypatch.setattr(engine_module, "open_prefix", change_after_the_check)
        with pytest.raises(PrefixFileError, match="has changed while it was read"):
            llm.load_prefix(path)
        llm.engine.check_invariants()
        assert all(usage == (0, 0, 0) for usage in llm.engine.stats().pages.values())
        monkeypatch.setattr(engine_module, "open_prefix", find)
        path.write_bytes(raw)
        llm.load_prefix(path)
        assert answer(llm, [*PREFIX, *QUESTION]) == answered


def test_pins_on_an_engine(folder, computed):
    with LLM(str(folder), **ENGINE) as llm:
        pinned = llm.pin_prefix(PREFIX, name="system")
        assert (pinned.name, pinned.num_tokens, pinned.is_cached) == ("system", 91, True)
        assert llm.reset_prefix_cache()
        assert answer(llm, [*PREFIX, *QUESTION]) == (91, computed)
        later = llm.engine.pin_prefix([2, *range(20, 60)])
        assert (later.name, later.is_cached) == ("prefix-0", False)
        assert re.search(
            r"^system +91 +[\d.]+ KiB +yes\nprefix-0 +41 .* when computed$", llm.engine.kv_cache_report(), re.M
        )
        answer(llm, [2, *range(20, 70)])
        assert [one.is_cached for one in llm.pinned_prefixes()] == [True, True]
        with pytest.raises(RequestError, match="name='system'"):
            llm.pin_prefix([5, 6], name="system")
        with pytest.raises(RequestError, match="name='': must be a string"):
            llm.pin_prefix([5, 6], name="")
        with pytest.raises(RequestError, match="cache_salt='b', and the prompt has 'a'"):
            llm.pin_prefix({"prompt_token_ids": [5], "cache_salt": "a"}, cache_salt="b")
        llm.unpin_prefix(later)
        llm.unpin_prefix("system")
        with pytest.raises(RequestError, match="no pinned prefix"):
            llm.unpin_prefix("system")
        assert llm.reset_prefix_cache()
        assert all(usage == (0, 0, 0) for usage in llm.engine.stats().pages.values())


def test_the_budget_of_pins(folder):
    with LLM(str(folder), **ENGINE, max_pinned_bytes=300_000) as llm:
        num_bytes = llm.pin_prefix([10, *range(100, 140)]).num_bytes
        for first in range(1, 300_000 // num_bytes):
            llm.pin_prefix([10 + first, *range(100, 140)])
        with pytest.raises(CapacityError, match=r"of at most 300000 bytes .max_pinned_bytes=300000"):
            llm.pin_prefix([9, *range(100, 140)])
        llm.generate([[8, *range(240)]], ANSWER, use_tqdm=False)
    with pytest.raises(CapacityError, match=r"sets .* aside for pinned prefixes"):
        LLM(str(folder), **ENGINE, max_pinned_bytes=2 << 20)


def test_hints_for_texts_parts_and_chats(folder):
    text = "the quick brown fox jumps over the lazy dog and "
    with LLM(str(folder), **ENGINE) as llm:
        tokenizer = llm.get_tokenizer()
        for prompt in (
            {"prompt": [text, "the cat sat"]},
            {"prompt": text + "the cat sat", "prefix_boundary": len(text)},
        ):
            parsed = llm.engine.parse(prompt, ANSWER)
            ids = parsed.token_ids.tolist()
            assert parsed.text == text + "the cat sat"
            assert ids == tokenizer.encode(text + "the cat sat")
            (boundary,) = parsed.prefix_boundaries
            assert tokenizer.decode(ids[:boundary]) == text[: len(tokenizer.decode(ids[:boundary]))]
            assert tokenizer.encode(text)[:boundary] == ids[:boundary]
            assert tokenizer.encode(text)[: boundary + 1] != ids[: boundary + 1]
        messages = [{"role": "system", "content": "the cat"}, {"role": "user", "content": "jumps over"}]
        found = []
        for boundary in (0, -2, [0, 1], 1):
            llm.chat(messages, ANSWER, prefix_boundary=boundary, use_tqdm=False)
            found.append(llm.chat_prompts(messages, prefix_boundary=boundary)[0]["prefix_boundary"])
        rendered = tokenizer.apply_chat_template(messages)
        ids = tokenizer.encode(rendered, add_special_tokens=False)
        end = rendered.index("jumps over")
        assert found[0] == found[1] == tokens_before(tokenizer, rendered, ids, [end], add_special_tokens=False)
        assert found[2] == [*found[0], len(ids)]
        assert found[3] == [len(ids)]
        with pytest.raises(
            RequestError, match=r"prefix_boundary=2 is out of range; give an index of messages from -2 to 1"
        ):
            llm.chat(messages, ANSWER, prefix_boundary=2)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"prompt": ["a", 1]}, r'prompt\["prompt"\]\[1\] is int'),
        ({"prompt": ["a", "b"], "prefix_boundary": 1}, "beside a prompt in parts"),
        ({"prompt": "abc", "prefix_boundary": 4}, "prefix_boundary=4 is out of range; give a number of characters"),
        ({"prompt_token_ids": [5, 6], "prefix_boundary": [0]}, "a number of tokens from 1 to 2"),
        ({"prompt_token_ids": [5, 6], "prefix_boundary": True}, "prefix_boundary=True is a bool"),
        ({"prompt_token_ids": [5] * 70, "prefix_boundary": list(range(1, 67))}, "has 66 places: give at most 64"),
        ({"prompt": ["a"] * 66}, "has 66 parts: give at most 65"),
    ],
)
def test_hints_that_cannot_be(folder, prompt, reason, shared_llm):
    with pytest.raises(RequestError, match=reason):
        shared_llm.engine.parse(prompt, ANSWER)


@pytest.fixture(scope="module")
def shared_llm(folder):
    with LLM(str(folder), **ENGINE) as llm:
        yield llm
