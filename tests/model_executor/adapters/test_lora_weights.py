"""An adapter's files for a described model: what is taken from them, and what is refused with file and tensor named."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from lamella.errors import ModelLoadError
from lamella.model_executor.adapters.lora_weights import read_lora
from lamella.model_executor.layers.description import Model
from lamella.model_executor.models.registry import parse_config, weight_map
from lamella.model_executor.models.typed_json import read_json_object
from tests.helpers.lora_files import PREFIX, lora_config, save_lora
from tests.helpers.random_models import save_random_model
from tests.helpers.tiny_gemma import save_tiny_gemma


def described(folder):
    config = parse_config(read_json_object(folder / "config.json"))
    return Model(config, torch.float32), weight_map(config)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """(transformers' model, the described one, its weight map)."""
    folder = tmp_path_factory.mktemp("gemma")
    return (save_tiny_gemma(folder), *described(folder))


def read(folder, gemma, **arguments):
    return read_lora(folder, *gemma[1:], **arguments)


def change(folder, **tensors):
    """Replace tensors of the file by others, or remove them where None is given; names without what all begin with."""
    path = folder / "adapter_model.safetensors"
    stored = load_file(path)
    for name, value in tensors.items():
        if value is None:
            del stored[PREFIX + name]
        else:
            stored[PREFIX + name] = value
    save_file(stored, path)


def test_updates_hold_the_scaled_weights_at_their_places(tmp_path, gemma):
    weights = save_lora(tmp_path, gemma[0], modules=("q_proj", "v_proj", "up_proj"), r=4, lora_alpha=6)
    found = read(tmp_path, gemma)
    assert (found.rank, found.num_modules, found.num_left_out) == (4, 18, 0)
    assert set(found.updates) == {
        f"layers.{n}.{p}" for n in range(6) for p in ("self_attn.qkv_proj", "mlp.gate_up_proj")
    }
    update = found.updates["layers.2.self_attn.qkv_proj"]
    q, v = (weights[f"model.layers.2.self_attn.{which}_proj"] for which in "qv")
    assert torch.equal(update.down, torch.cat([q[0], v[0]]))
    assert [(up.start, up.stop, up.first_rank) for up in update.ups] == [(0, 64, 0), (96, 128, 4)]
    torch.testing.assert_close(update.ups[0].weight, q[1] * 1.5)
    torch.testing.assert_close(update.ups[1].weight, v[1] * 1.5)
    (up,) = found.updates["layers.2.mlp.gate_up_proj"].ups
    assert (up.start, up.stop) == (96, 192)
    assert (
        found.num_bytes
        == sum(each.num_bytes for each in found.updates.values())
        == 4 * sum(down.numel() + up.numel() for down, up in weights.values())
    )


def test_equal_digests_are_for_equal_weights_alone(tmp_path, gemma):
    digests = []
    for name, arguments in {
        "it": {},
        "same": {"base_model_name_or_path": "another/name"},
        "scale": {"lora_alpha": 17},
        "values": {"seed": 1},
        "modules": {"modules": ("q_proj",)},
        "half": {"dtype": torch.float16},
    }.items():
        save_lora(tmp_path / name, gemma[0], **arguments)
        digests.append(read(tmp_path / name, gemma).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 5


def test_sixteen_bits_are_read(tmp_path, gemma):
    weights = save_lora(tmp_path, gemma[0], dtype=torch.bfloat16, lora_alpha=4)
    down = read(tmp_path, gemma).updates["layers.0.self_attn.qkv_proj"].down
    assert torch.equal(down[:4], weights["model.layers.0.self_attn.q_proj"][0].float())


def test_towers_that_prompts_of_text_do_not_pass_are_left_out(tmp_path, gemma):
    # Another precision puts the tower's tensors before the text model's.
    targets = r".*language_model.*\.(q|v)_proj|.*vision_tower.*_proj"
    save_lora(tmp_path, gemma[0], target_modules=targets, dtype=torch.float16)
    path = tmp_path / "adapter_model.safetensors"
    stored = {
        name.replace("model.model.", "model.model.language_model."): each for name, each in load_file(path).items()
    }
    tower = f"{PREFIX}model.vision_tower.vision_model.encoder.layers.0.self_attn.q_proj"
    shapes = {"A": (4, 8), "B": (8, 4)}
    save_file(stored | {f"{tower}.lora_{which}.weight": torch.ones(shape) for which, shape in shapes.items()}, path)
    found = read(tmp_path, gemma)
    assert (found.num_modules, found.num_left_out) == (12, 1)
    save_file({f"{tower}.lora_{which}.weight": torch.ones(shape) for which, shape in shapes.items()}, path)
    with pytest.raises(ModelLoadError, match="none of its 1 modules is one that prompts of text pass"):
        read(tmp_path, gemma)


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({f"{Q}.lora_B.weight": None}, rf"lacks lora_B\.weight of '{Q}'"),
        ({f"{Q}.lora_A.weight": None, f"{Q}.lora_B.weight": None}, rf"names {Q}, of which .* has no tensors"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 63)}, r"lora_A\.weight has shape \[4, 63\], wanted \[4, 64\]: rank 4"),
        ({f"{Q}.lora_B.weight": torch.ones(65, 4)}, r"lora_B\.weight has shape \[65, 4\], wanted \[64, 4\]"),
        ({f"{Q}.lora_A.weight": torch.ones(8, 64)}, r"has shape \[8, 64\], wanted \[4, 64\]: rank 4 by"),
        ({f"{Q}.lora_A.weight": torch.ones(4, 64, dtype=torch.int32)}, "dtype I32 is not read; known: F32"),
        ({f"{Q}.lora_A.weight": torch.full((4, 64), torch.nan)}, "values that are no finite numbers"),
        ({f"{Q}.lora_magnitude_vector.weight": torch.ones(64)}, "is DoRA's, which is not built"),
        ({f"{Q}.lora_B.bias": torch.ones(64)}, "a bias of the adapter's own"),
        ({f"{Q}.lora_C.weight": torch.ones(64)}, r"neither a module's lora_A\.weight nor its lora_B"),
        ({"model.embed_tokens.lora_embedding_A": torch.ones(4, 320)}, "an adapter of embeddings"),
    ],
)
def test_tensors_that_are_refused(tmp_path, gemma, tensors, message):
    save_lora(tmp_path, gemma[0])
    change(tmp_path, **tensors)
    with pytest.raises(ModelLoadError, match=rf"adapter_model\.safetensors.*{message}|adapter_config\.json.*{message}"):
        read(tmp_path, gemma)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("lm_head", "adapters of embeddings and of the head are not built"),
        ("model.layers.6.self_attn.q_proj", "the model, of 6 layers of gemma3, has no such linear layer"),
        ("model.layers.0.self_attn.qqq_proj", "has no such linear layer"),
        ("model.layers.0.mlp.experts.3.up_proj", "adapters of experts"),
        ("model.layers.0.input_layernorm", "has no such linear layer"),
        ("x" * 5000, "has no such linear layer"),
        ("model.layers." + "9" * 5000 + ".self_attn.q_proj", "has no such linear layer"),
    ],
)
def test_modules_that_have_no_place(tmp_path, gemma, module, message):
    save_lora(tmp_path, gemma[0], target_modules="all-linear")
    change(tmp_path, **{f"{module}.lora_A.weight": torch.ones(4, 64), f"{module}.lora_B.weight": torch.ones(64, 4)})
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, gemma)


