"""The methods that lm-evaluation-harness calls, against transformers; and a whole task, against its own model."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lamella import LLM, RequestError
from lamella.integrations.lm_eval import HarnessModel, lm_eval_model
from tests.helpers.tiny_gemma import save_tiny_gemma

ARGUMENTS = {"max_model_len": 96, "kv_cache_memory_bytes": 2**22, "max_num_seqs": 8, "check_invariants": True}
TEXT = "the quick brown fox jumps over the lazy dog and the cat sat on the mat while a window slides "


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    return str(path), save_tiny_gemma(path)


@pytest.fixture(scope="module")
def llm(tiny):
    with LLM(tiny[0], dtype="float32", **ARGUMENTS) as llm:
        yield llm


def asked(*arguments: tuple) -> list[Any]:
    return [SimpleNamespace(args=one) for one in arguments]


def logprob_of(model: Any, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    with torch.inference_mode():
        logits = model(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
    raw = logits.double().log_softmax(-1)
    total = float(raw[range(len(continuation)), continuation].sum())
    return total, logits.argmax(-1).tolist() == continuation


def test_loglikelihood(tiny, llm) -> None:
    tokenizer = llm.get_tokenizer()
    bos = tokenizer.bos_token_id
    pairs = [
        ("the quick brown", " fox"),
        ("the quick brown ", "fox jumps"),
        ("", "the cat"),
        ("<bos>the", " dog"),
        ("a", ""),
    ]

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    ids = [
        (tokenizer.encode("the quick brown"), tokenizer.encode("the quick brown fox")),
        (tokenizer.encode("the quick brown"), tokenizer.encode("the quick brown fox jumps")),
        ([bos], [bos, *plain("the cat")]),
        (plain("<bos>the"), plain("<bos>the dog")),
    ]
    found = HarnessModel(llm).loglikelihood(asked(*pairs), disable_tqdm=True)
    for (context, whole), (total, is_greedy) in zip(ids, found, strict=False):
        expected = logprob_of(tiny[1], context, whole[len(context) :])
        assert (total, is_greedy) == (pytest.approx(expected[0], abs=1e-3), expected[1])
    assert found[4] == (0.0, True)
    assert [type(one) for one in found[0]] == [float, bool]


def test_long_texts_lose_their_beginnings(tiny, llm) -> None:
    tokenizer = llm.get_tokenizer()
    context, continuation = TEXT * 8, "over the tokens"
    whole = tokenizer.encode(context + continuation)
    num_new = len(whole) - len(tokenizer.encode(context.rstrip()))
    assert len(whole) > 96
    kept = whole[-95:]  # 94 tokens of context and continuation are computed, and the last is only scored
    expected, _ = logprob_of(tiny[1], kept[:-num_new], kept[-num_new:])
    ((total, _),) = HarnessModel(llm).loglikelihood(asked((context, continuation)), disable_tqdm=True)
    assert total == pytest.approx(expected, abs=1e-3)


def test_rolling_scores_each_token_of_a_document_once(tiny, llm) -> None:
    model = HarnessModel(llm, max_length=24)
    tokenizer = llm.get_tokenizer()
    texts = [TEXT, "the cat", TEXT * 2, ""]
    assert max(len(tokenizer.encode(text)) for text in texts) > 2 * 24
    found = model.loglikelihood_rolling(asked(*[(text,) for text in texts]), disable_tqdm=True)
    for text, total in zip(texts, found, strict=True):
        ids = tokenizer.encode(text)
        expected, num_done = 0.0, 0
        while num_done < len(ids):
            end = min(num_done + 24, len(ids))
            before = [tokenizer.bos_token_id, *ids][max(0, end - 24) : num_done + 1]
            expected += logprob_of(tiny[1], before, ids[num_done:end])[0]
            num_done = end
        assert total == pytest.approx(expected, abs=2e-3)


def test_generate_until(tiny, llm) -> None:
    tokenizer = llm.get_tokenizer()
    prompt = tokenizer.encode("the quick brown")
    written = tiny[1].generate(
        torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0
    )
    text = tokenizer.decode(written[0, len(prompt) :].tolist())
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    found = HarnessModel(llm).generate_until(
        asked(
            ("the quick brown", {"max_gen_toks": 12, "until": []}),
            ("the quick brown", {"max_gen_toks": 12, "until": ["no such text", stop], "do_sample": False}),
            ("the quick brown", {"max_new_tokens": 12, "until": stop, "temperature": 0.0}),
            (TEXT * 8, {"max_gen_toks": 12, "until": ["\n\n"]}),
        ),
        disable_tqdm=True,
    )
    assert found[0] == text
    assert found[1] == found[2] == text[: text.index(stop)]
    assert found[3]


def test_what_a_task_cannot_ask_for_is_refused(llm) -> None:
    model = HarnessModel(llm)
    with pytest.raises(RequestError, match=r"generation settings have \{'num_beams': 4\}, which is not known"):
        model.generate_until(asked(("a", {"num_beams": 4, "until": []})), disable_tqdm=True)
    with pytest.raises(RequestError, match="max_gen_toks=200 leaves no room for a prompt within max_length=94"):
        model.generate_until(asked(("a", {"max_gen_toks": 200})), disable_tqdm=True)
    with pytest.raises(RequestError, match=r"a continuation has .* more than max_length=94"):
        model.loglikelihood(asked(("a", TEXT * 8)), disable_tqdm=True)
    with pytest.raises(RequestError, match="max_length=95: max_model_len=96 allows 1 to 94"):
        HarnessModel(llm, max_length=95)


@pytest.mark.external
def test_tasks_from_a_local_file_as_the_harness_own_model_scores_them(tiny, llm, tmp_path) -> None:
    """Needs lm_eval itself, with the parts that its transformers model needs: `pip install lm_eval[hf]`."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    words = TEXT.split()
    documents = [
        {
            "question": " ".join(words[place : place + 6]),
            "choices": [words[place + 6], "mat", "tokens over"],
            "answer": 0,
        }
        for place in range(8)
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in documents))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    tasks = [
        {**common, "task": "choices", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
         "doc_to_target": "{{answer}}", "doc_to_choice": "{{choices}}",
         "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}]},
        {**common, "task": "rolling", "output_type": "loglikelihood_rolling", "doc_to_text": "",
         "doc_to_target": "{{question}}", "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}]},
        {**common, "task": "written", "output_type": "generate_until", "doc_to_text": "{{question}}",
         "doc_to_target": "{{choices[0]}}", "generation_kwargs": {"until": ["the", "\n"], "max_gen_toks": 16},
         "metric_list": [{"metric": "exact_match"}]},
    ]  # fmt: skip
    from transformers import AutoTokenizer

    own = HFLM(pretrained=tiny[1], tokenizer=AutoTokenizer.from_pretrained(tiny[0]), max_length=94, batch_size=1)
    results = [
        simple_evaluate(model=model, tasks=tasks, task_manager=TaskManager(), bootstrap_iters=0, log_samples=True)
        for model in (lm_eval_model(llm), own)
    ]
    for task in ("choices", "rolling", "written"):
        found, expected = (one["results"][task] for one in results)
        numbers = [name for name, value in expected.items() if isinstance(value, float)]
        assert numbers
        for name in numbers:
            assert found[name] == pytest.approx(expected[name], rel=1e-4), (task, name)
        samples, expected_samples = (one["samples"][task] for one in results)
        assert len(samples) == len(expected_samples) == 8
        for sample, other in zip(samples, expected_samples, strict=True):
            if task == "written":
                assert sample["resps"] == other["resps"]
            else:
                pairs = zip(sample["resps"], other["resps"], strict=True)
                for (given,), (wanted,) in pairs:
                    first, second = (one[0] if isinstance(one, tuple) else one for one in (given, wanted))
                    assert float(first) == pytest.approx(float(second), abs=2e-3)
