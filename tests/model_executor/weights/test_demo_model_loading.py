"""The real Gemma 3 270M file, against the gguf package's own reader and transformers' GGUF tokenizer."""

import hashlib
import json
from pathlib import Path

import gguf
import pytest
import torch

from lamella.model_executor.layers.description import Model
from lamella.model_executor.weights.gguf_header import read_gguf_header
from lamella.model_executor.weights.loading import load_config, load_tokenizer, load_weights, resolve_model
from tests.helpers.tiny_gemma import native_shapes

pytestmark = pytest.mark.slow

# Made by transformers 5.24: AutoTokenizer.from_pretrained(folder, gguf_file=...), then calling and decoding.
CASES = json.loads((Path(__file__).parents[2] / "fixtures" / "gemma_tokenizer_cases.json").read_text())
# Of the same tokenizer's saved JSON: "left\0right\n" per merge, "id\0content\0special\n" per added token.
NUM_MERGES, MERGES_SHA256 = 514906, "2d9944e38c217eecec3863607c629f8402957d2a24757485589073dc8c41e151"
NUM_ADDED, ADDED_SHA256 = 6384, "f9ca44a4c2d156e4fab112bc86f678fd2180b831e8ff437ae7e23370627a49f8"


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def source(cache_dir):
    return resolve_model("demo:gemma-3-270m", cache_dir=cache_dir)


@pytest.fixture(scope="module", params=["converted", "from the cache folder"])
def tokenizer(request, source, cache_dir):
    return load_tokenizer(source, cache_dir)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_tokenizer_equals_transformers(tokenizer, case):
    if case["text"] is not None:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids_without_special"]
    assert tokenizer.decode(case["ids"]) == case["decoded"]
    assert tokenizer.decode(case["ids"], skip_special_tokens=False) == case["decoded_with_special"]
    for skip, wanted in ((True, case["decoded"]), (False, case["decoded_with_special"])):
        stream = tokenizer.decode_stream(skip_special_tokens=skip)
        joined = "".join([stream.step(token_id) for token_id in case["ids"]])
        assert wanted.startswith(joined)
        assert set(wanted[len(joined) :]) <= {"\ufffd"}, "only what never became a character is missing"


def test_whole_vocabulary_equals_transformers(tokenizer, cache_dir):
    (entry,) = cache_dir.rglob("tokenizer-*.json")
    document = json.loads(entry.read_text(encoding="utf-8"))
    merges = [merge.split(" ") for merge in document["model"]["merges"]]
    digest = hashlib.sha256("".join(f"{left}\0{right}\n" for left, right in merges).encode()).hexdigest()
    assert (len(merges), digest) == (NUM_MERGES, MERGES_SHA256)
    added = document["added_tokens"]
    lines = "".join(f"{token['id']}\0{token['content']}\0{token['special']}\n" for token in added)
    assert (len(added), hashlib.sha256(lines.encode()).hexdigest()) == (NUM_ADDED, ADDED_SHA256)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_id) == (262144, 2, 1)
    assert tokenizer.chat_template is None


def test_config(source):
    config = load_config(source)
    attentions = [layer.attention for layer in config.layers]
    assert (config.num_layers, config.hidden_size) == (18, 640)
    assert {(each.num_heads, each.num_kv_heads, each.scale) for each in attentions} == {(4, 1, 0.0625)}
    assert [i for i, each in enumerate(attentions) if each.kind == "full_attention"] == [5, 11, 17]
    assert {each.window_tokens for each in attentions} == {None, 512}
    assert (config.eos_token_ids, config.tie_word_embeddings) == ((1,), True)


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_weights_equal_the_reference_conversion(source, cache_dir, dtype):
    from transformers import Gemma3TextConfig

    shapes = native_shapes(
        Gemma3TextConfig(
            vocab_size=262144,
            hidden_size=640,
            intermediate_size=2048,
            num_hidden_layers=18,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=256,
        )
    )
    found = load_weights(source, Model(load_config(source), dtype), cache_dir=cache_dir)
    header = read_gguf_header(source.paths[0])
    data = source.paths[0].read_bytes()

    def reference(name):
        tensor = header.tensors[name]
        storage = gguf.GGMLQuantizationType(tensor.type_id)
        block_elements, block_bytes = gguf.GGML_QUANT_SIZES[storage]
        row_bytes = tensor.shape[-1] // block_elements * block_bytes
        num_rows = tensor.shape[0] if len(tensor.shape) == 2 else 1
        raw = memoryview(data)[tensor.offset_bytes : tensor.offset_bytes + num_rows * row_bytes]
        blocks = torch.frombuffer(bytearray(raw), dtype=torch.uint8).numpy().reshape(num_rows, row_bytes)
        values = gguf.quants.dequantize(blocks, storage)
        return torch.from_numpy(values).reshape(tensor.shape)

    for layer in (0, 7, 17):
        qkv = torch.cat([reference(f"blk.{layer}.attn_{part}.weight") for part in "qkv"])
        assert torch.equal(found[f"layers.{layer}.self_attn.qkv_proj.weight"], qkv.to(dtype))
        down = reference(f"blk.{layer}.ffn_down.weight")
        assert torch.equal(found[f"layers.{layer}.mlp.down_proj.weight"], down.to(dtype))
        norm = reference(f"blk.{layer}.attn_q_norm.weight")
        assert torch.equal(found[f"layers.{layer}.self_attn.q_norm.weight"], norm)
    embeddings = reference("token_embd.weight")
    assert torch.equal(found["embed_tokens.weight"], embeddings.to(dtype))
    assert found.keys() == shapes.keys()
