"""docs/models.md: the table of architectures, from the registry of the planner and the families that there are.

`python -m tests.helpers.models_page` writes the table anew; a test compares it with the page.
`python -m tests.helpers.models_page --walk` first makes the registry anew, by walking transformers' configs: each that
declares more than one kind of layer, and each that a random model of the parity tests stands for. It takes minutes.
"""

from __future__ import annotations

import itertools
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from lamella.kv_cache.spec import KVCacheSpec
from lamella.model_executor.models.registry import FAMILIES
from lamella.planner.model_specs import config_specs
from lamella.planner.registry import ARCHITECTURES, Architecture, LayerShape, architectures
from tests.helpers.transformers_models import RANDOM_MODELS

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
CONTEXTS = (8192, 131072)
PAGE_TOKENS = 16
ITEMSIZE_BYTES = 2
PLANNED = ("deepseek_v4", "inkling_text")  # by the planner alone
NO_CLASS = "has no class"
SHORT = {
    "full_attention": "F",
    "sliding_attention": "S",
    "chunked_attention": "C",
    "heavily_compressed_attention": "H",
    "compressed_sparse_attention": "K",
    "indexed_attention": "I",
    "linear_attention": "L",
    "hybrid": "Y",
    "hybrid_sliding": "Z",
}
# What the config classes of some models leave null, and their code needs.
COMPLETED: dict[str, dict[str, Any]] = {
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "step3p7": {"text_config": {"model_type": "step3p5", "sliding_window": 512}},
}
HEADER = (
    "model_type",
    "layers",
    "KV specs: heads x (K + V), window",
    "runs by",
    "parity",
    "KV B/token 8k",
    "128k",
    "uniform",
    "attention MFLOP/token by kind, 8k",
    "128k",
)


def render() -> str:
    """The table in Markdown, and below it why what is not run is not."""
    rows = [HEADER, tuple("---" for _ in HEADER), *map(row, architectures())]
    reasons = [f"- `{each.model_type}`: {each.refusal}." for each in architectures() if each.refusal is not None]
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([*lines, "", "Not run, and why:", "", *reasons])


def row(architecture: Architecture) -> tuple[str, ...]:
    native = is_native(architecture.model_type)
    runs_by = ["native"] if native else []
    runs_by += [] if architecture.refusal else ["transformers"]
    cells = [f"`{architecture.model_type}`", pattern(architecture.kinds)]
    if not architecture.layers:
        return (*cells, "-", "not run", "-", *planned_bytes(architecture), "-", "-")
    kv_bytes = [kv_bytes_per_token(owned_specs(architecture), context) for context in CONTEXTS]
    return (
        *cells,
        "; ".join(dict.fromkeys(map(spec_text, architecture.layers))),
        ", ".join(runs_by) or "not run",
        "exact" if runs_by and has_random_model(architecture.model_type) else "-",
        *(f"{value:,}" for value in kv_bytes),
        f"{uniform_bytes_per_token(owned_specs(architecture)):,}",
        *(flops_text(architecture, context) for context in CONTEXTS),
    )


def has_random_model(model_type: str) -> bool:
    """Of its own, or as the text model of another."""
    texts = [model.get("text_config", {}).get("model_type") for model in RANDOM_MODELS.values()]
    return model_type in RANDOM_MODELS or model_type in texts


def is_native(model_type: str) -> bool:
    return any(model_type in (*each.architectures, *each.multimodal_architectures) for each in FAMILIES)


def pattern(kinds: Any) -> str:
    """Runs of kinds, what is repeated once: "26: (S F)x13". Of all ways to write it, the shortest."""
    names = [SHORT.get(kind, kind) for kind in kinds]
    texts = [runs(names)]
    for lead, period in itertools.product(range(min(4, len(names))), range(1, len(names))):
        body = names[lead:]
        times, rest = divmod(len(body), period)
        if times > 1 and body[:period] * times + body[:rest] == body:
            repeated = f"({runs(body[:period])})x{times}"
            texts.append(" ".join(filter(None, (runs(names[:lead]), repeated, runs(body[:rest])))))
    return f"{len(names)}: {min(texts, key=len)}" if names else "-"


def runs(names: list[str]) -> str:
    parts = [(name, len(list(group))) for name, group in itertools.groupby(names)]
    return " ".join(
        name if count == 1 else f"{count}{name}" if len(name) == 1 else f"{count} {name}" for name, count in parts
    )


def spec_text(layer: LayerShape) -> str:
    window = "all" if layer.window_tokens is None else f"{layer.window_tokens:,}"
    chunk = " in chunks" if layer.kind == "chunked_attention" else ""
    return f"{layer.num_kv_heads} x ({layer.k_dim} + {layer.v_dim}), {window}{chunk}"


def planned_bytes(architecture: Architecture) -> tuple[str, str, str]:
    """The three columns of KV bytes of what only the planner knows."""
    if architecture.model_type not in PLANNED:
        return ("-", "-", "-")
    bare = {"model_type": architecture.model_type, "num_hidden_layers": len(architecture.kinds)}
    specs = list(config_specs(bare, ITEMSIZE_BYTES).specs)
    held = [f"{kv_bytes_per_token(specs, context):,}" for context in CONTEXTS]
    return (held[0], held[1], f"{uniform_bytes_per_token(specs):,}")