def test_tensors_that_the_config_does_not_name(tmp_path, gemma):
    save_lora(tmp_path, gemma[0], modules=("q_proj", "v_proj"), target_modules=["q_proj"])
    with pytest.raises(ModelLoadError, match=r"has tensors of model\.layers\.0\.self_attn\.v_proj, which target_mod"):
        read(tmp_path, gemma)


def test_a_cut_adapter(tmp_path, gemma):
    save_lora(tmp_path, gemma[0], modules=("q_proj",), target_modules=["q_proj", "k_proj"])
    with pytest.raises(
        ModelLoadError, match=r"names model\.layers\.0\.self_attn\.k_proj, .* and 3 more, of which .* has no tensors"
    ):
        read(tmp_path, gemma)


def test_a_scale_that_no_float32_holds(tmp_path, gemma):
    save_lora(tmp_path, gemma[0], lora_alpha=1e300)
    with pytest.raises(ModelLoadError, match=r"weights times its scale 2\.5e\+299 are more than float32"):
        read(tmp_path, gemma)


def test_a_rank_above_the_most(tmp_path, gemma):
    save_lora(tmp_path, gemma[0])
    assert read(tmp_path, gemma, most_rank=4).rank == 4
    with pytest.raises(ModelLoadError, match=r"r=4 of .* is more than max_lora_rank=3; raise max_lora_rank"):
        read(tmp_path, gemma, most_rank=3)


