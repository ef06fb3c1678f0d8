"""Checkpoints with quantised weights, as config.json says in `quantization_config`: what transformers reads of them.

transformers has a reader for each method. One that can give floats is asked for floats, which need no kernels, those
from a hub included, and run on any device. What a reader lacks, such as a package, it says before weights are read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lamella.errors import ModelLoadError
from lamella.model_executor.models.typed_fields import shown

logger = logging.getLogger(__name__)

_FIELD = "quantization_config"


def prepare_quantization(config: Any, text_config: Any) -> None:
    """Make sure that transformers can read the weights, and have it read floats where it can. Changes the two configs
    (the same object, of a text model), so that a decoder that is built alone is told as well.

    Raises ModelLoadError for a method that is not known, or that cannot be run here, with the reader's own reason.
    """
    given = getattr(config, _FIELD, None) or getattr(text_config, _FIELD, None)
    if given is None:
        return
    from transformers.quantizers.auto import AutoHfQuantizer

    method = given.get("quant_method") if isinstance(given, Mapping) else None
    named = f"{_FIELD} has quant_method={shown(method)}"
    try:
        # transformers would warn of a method that it does not know, and take the weights for plain ones.
        is_known = AutoHfQuantizer.supports_quant_method(given)
        reader = AutoHfQuantizer.from_config(dict(given), pre_quantized=True) if is_known else None
        if reader is not None:
            gives_floats = hasattr(reader.quantization_config, "dequantize")
            if gives_floats:
                reader.quantization_config.dequantize = True
            reader.validate_environment(device_map=None, weights_only=True)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelLoadError(f"{named}, which transformers cannot read here: {text}") from error
    if reader is None:
        raise ModelLoadError(f"{named}, which transformers does not know; give a checkpoint in floats")
    if gives_floats:
        logger.info("weights of quant_method %s become floats as they are read", method)
    told = {**given, "dequantize": True} if gives_floats else dict(given)
    config.quantization_config = text_config.quantization_config = told
