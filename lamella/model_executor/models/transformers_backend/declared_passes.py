"""What a transformers config says of how a model goes over its tokens: an engine that keeps K and V needs one pass from
the first token to the last, each layer once.

The recorder finds the same in the attention calls. A config that says so spares the seconds that importing the model's
code takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import is_integer, shown

Fields = Callable[[str], Any]


def refuse_other_passes(config: Fields, text_config: Fields) -> None:
    """config: what the model's config has for the name of a field, None where it has none; text_config: the same of the
    part that describes the decoder. Raises ModelLoadError."""
    if config("is_encoder_decoder"):
        raise ModelLoadError(
            "is_encoder_decoder=True: its encoder's attention is not causal: tokens see later ones, which a KV cache "
            "cannot give"
        )
    num_canvas_tokens = config("canvas_length")
    if num_canvas_tokens is not None:
        raise ModelLoadError(
            f"canvas_length={shown(num_canvas_tokens)}: it generates by diffusion: so many tokens at once see each "
            "other and are written again and again, which a KV cache cannot give"
        )
    num_loops = text_config("n_recurrent_loops")
    if is_integer(num_loops) and num_loops > 1:
        raise ModelLoadError(
            f"n_recurrent_loops={num_loops}: layers attend so often in one pass, and a layer's KV is kept once"
        )