def test_pickles_are_never_read(tmp_path, gemma):
    save_lora(tmp_path, gemma[0])
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelLoadError, match="is a pickle, which could run code and is never read; save the adapter"):
        read(tmp_path, gemma)
    (tmp_path / "adapter_model.bin").unlink()
    with pytest.raises(ModelLoadError, match=r"adapter_model\.safetensors"):
        read(tmp_path, gemma)
    with pytest.raises(ModelLoadError, match=r"is no folder; give one .*hubs are never asked"):
        read(tmp_path / "someone" / "adapter", gemma)


def test_experts_and_routers_are_refused(tmp_path):
    (tmp_path / "model").mkdir()
    model = save_random_model(tmp_path / "model", "qwen2_moe", 0)
    reader = described(tmp_path / "model")
    for name in ("mlp.shared_expert.up_proj", "mlp.shared_expert_gate"):
        folder = tmp_path / name
        save_lora(folder, model, modules=lambda path, name=name: path.endswith(name), target_modules=[name])
        with pytest.raises(ModelLoadError, match=rf"layers\.\d\.{name}: adapters of experts, of what runs beside them"):
            read_lora(folder, *reader)


def test_damaged_folders_are_refused_or_right(tmp_path, gemma):
    """Whatever bytes and values there are: a ModelLoadError that names the file, or an adapter."""
    save_lora(tmp_path, gemma[0], modules=("q_proj", "up_proj"))
    files = {name: (tmp_path / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")}
    header_bytes = 8 + int.from_bytes(files["adapter_model.safetensors"][:8], "little")
    draw, num_refused, num_read = random.Random(0), 0, 0
    odd = [
        None,
        True,
        -1,
        0,
        1.5,
        1e400,
        2**70,
        "",
        "x",
        "\ud800",
        "(",
        [],
        [[]],
        ["q_proj", None],
        {},
        {"a": {}},
        "none",
    ]
    for number in range(160):
        name = draw.choice(list(files))
        data = bytearray(files[name])
        if number % 2:
            config = lora_config(target_modules=["q_proj", "up_proj"])
            config[draw.choice(sorted(config))] = draw.choice(odd)
            name, data = "adapter_config.json", bytearray(json.dumps(config).encode())
        else:
            for _ in range(draw.randint(1, 3)):
                end = header_bytes if name == "adapter_model.safetensors" else len(data)
                data[draw.randrange(end)] = draw.randrange(256)
            if draw.random() < 0.2:
                del data[draw.randrange(len(data)) :]
        (tmp_path / name).write_bytes(data)
        try:
            found = read(tmp_path, gemma)
        except ModelLoadError as error:
            is_named = "adapter_" in str(error)
            num_refused += is_named
            assert is_named, error  # noqa: PT017
        else:
            assert set(found.updates) <= {
                f"layers.{n}.{p}" for n in range(6) for p in ("self_attn.qkv_proj", "mlp.gate_up_proj")
            }
            num_read += 1
        (tmp_path / name).write_bytes(files[name])
    assert num_refused > 40
    assert num_read > 20
