"""What a caller gets back. Plain frozen values, with vLLM's names; positional order is vLLM's, where there is any.

Fields of vLLM's outputs that lamella never fills are None in the class itself, so that they cost nothing.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

from lamella.engine.lora_request import LoRARequest
from lamella.errors import LamellaError


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability (natural logarithm) under the model's unfiltered distribution.

    rank: 1 is the most likely. decoded_token: the token's text, None if it was not decoded.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds of `time.monotonic`; None: never happened.

    num_draft_tokens: drafts that steps verified for all of its samples; num_accepted_tokens: those that they got.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One sample of a request.

    text, token_ids and logprobs hold everything so far, or with RequestOutputKind.DELTA what is new.
    token_ids includes the token that ended the generation; text leaves it out unless
    include_stop_str_in_output was asked for.
    cumulative_logprob: sum of the sampled tokens' log-probabilities so far, None unless asked for.
    logprobs: per token, the asked-for top tokens and the sampled one by token id, None unless asked for.
    finish_reason: None while running; "stop" (an end token, a stop token id or a stop string),
        "length" (max_tokens or max_model_len), "abort", "error" (there were no logits that a token could
        be chosen from, or a logits processor or steps with it failed; other requests go on).
    stop_reason: what stopped it: the token id of stop_token_ids, the string of stop, what went wrong; None
        for an end token and for every other finish_reason.
    """

    index: int
    text: str
    token_ids: list[int]
    _: KW_ONLY
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    routed_experts: ClassVar[None] = None
    lora_request: ClassVar[None] = None
    sampling_mask: ClassVar[None] = None
    spec_decode_metrics: ClassVar[None] = None
    weight_versions: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One request and its samples so far.

    prompt: the text if text was given, else None. outputs: one per sample, in order of index.
    finished: every sample has finished. metrics: None unless the engine keeps statistics.
    num_cached_tokens: prompt tokens whose KV came from the prefix cache. lora_request: the adapter it ran with.
    prompt_logprobs: per token of the prompt, the asked-for top tokens and the token itself by token id, None for the
        first token and those before prompt_logprob_start; with RequestOutputKind.DELTA in the first output alone. None
        unless asked for.
    index: place of the prompt among those given to `generate`, `chat` or `stream`, from 0; None: an engine made it.
    error: why there is no whole answer: the request was refused, then outputs is empty, or it failed on the way, then
        outputs hold what came of it. None for every other request.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    _: KW_ONLY
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    lora_request: LoRARequest | None = None
    error: LamellaError | None = None
    index: int | None = None

    prompt_token_id_logprobs: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None
    multi_modal_placeholders: ClassVar[None] = None
    num_cache_creation_tokens: ClassVar[None] = None
    kv_transfer_params: ClassVar[None] = None
    ec_transfer_params: ClassVar[None] = None