def kv_bytes_per_token(specs: list[KVCacheSpec], context_tokens: int) -> int:
    """Bytes of 16-bit KV that a decoding request of so many tokens holds at most, divided by its tokens."""
    return sum(held_bytes(spec, context_tokens) for spec in specs) // context_tokens


def uniform_bytes_per_token(specs: list[KVCacheSpec]) -> int:
    """The same where every layer keeps its KV as long as the request lives."""
    return sum(spec.token_bytes for spec in specs)


def owned_specs(architecture: Architecture) -> list[KVCacheSpec]:
    specs = architecture.layer_specs(ITEMSIZE_BYTES).specs
    return [spec for layer, spec in enumerate(specs) if layer not in architecture.kv_sharing]


def held_bytes(spec: KVCacheSpec, context_tokens: int) -> int:
    pages = spec.max_decode_pages(
        page_tokens=PAGE_TOKENS, interval_tokens=PAGE_TOKENS, max_model_len=context_tokens, num_blocks_more=0
    )
    return pages * PAGE_TOKENS * spec.token_bytes


def flops_text(architecture: Architecture, context_tokens: int) -> str:
    of_kind: dict[str, int] = {}
    for layer in architecture.layers:
        kind = SHORT.get(layer.kind, layer.kind)
        of_kind[kind] = of_kind.get(kind, 0) + layer.flops(context_tokens)
    return ", ".join(f"{kind} {flops / 1e6:,.0f}" for kind, flops in sorted(of_kind.items()))


# The walk


def walk() -> list[dict[str, Any]]:
    """The registry's entries from transformers' configs, at their defaults."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    entries: dict[str, dict[str, Any]] = {}
    for name in CONFIG_MAPPING:
        try:
            whole = CONFIG_MAPPING[name](**COMPLETED.get(name, {}))
            config = whole.get_text_config(decoder=True)
        except Exception as error:
            if name in RANDOM_MODELS:
                print(f"{name}: its default config cannot be made: {error}", file=sys.stderr)
            continue
        model_type = config.model_type
        kinds = list(getattr(config, "layer_types", None) or [])
        is_wanted = len(set(kinds)) > 1 or name in RANDOM_MODELS or model_type in RANDOM_MODELS
        # A text model may have no class of its own and run as part of another.
        is_new = model_type not in entries or NO_CLASS in (entries[model_type]["refusal"] or "")
        if is_wanted and is_new and getattr(config, "num_hidden_layers", None):
            entries[model_type] = entry(whole, config, kinds)
            print(model_type, entries[model_type]["refusal"] or "runs", file=sys.stderr, flush=True)
    return [entries[model_type] for model_type in sorted(entries)]


def entry(whole: Any, config: Any, kinds: list[str]) -> dict[str, Any]:
    from lamella.errors import ModelLoadError
    from lamella.model_executor.models.transformers_backend.declared_layers import declared_layers
    from lamella.model_executor.models.transformers_backend.declared_passes import refuse_other_passes
    from lamella.model_executor.models.transformers_backend.loading import recorded_specs
    from lamella.model_executor.models.transformers_backend.text_config import class_for

    found: dict[str, Any] = {"model_type": config.model_type, "refusal": None, "kv_sharing": {}}
    layers: list[LayerShape] = []
    try:
        refuse_other_passes(partial(field, whole), partial(field, config))
        run_by = class_for(whole, config)
        recorded, owners = recorded_specs(run_by)
        declared = declared_layers(config)
        kinds = [layer.kind for layer in declared]
        found["kv_sharing"] = {str(layer): owner for layer, owner in owners.items()}
        heads = (
            [heads_of(each) for each in recorded] if recorded else [heads_by_config(each.config) for each in declared]
        )
        layers = [LayerShape(said.kind, said.window_tokens, *each) for said, each in zip(declared, heads, strict=True)]
    except ModelLoadError as error:
        found["refusal"] = str(error).removesuffix(".")
    shapes = list(dict.fromkeys(layers))
    return {
        **found,
        "kinds": [[kind, len(list(group))] for kind, group in itertools.groupby(kinds)],
        "shapes": [{name: getattr(shape, name) for name in LayerShape.__slots__} for shape in shapes],
        "layers": [[index, len(list(group))] for index, group in itertools.groupby(map(shapes.index, layers))],
    }


def field(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def heads_of(layer: Any) -> tuple[int, int, int, int]:
    return layer.num_heads, layer.num_kv_heads, layer.k_dim, layer.v_dim


def heads_by_config(config: Any) -> tuple[int, int, int, int]:
    return config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim


def main() -> None:
    if "--walk" in sys.argv:
        lines = ",\n".join(json.dumps(each) for each in walk())
        ARCHITECTURES.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
        architectures.cache_clear()
    page = PAGE.read_text(encoding="utf-8")
    assert BEGIN in page
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{render()}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
