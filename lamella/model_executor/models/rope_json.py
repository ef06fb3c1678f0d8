"""The rotary embedding that a config describes, in `rope_parameters` or the older `rope_scaling`, as transformers 5.24
reads it (`modeling_rope_utils.py`)."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping

from lamella.model_executor.models import config_ranges as ranges
from lamella.model_executor.models.config import (
    BlendedScaling,
    LongRopeScaling,
    ProportionalScaling,
    RotaryConfig,
    YarnScaling,
)
from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.typed_fields import TypedFields, shown

logger = logging.getLogger(__name__)

# All names of all kinds: transformers warns of one that its kind does not use, and leaves it out.
_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    *("short_factor", "long_factor", "low_freq_factor", "high_freq_factor"),
}
_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


def flat_rotary(
    config: ConfigJson,
    head_dim: int,
    *,
    max_positions: int,
    theta: float = 10_000.0,
    known: frozenset[str] = frozenset(),
    has_partial: bool = False,
) -> RotaryConfig:
    """The embedding of all layers alike. The old key `rope_scaling` wins over `rope_parameters`, and a theta beside
    them fills in theirs, as in transformers (`convert_rope_params_to_dict`); so does an original length, which wins.

    theta: where none is given. known: names that the family reads itself. has_partial: whether the family turns a part
    of its heads. Raises as `read_rotary`.
    """
    parameters = flat_parameters(config)
    old_partial = config.fields.optional_number("partial_rotary_factor", above=0.0, high=1.0)
    if old_partial is not None and not parameters.has_value("partial_rotary_factor"):
        if not has_partial and old_partial != 1.0:
            raise config.not_built("partial_rotary_factor", "layers of this shape are built with whole heads rotated")
        parameters = parameters.overlaid(
            TypedFields({"partial_rotary_factor": old_partial}, parameters.place, parameters.prefix)
        )
    return read_rotary(
        ConfigJson(parameters),
        head_dim,
        theta=config.number("rope_theta", theta),
        max_positions=max_positions,
        original_positions=config.optional_integer("original_max_position_embeddings"),
        known=known,
        has_partial=has_partial,
    )


def flat_parameters(config: ConfigJson) -> TypedFields:
    """The object that describes the embedding of all layers, under the names that it has today."""
    key = "rope_scaling" if list(config.fields.optional_object("rope_scaling")) else "rope_parameters"
    return renamed(config.fields.optional_object(key))


def renamed(parameters: TypedFields) -> TypedFields:
    """With the old name `type` read as `rope_type`, where that is not there."""
    if parameters.has_value("type") and not parameters.has_value("rope_type"):
        new = TypedFields({"rope_type": parameters.string("type"), "type": None}, parameters.place, parameters.prefix)
        return parameters.overlaid(new)
    return parameters


def read_rotary(
    config: ConfigJson,
    head_dim: int,
    *,
    theta: float,
    max_positions: int,
    original_positions: int | None = None,
    known: frozenset[str] = frozenset(),
    has_partial: bool = False,
) -> RotaryConfig:
    """The embedding that one object describes, of heads of head_dim elements.

    theta: where the object has none. original_positions: instead of the object's own. known, has_partial: see
    `flat_rotary`. What transformers passes over is passed over, and said in the log: a factor without a kind, and the
    old name of the kind beside the new one. Raises ModelLoadError, for unknown names UnbuiltVariantError, since any of
    them may change the embedding.
    """
    fields = config.fields
    unknown = sorted(set(fields) - _KEYS - known)
    if unknown:
        raise config.not_built(
            unknown[0], f"it is not known; a rotary embedding has {', '.join(sorted(_KEYS | known))}"
        )
    kind = fields.optional_string("rope_type") or "default"
    if kind not in _KINDS:
        raise config.not_built("rope_type", f"rope type {shown(kind)} is not built; known: {', '.join(_KINDS)}")
    old_kind = fields.optional_string("type")
    if old_kind is not None and old_kind != kind:
        logger.warning("%stype=%s is left out: transformers reads rope_type alone", fields.prefix, shown(old_kind))
    theta = config.number("rope_theta", theta)
    partial = fields.optional_number("partial_rotary_factor", above=0.0, high=1.0)
    if kind == "proportional":
        pairs = int((1.0 if partial is None else partial) * head_dim // 2)
        return RotaryConfig(head_dim, theta, config.number("factor", 1.0), ProportionalScaling(pairs))
    if partial is not None and partial != 1.0 and not has_partial:
        raise config.not_built("partial_rotary_factor", "layers are built with whole heads rotated; it must be 1")
    dim = head_dim if partial is None else int(head_dim * partial)
    if kind == "default":
        if fields.has_value("factor") and config.number("factor") != 1.0:
            logger.warning(
                "%sfactor=%s scales nothing without a rope_type, in transformers either",
                fields.prefix,
                fields.raw("factor"),
            )
        return RotaryConfig(dim, theta)
    if kind == "linear":
        return RotaryConfig(dim, theta, config.number("factor"))
    if kind == "dynamic":
        # Only texts longer than max_position_embeddings are scaled, and none are served.
        config.number("factor")
        return RotaryConfig(dim, theta)
    original = original_positions or config.optional_integer("original_max_position_embeddings") or max_positions
    if kind == "llama3":
        low, high = config.number("low_freq_factor"), config.number("high_freq_factor")
        if low == high:
            raise config.refuse("high_freq_factor", f"must differ from low_freq_factor={low}: between them is a blend")
        return RotaryConfig(dim, theta, scaling=BlendedScaling(config.number("factor"), low, high, original))
    if kind == "yarn":
        return _yarn(config, dim, theta, original, max_positions)
    return _longrope(config, dim, theta, original, max_positions)


def _yarn(config: ConfigJson, dim: int, theta: float, original: int, max_positions: int) -> RotaryConfig:
    factor = config.optional_number("factor") or max_positions / original
    magnitude = config.optional_number("attention_factor")
    if magnitude is None:
        scale, scale_all = config.optional_number("mscale"), config.optional_number("mscale_all_dim")
        magnitude = _yarn_magnitude(factor, 1.0)
        if scale and scale_all:
            magnitude = _yarn_magnitude(factor, scale) / _yarn_magnitude(factor, scale_all)
    scaling = YarnScaling(
        factor,
        original,
        config.optional_number("beta_fast") or 32.0,
        config.optional_number("beta_slow") or 1.0,
        config.boolean("truncate", True),
    )
    return RotaryConfig(dim, theta, scaling=scaling, magnitude=magnitude)


def _yarn_magnitude(factor: float, scale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _longrope(config: ConfigJson, dim: int, theta: float, original: int, max_positions: int) -> RotaryConfig:
    factor = config.optional_number("factor") or max_positions / original
    magnitude = config.optional_number("attention_factor")
    if magnitude is None:
        magnitude = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = (_divisors(config, key, dim // 2) for key in ("short_factor", "long_factor"))
    return RotaryConfig(dim, theta, scaling=LongRopeScaling(short, long, original), magnitude=magnitude)


def _divisors(config: ConfigJson, key: str, num_pairs: int) -> tuple[float, ...]:
    divisors = config.fields.numbers(key)
    above, high = ranges.ROPE_FACTOR
    if len(divisors) != num_pairs or not all(above < each <= high for each in divisors):
        raise config.fields.error(key, f"a list of {num_pairs} numbers above {above:g}, one for each pair that turns")
    return divisors


def rotaries_by_kind(
    config: ConfigJson,
    kinds: Collection[str],
    head_dim: int,
    defaults: Mapping[str, RotaryConfig],
    *,
    max_positions: int,
) -> dict[str, RotaryConfig]:
    """The embedding of the layers of each kind, where `rope_parameters` has an object for each; what they are without
    it is in `defaults`. kinds: of all layers. A part of a head may turn. Raises as `read_rotary`."""
    if not config.fields.has_value("rope_parameters"):
        return dict(defaults)
    by_kind = config.object("rope_parameters").fields

    def of(kind: str) -> RotaryConfig:
        parameters = ConfigJson(renamed(by_kind.object(kind)))
        return read_rotary(parameters, head_dim, theta=10_000.0, max_positions=max_positions, has_partial=True)

    return {kind: of(kind) if kind in kinds else default for kind, default in defaults.items()}


def rotaries_with_old_keys(
    config: ConfigJson,
    head_dim: int,
    thetas: Mapping[str, float],
    old_theta_keys: Mapping[str, str],
    *,
    max_positions: int,
) -> dict[str, RotaryConfig]:
    """As `rotaries_by_kind`, of a family whose older files have `rope_scaling`, which is about full layers alone and
    wins over their object, and a theta of each kind under `old_theta_keys` (Gemma 3, OLMo 3). thetas: without either.
    Whole heads turn.

    Where `rope_parameters` is left out, transformers fills in a rope_type, so that `type` of `rope_scaling` says
    nothing. Raises as `read_rotary`, and UnbuiltVariantError for what stands beside the kinds' objects.
    """
    nested = config.fields.optional_object("rope_parameters")
    if others := sorted(set(nested) - set(thetas)):
        raise config.not_built(
            "rope_parameters",
            f"{others[0]} means nothing there; give them per layer type, {{'full_attention': {{...}}}}",
        )
    rotaries = {}
    for kind, theta in thetas.items():
        parameters = nested.optional_object(kind)
        if not nested.has_value(kind):
            parameters = parameters.overlaid(TypedFields({"rope_type": "default"}, nested.place, parameters.prefix))
        if kind == "full_attention" and config.fields.has_value("rope_scaling"):
            parameters = parameters.overlaid(config.fields.object("rope_scaling"))
        # It is read even where it is not used, so that a value out of range is always refused.
        theta = config.number(old_theta_keys[kind], theta) if kind in old_theta_keys else theta
        rotaries[kind] = read_rotary(
            ConfigJson(renamed(parameters)), head_dim, theta=theta, max_positions=max_positions
        )
    return rotaries
