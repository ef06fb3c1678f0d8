import pytest

from lamella.errors import ModelLoadError
from lamella.model_executor.models import registry
from lamella.model_executor.models.config import MLPConfig
from lamella.model_executor.models.generation_config import parse_generation_config
from lamella.model_executor.models.typed_fields import TypedFields

TEXT = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "num_hidden_layers": 7}


def parse_config(config, generation=None):
    ends = parse_generation_config(TypedFields(generation or {}, "generation_config.json")).eos_token_ids
    return registry.parse_config(TypedFields(config, "config.json"), ends)


def transformers_layers(config):
    """(kind, window, theta, factor) per layer, from transformers' own reading of the config."""
    from transformers import Gemma3TextConfig

    parsed = Gemma3TextConfig(**{key: value for key, value in config.items() if key not in ("architectures",)})
    ropes = parsed.rope_parameters
    return [
        (
            kind,
            parsed.sliding_window if kind == "sliding_attention" else None,
            ropes[kind]["rope_theta"],
            ropes[kind]["factor"] if ropes[kind]["rope_type"] == "linear" else 1.0,
        )
        for kind in parsed.layer_types
    ]


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"sliding_window": 512},
        {"sliding_window_pattern": 3},
        {"layer_types": ["full_attention"] + ["sliding_attention"] * 6, "sliding_window_pattern": 3},
        {"rope_theta": 5e5, "rope_local_base_freq": 123.0, "rope_scaling": None},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 2e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            }
        },
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}, "rope_theta": 7e5},
        {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}, "rope_theta": 5.0},
    ],
)
def test_layers_equal_transformers_reading(extra):
    layers = parse_config({**TEXT, **extra}).layers
    attentions = [layer.attention for layer in layers]
    found = [(each.kind, each.window_tokens, each.rotary.theta, each.rotary.position_divisor) for each in attentions]
    assert found == transformers_layers({**TEXT, **extra})


def test_every_field_of_a_published_config():
    config = parse_config(
        {
            **TEXT,
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06,
            "max_position_embeddings": 32768,
            "sliding_window": 512,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "bos_token_id": 2,
            "eos_token_id": 1,
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
        }
    )
    assert (config.architecture, config.vocab_size, config.hidden_size) == ("gemma3", 262144, 640)
    attentions = [layer.attention for layer in config.layers]
    assert {layer.mlp for layer in config.layers} == {MLPConfig(2048, "gelu_tanh")}
    assert {(each.num_heads, each.num_kv_heads, each.k_dim, each.v_dim) for each in attentions} == {(4, 1, 256, 256)}
    assert {each.scale for each in attentions} == {0.0625}
    assert {each.rotary.dim for each in attentions} == {256}
    assert config.norm_eps == 1e-6
    assert (config.max_position_embeddings, config.num_layers) == (32768, 18)
    assert [i for i, each in enumerate(attentions) if each.kind == "full_attention"] == [5, 11, 17]
    assert {each.softcap for each in attentions} == {None}
    assert config.final_logit_softcap == 30.0
    assert (config.bos_token_id, config.eos_token_ids) == (2, (1,))
    assert (config.dtype, config.tie_word_embeddings) == ("bfloat16", False)


def test_multimodal_config_gives_its_text_model_with_transformers_defaults():
    config = parse_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "model_type": "gemma3",
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
            "vision_config": {"hidden_size": 1152},
        }
    )
    attentions = [layer.attention for layer in config.layers]
    assert config.vocab_size == 262208
    assert {(each.num_heads, each.num_kv_heads, each.k_dim, each.v_dim) for each in attentions} == {(8, 4, 256, 256)}
    assert (config.num_layers, config.eos_token_ids, config.dtype) == (34, (1, 106), "bfloat16")
    assert attentions[5].rotary.position_divisor == 8.0
    assert attentions[4].rotary.position_divisor == 1.0
    assert attentions[4].window_tokens == 1024


@pytest.mark.parametrize(
    ("config_eos", "generation", "wanted"),
    [(7, None, (7,)), ([7, 8], None, (7, 8)), (7, {"eos_token_id": [1, 106]}, (1, 106)), (7, {}, (7,)), (None, {}, ())],
)
def test_end_tokens(config_eos, generation, wanted):
    assert parse_config({**TEXT, "eos_token_id": config_eos}, generation).eos_token_ids == wanted


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"},
            "GPT2LMHeadModel is not known.*Gemma3ForCausalLM",
        ),
        ({"architectures": None, "model_type": None}, "none named"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_activation": "mish"}, "hidden_activation='mish'"),
        ({"num_kv_shared_layers": 1}, "K and V in every layer"),
        ({"rope_scaling": {"rope_type": "axial", "factor": 4.0}}, "rope_type='axial': .* known: default, linear"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "per layer type"),
        ({"layer_types": ["full_attention"]}, "names 1 layers, but num_hidden_layers is 7"),
        ({"layer_types": ["linear_attention"] * 7}, "'linear_attention'"),
        ({"sliding_window": None}, "sliding_window=None"),
        ({"num_attention_heads": 6}, "6 attention heads cannot share 4"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_refusals_say_what_is_wrong(extra, message):
    with pytest.raises(ModelLoadError, match=message):
        parse_config({**TEXT, **extra})
