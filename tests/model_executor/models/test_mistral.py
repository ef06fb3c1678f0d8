"""Mistral: Llama's shape with one window for all layers, which transformers counts as lamella does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lamella.errors import ModelLoadError
from lamella.kv_cache.spec import SlidingWindowSpec
from lamella.model_executor.models.config import layer_specs
from tests.helpers.published_configs import biases, parsed, theirs


@pytest.mark.parametrize(
    ("fields", "window"), [({}, 4096), ({"sliding_window": None}, None), ({"sliding_window": 77}, 77)], ids=str
)
def test_mistrals_window_is_in_every_layer(fields: dict[str, Any], window: int | None) -> None:
    assert theirs("Mistral", **fields).sliding_window == window
    assert {layer.attention.window_tokens for layer in parsed("Mistral", **fields).layers} == {window}


def test_a_query_sees_the_keys_that_transformers_lets_it_see() -> None:
    from transformers.masking_utils import sliding_window_overlay

    overlay = sliding_window_overlay(theirs("Mistral", sliding_window=5).sliding_window)
    (spec,) = set(layer_specs(parsed("Mistral", sliding_window=5), itemsize_bytes=2))
    assert isinstance(spec, SlidingWindowSpec)
    for query in range(12):
        # The overlay leaves out what is too old; that no query sees later keys is another one's.
        seen = [key for key in range(query + 1) if bool(overlay(0, 0, torch.tensor(query), torch.tensor(key)))]
        assert seen == list(range(spec.first_visible(query), query + 1))


def test_no_layer_has_biases() -> None:
    assert biases(parsed("Mistral")) == {(False, False, False)}


@pytest.mark.parametrize("window", [0, -1, 4096.0, "4096", True])
def test_a_window_that_is_none_is_refused(window: Any) -> None:
    with pytest.raises(ModelLoadError, match=f"sliding_window={window!r}: must be an integer"):
        parsed("Mistral", sliding_window=window)
