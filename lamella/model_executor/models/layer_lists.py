"""Fields of a config that hold something of each layer, or that name layers."""

from __future__ import annotations

from collections.abc import Collection

from lamella.model_executor.models.config_json import ConfigJson
from lamella.model_executor.models.typed_fields import TypedFields


def of_first_layers(config: ConfigJson, keys: Collection[str], num_layers: int, num_extra: int) -> ConfigJson:
    """The same config, with those lists under `keys` that are of all layers and of num_extra more shortened to the
    first ones: the others are for predicting several tokens."""
    fields = config.fields
    shortened = {
        key: values[:num_layers]
        for key in keys
        if isinstance(values := fields.raw(key), list) and len(values) == num_layers + num_extra
    }
    return ConfigJson(fields.overlaid(TypedFields(shortened, fields.place, fields.prefix)))


def number_of_each(config: ConfigJson, key: str, default: float, num_layers: int) -> tuple[float, ...]:
    """A number for each layer, from a list of them or from one that is all layers'; `default` where there is
    neither."""
    fields = config.fields
    if not fields.has_value(key):
        return (default,) * num_layers
    values = fields.numbers(key) if isinstance(fields.raw(key), list) else (fields.number(key),) * num_layers
    if len(values) != num_layers:
        raise fields.error(key, f"a list of {num_layers} numbers, one for each layer")
    return values


def layer_numbers(config: ConfigJson, key: str, num_layers: int) -> tuple[int, ...] | None:
    """A list of layers; None where it is null or left out."""
    return config.fields.integers(key, high=num_layers - 1) if config.fields.has_value(key) else None
