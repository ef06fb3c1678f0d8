"""Whether a layer's attention call says what the config said of the layer; the KV spec of a layer where it does.

A model whose code reads its config otherwise than it is read here would compute something else without a sign. So
everything that both say is compared, and any difference is an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from lamella.errors import ModelLoadError
from lamella.kv_cache.spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from lamella.model_executor.models.transformers_backend.declared_layers import (
    FULL,
    SLIDING,
    DeclaredLayer,
    declared_owners,
)
from lamella.model_executor.models.transformers_backend.recorder import RecordedLayer


def agreed_specs(
    config: Any, declared: Sequence[DeclaredLayer], recorded: Sequence[RecordedLayer], *, itemsize_bytes: int
) -> tuple[list[KVCacheSpec], dict[int, int]]:
    """Each layer's KV spec, and layer -> the layer whose KV it reads.

    Raises ModelLoadError where the config and the calls differ, naming layer, value and both sides.
    """
    if len(declared) != len(recorded):
        raise ModelLoadError(
            f"the config has {len(declared)} layers, but {len(recorded)} of its parts call attention: what the others "
            "keep of earlier tokens (a recurrent state or a convolution's, say) is not built"
        )
    owners = {layer: each.owner for layer, each in enumerate(recorded) if each.owner is not None}
    stated_owners = dict(declared_owners(config, list(declared)))
    if owners != stated_owners:
        raise _disagreement("which layers read another's KV", stated_owners, owners)
    specs = []
    for layer, (said, call) in enumerate(zip(declared, recorded, strict=True)):
        try:
            spec = _spec(said, call, itemsize_bytes)
            _check_window(spec, said, call)
            _check_shape(said, call)
            _check_numbers(said, call)
        except ModelLoadError as error:
            raise ModelLoadError(f"layer {layer} ({call.module_name}): {error}") from error
        specs.append(spec)
    for layer, owner in owners.items():
        if specs[layer] != specs[owner]:
            raise ModelLoadError(
                f"layer {layer} reads the KV of layer {owner}, but sees {specs[layer]} and not {specs[owner]}"
            )
    return specs, owners


def _spec(said: DeclaredLayer, call: RecordedLayer, itemsize_bytes: int) -> KVCacheSpec:
    shape = dict(num_kv_heads=call.num_kv_heads, k_dim=call.k_dim, v_dim=call.v_dim, itemsize_bytes=itemsize_bytes)
    if said.kind == FULL:
        return FullAttentionSpec(**shape)
    assert said.window_tokens is not None
    if said.kind == SLIDING:
        return SlidingWindowSpec(window_tokens=said.window_tokens, **shape)
    return ChunkedLocalAttentionSpec(attention_chunk_tokens=said.window_tokens, **shape)


def _check_window(spec: KVCacheSpec, said: DeclaredLayer, call: RecordedLayer) -> None:
    window = call.settings.window_tokens
    if window is not None and window != (said.window_tokens if said.kind == SLIDING else None):
        raise _disagreement(f"the window of a layer of kind {said.kind}", said.window_tokens, window)
    seen = None if call.visible is None else _sees_the_same(spec, call)
    if seen is False:
        raise _disagreement("which tokens it sees", f"{said.kind} of {said.window_tokens}", "another mask")
    if said.kind != FULL and window is None and seen is None and call.visible is None:
        raise _disagreement("the window", said.window_tokens, "no window and no mask")


def _sees_the_same(spec: KVCacheSpec, call: RecordedLayer) -> bool | None:
    """Whether the call's mask is the spec's, told at positions around every edge of the first windows; None: the mask
    is made of numbers that are not there (the meta device)."""
    assert call.visible is not None
    reach = spec.reach_tokens or 5
    near = (-2, -1, 0, 1, 2)
    edges = (0, reach, 2 * reach, 3 * reach + 5)
    positions = sorted({position for edge in edges for step in near if (position := edge + step) >= 0})
    query = torch.tensor(positions)[:, None].expand(-1, len(positions))
    key = query.T
    try:
        zero = torch.zeros((), dtype=torch.int64)
        visible = call.visible(zero, zero, query, key)
    except (RuntimeError, IndexError):
        return None
    if visible.device.type == "meta":
        return None
    first = torch.from_numpy(spec.first_visible_each(query.numpy()))
    return torch.equal(visible.expand_as(query), (key <= query) & (key >= first))


def _check_shape(said: DeclaredLayer, call: RecordedLayer) -> None:
    """Heads and their sizes. Where the config leaves one to the code, the module's own word counts."""
    config, module = said.config, call.module
    num_groups = getattr(module, "num_key_value_groups", None)
    by_module = call.num_heads // num_groups if isinstance(num_groups, int) and num_groups else None
    _agree("KV heads", call.num_kv_heads, (_get(config, "num_key_value_heads"), by_module))
    _agree("the size of K", call.k_dim, [_get(config, "head_dim"), *_of(module, "head_dim", "qk_head_dim")])
    stated = [_get(config, "v_head_dim"), *_of(module, "v_head_dim")]
    _agree("the size of V", call.v_dim, stated if any(stated) else [_get(config, "head_dim"), *_of(module, "head_dim")])


def _check_numbers(said: DeclaredLayer, call: RecordedLayer) -> None:
    config, module, settings = said.config, call.module, call.settings
    scalar, multiplier = _get(config, "query_pre_attn_scalar"), _get(config, "attention_multiplier")
    stated = [*([scalar**-0.5] if scalar else []), *([multiplier] if multiplier else [])]
    _agree("the scale", settings.scale, stated or _of(module, "scaling", "scale"))
    softcap = _get(config, "attn_logit_softcapping")
    if (softcap or None) != settings.softcap:
        raise _disagreement("the soft-cap of scores (attn_logit_softcapping)", softcap, settings.softcap)
    sinks = next((each for name, each in module.named_parameters(recurse=False) if "sink" in name), None)
    if (sinks is None) != (settings.sinks is None):
        raise _disagreement("sinks", _has(sinks), _has(settings.sinks))


def _agree(what: str, called: float, stated: Sequence[float | None] | Mapping[str, float]) -> None:
    said = [value for value in stated if isinstance(value, (int, float)) and not isinstance(value, bool)]
    if said and not any(abs(called - value) <= 1e-6 * abs(value) for value in said):
        raise _disagreement(what, " or ".join(map(str, said)), called)


def _get(config: Any, name: str) -> Any:
    return getattr(config, name, None)


def _of(module: torch.nn.Module, *names: str) -> list[Any]:
    return [value for name in names if isinstance(value := getattr(module, name, None), (int, float))]


def _has(value: object) -> str:
    return "none" if value is None else "one logit per head"


def _disagreement(what: str, stated: object, called: object) -> ModelLoadError:
    return ModelLoadError(
        f"the config and the attention call disagree about {what}: {stated} by the config, {called} by the call; "
        "running it would give other results than the model's"
    )
