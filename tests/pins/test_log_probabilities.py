"""The native kernels give the pinned bits, with one thread and with two."""

from __future__ import annotations

import pytest

from tests.pins import log_probabilities, stored
from tests.pins.places import native_builds_here

NAME = "log_probabilities"


def builds() -> list[str]:
    """Builds whose bits are pinned and that this processor can run; one that it can run, where none is pinned. So any
    x86 machine checks avx2, the one that it would not choose for itself too."""
    runnable = native_builds_here()
    return [build for build in runnable if build in stored.load(NAME)] or runnable[-1:]


@pytest.mark.parametrize("build", builds())
def test_float32(build: str) -> None:
    require_pinned_bits(build, "none")


@pytest.mark.slow
@pytest.mark.parametrize("quantization", log_probabilities.QUANTIZATIONS[1:])
@pytest.mark.parametrize("build", builds())
def test_every_other_kind_of_weights(build: str, quantization: str) -> None:
    require_pinned_bits(build, quantization)


def require_pinned_bits(build: str, quantization: str) -> None:
    pinned = stored.load(NAME)
    assert build in pinned, (
        f"tests/pins/{NAME}.json has no bits of the {build} build, which this processor "
        f"runs. On a commit whose bits are known to be right, `{stored.MAKE} {NAME}` on this machine adds them"
    )
    measured = log_probabilities.measure(build, quantization)
    found = log_probabilities.of_all_threads(measured)
    stored.require_equal(
        NAME, {build: {quantization: pinned[build].get(quantization, {})}}, {build: {quantization: found}}
    )


def test_what_is_pinned_is_what_it_should_be() -> None:
    pinned = stored.load(NAME)
    assert "avx2" in pinned
    for by_quantization in pinned.values():
        assert list(by_quantization) == list(log_probabilities.QUANTIZATIONS)
        for prompts in by_quantization.values():
            lengths = {name: bits["prompt_tokens"] for name, bits in prompts.items()}
            chunk = log_probabilities.CHUNK_TOKENS
            assert len(lengths) == 6
            assert lengths["one chunk"] <= chunk < 2 * chunk < lengths["several chunks"]
            assert lengths["longer than a window of 512"] > 512
            assert all(len(bits["logprobs"].split()) == log_probabilities.MAX_TOKENS for bits in prompts.values())
        # The blocks of the file are what float32 weights are made of: docs/cpu.md
        assert by_quantization["gguf"] == by_quantization["none"] != by_quantization["int8"]
