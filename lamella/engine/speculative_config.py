"""`speculative_config` as vLLM has it, checked and turned into what the scheduler goes by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lamella.argument_checks import MOST_DRAFT_TOKENS, RealRange, WholeRange, nearest_name, shown
from lamella.engine.scheduling.speculation.settings import SpeculationSettings
from lamella.errors import ConfigError

_NAME = "speculative_config"
METHODS = ("suffix", "ngram")
_DRAFTS = WholeRange(1, MOST_DRAFT_TOKENS)
_SUFFIX_DRAFTS = 24
_LOOKUP_TOKENS = 5
_LOOKUP = WholeRange(1, 2**16)
_CACHED_REQUESTS = WholeRange(0, 2**20)
_SPEC_FACTOR = RealRange(0.0, 256.0, leaves_out_least=True)
_PROBABILITY = RealRange(0.0, 1.0)
_KEYS = {
    "suffix": (
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
    ),
    "ngram": ("prompt_lookup_min", "prompt_lookup_max"),
}


def speculation_settings(given: Mapping[str, Any] | None) -> SpeculationSettings | None:
    """None or empty: no speculation. Raises ConfigError for a key or value that is not known, or is another method's.

    Keys of both methods: method, num_speculative_tokens (the most drafts of a request in a step). docs/speculation.md
    has the others.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError(
            f'{_NAME}={shown(given)} is a {type(given).__name__}; give a dict such as {{"method": "suffix"}}'
        )
    if not given:
        return None
    values = {name: value for name, value in given.items() if value is not None}
    method = values.pop("method", None)
    if not isinstance(method, str) or method not in METHODS:
        known = " or ".join(f'"{one}"' for one in METHODS)
        raise ConfigError(
            f'{_NAME}["method"]={shown(method)} is not known; give {known}, which draft from texts that are there: '
            "there are no draft models"
        )
    known_keys = ("num_speculative_tokens", *_KEYS[method])
    for name in values:
        if name not in known_keys:
            other = next((one for one, keys in _KEYS.items() if name in keys), None)
            hint = f'; it belongs to method "{other}"' if other else nearest_name(str(name), known_keys)
            raise ConfigError(
                f'{_NAME} has {shown(name)}, and method "{method}" has not{hint}; it has {", ".join(known_keys)}'
            )

    def whole(name: str, allowed: WholeRange, default: int) -> int:
        return allowed.check(f'{_NAME}["{name}"]', values.get(name, default), ConfigError)

    def real(name: str, allowed: RealRange, default: float) -> float:
        return allowed.check(f'{_NAME}["{name}"]', values.get(name, default), ConfigError)

    if method == "suffix":
        depth = whole("suffix_decoding_max_tree_depth", _DRAFTS, _SUFFIX_DRAFTS)
        return SpeculationSettings(
            num_draft_tokens=min(depth, whole("num_speculative_tokens", _DRAFTS, depth)),
            drafts_per_match_token=real("suffix_decoding_max_spec_factor", _SPEC_FACTOR, 1.0),
            least_probability=real("suffix_decoding_min_token_prob", _PROBABILITY, 0.1),
            num_shared_outputs=whole("suffix_decoding_max_cached_requests", _CACHED_REQUESTS, 0),
        )
    if "num_speculative_tokens" not in values:
        raise ConfigError(f'{_NAME} has no "num_speculative_tokens", which method "ngram" needs; give {_DRAFTS}')
    most = whole("prompt_lookup_max", _LOOKUP, values.get("prompt_lookup_min", _LOOKUP_TOKENS))
    least = whole("prompt_lookup_min", _LOOKUP, most)
    if least > most:
        raise ConfigError(
            f'{_NAME}["prompt_lookup_min"]={least} is more than prompt_lookup_max={most}; give at most that'
        )
    return SpeculationSettings(
        num_draft_tokens=whole("num_speculative_tokens", _DRAFTS, 1),
        least_match_tokens=least,
        drafts_per_match_token=None,
    )
