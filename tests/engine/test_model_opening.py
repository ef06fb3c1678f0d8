"""Who runs a model: a native family, transformers' code where the family is not built for a variant, nobody where files
are wrong."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from lamella import LLM, SamplingParams
from lamella.engine import model_opening
from lamella.errors import ModelLoadError, UnbuiltVariantError
from tests.helpers.tiny_gemma import VOCAB_SIZE
from tests.helpers.transformers_models import logits_of, save_random_model

PROMPT = list(range(7, 40))
LIMITS: dict[str, Any] = {"max_model_len": 64, "kv_cache_memory_bytes": 2**21, "max_num_seqs": 1}


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(source: Any) -> Any:
        raise AssertionError("transformers' code was asked to run it")

    monkeypatch.setattr(model_opening, "_TransformersBackendModel", opened)


def test_a_variant_that_no_family_builds_runs_by_transformers(tmp_path: Path, caplog: Any) -> None:
    model = save_random_model(tmp_path, "llama", hidden_act="mish")
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=VOCAB_SIZE)
    with caplog.at_level(logging.WARNING), LLM(str(tmp_path), model_impl="auto", **LIMITS) as llm:
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    row = output.outputs[0].logprobs[0]
    expected = logits_of(model, PROMPT)[-1].log_softmax(-1)
    assert (torch.tensor([row[token].logprob for token in range(VOCAB_SIZE)]) - expected).abs().max() < 1e-4
    (told,) = [record.message for record in caplog.records if "transformers' code runs it" in record.message]
    assert "hidden_act='mish': it is not built" in told
    with pytest.raises(UnbuiltVariantError, match="hidden_act='mish': it is not built"):
        LLM(str(tmp_path), model_impl="native", **LIMITS)


def test_where_neither_runs_it_both_say_why(tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama")
    change(tmp_path, hidden_act="wavelet")
    with pytest.raises(
        ModelLoadError, match=r"hidden_act='wavelet': it is not built.*; and .*transformers cannot build"
    ):
        LLM(str(tmp_path), **LIMITS)


@pytest.mark.usefixtures("without_transformers")
@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"vocab_size": "many"}, "vocab_size='many'"),
        ({"intermediate_size": 40}, "mlp.gate_proj"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    ],
    ids=str,
)
def test_a_file_that_is_wrong_is_nobodys_to_run(fields: dict[str, Any], told: str, tmp_path: Path) -> None:
    save_random_model(tmp_path, "llama")
    change(tmp_path, **fields)
    with pytest.raises(ModelLoadError, match=told) as raised:
        LLM(str(tmp_path), **LIMITS)
    assert not isinstance(raised.value, UnbuiltVariantError)
