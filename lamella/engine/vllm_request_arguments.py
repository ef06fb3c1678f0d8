"""vLLM's arguments of requests that lamella has not: data for `vllm_keywords` and docs/porting.md.

Read in vLLM 0.8.5, 0.32.0 and 0.33.0, as in `vllm_engine_arguments`.
"""

from __future__ import annotations

from lamella.engine.vllm_keywords import ANY, Absent, absent

SAMPLING_ARGUMENTS: dict[str, Absent] = {
    **absent(
        "logprobs and prompt_logprobs report the most likely tokens, or with -1 all, as one dict a token",
        logprob_token_ids=(),
        prompt_logprob_token_ids=(),
        flat_logprobs=(False,),
    ),
    **absent("structured_outputs says what form the output has", guided_decoding=()),
    **absent(
        "what may be sampled is bounded by allowed_token_ids, bad_words, no_repeat_ngram_size and logits_processors",
        thinking_token_budget=(),
        repetition_detection=(),
        trace_decode_token_ids=(),
        watermarking=(False,),
    ),
    **absent("n says how many samples are drawn, and all are returned", best_of=(1,)),
    **absent("shorten the prompt before giving it", truncate_prompt_tokens=()),
    **absent("special tokens are joined to the text as the tokenizer does it", spaces_between_special_tokens=(True,)),
    **absent("every step's outputs are returned by that step", stream_interval=(1,), output_text_buffer_length=(0,)),
    **absent(
        "give the prompt a cache_salt of its own to keep it from what others cached",
        skip_reading_prefix_cache=(False,),
    ),
    **absent("a SamplingParams never changes, so that it needs no copying", skip_clone=ANY),
    **absent("there are no plug-ins", extra_args=()),
    **absent("there are no experts", routed_experts_prompt_start=(0,)),
}

_PROMPT_ADAPTER = absent("adapters are LoRA's: give a lora_request", prompt_adapter_request=())
_PRIORITY = absent(
    'scheduling_policy="prefix" or "fcfs" orders requests, and the order of adding them; there are no priorities',
    priority=(0,),
)
_TOKENIZATION = absent(
    "tokenize with get_tokenizer(), and give the token ids",
    tokenization_kwargs=(),
)
_NO_MEDIA = "prompts are text or token ids: there are no images, sound or embeddings"

# Arguments of LLM.generate, which LLM.chat takes as well.
GENERATE_ARGUMENTS: dict[str, Absent] = {
    **_PROMPT_ADAPTER,
    **_PRIORITY,
    **_TOKENIZATION,
    **absent(_NO_MEDIA, mm_processor_kwargs=()),
    **absent('give token ids as prompts: [1, 2, 3] or {"prompt_token_ids": [1, 2, 3]}', prompt_token_ids=()),
    **absent("SamplingParams.structured_outputs says what form the output has", guided_options_request=()),
}
CHAT_ARGUMENTS: dict[str, Absent] = {
    **GENERATE_ARGUMENTS,
    **absent("what the template is made for is found out from the template", chat_template_content_format=("auto",)),
}
# Arguments of LLM.beam_search, which the newest releases read no longer have.
BEAM_SEARCH_ARGUMENTS: dict[str, Absent] = {
    **_PROMPT_ADAPTER,
    **absent("beams are searched with the model alone; merge an adapter's weights into it", lora_request=()),
    **_TOKENIZATION,
    **absent("max_num_seqs bounds how many beams run at once", concurrency_limit=ANY),
}

# Arguments of LLMEngine.add_request.
ADD_REQUEST_ARGUMENTS: dict[str, Absent] = {
    **_PROMPT_ADAPTER,
    **_PRIORITY,
    **_TOKENIZATION,
    **absent("a request arrives when it is added", arrival_time=ANY),
    **absent("nothing is traced", trace_headers=()),
    **absent("prefixes are found by their tokens, whosever they are", session_id=ANY, kv_hints=()),
    **absent('give {"prompt": text, "prompt_token_ids": ids} as the prompt', prompt_text=()),
}
FROM_ENGINE_ARGS_ARGUMENTS: dict[str, Absent] = {
    **absent("nothing is reported to anybody", usage_context=ANY),
    **absent("Engine.stats() has the figures", stat_loggers=()),
    **absent("the engine runs in the caller's process and thread", enable_multiprocessing=(False,)),
}
# Arguments of AsyncLLM.generate, and of its from_engine_args.
ASYNC_GENERATE_ARGUMENTS: dict[str, Absent] = {
    **{name: entry for name, entry in ADD_REQUEST_ARGUMENTS.items() if name != "arrival_time"},
    **absent("one process runs one engine", data_parallel_rank=(0,)),
    **absent("texts are given out as they are, with whatever thoughts are in them", reasoning_ended=ANY),
    **absent("texts are given out as they are, with whatever thoughts are in them", reasoning_parser_kwargs=()),
}
ASYNC_FROM_ENGINE_ARGS_ARGUMENTS: dict[str, Absent] = {
    **absent("nothing is reported to anybody", usage_context=ANY),
    **absent("AsyncEngine.stats() has the figures", stat_loggers=()),
    **absent("the engine's thread runs from the beginning", start_engine_loop=(True,)),
}
ABORT_REQUEST_ARGUMENTS: dict[str, Absent] = absent("request ids are the caller's own", internal=(False,))
RESET_PREFIX_CACHE_ARGUMENTS: dict[str, Absent] = {
    **absent("what running requests use stays cached: abort them first", reset_running_requests=(False,)),
    **absent("there is no cache outside the engine", reset_connector=(False,), device=()),
}

# Keys of a prompt given as a dict.
PROMPT_KEYS: dict[str, Absent] = {
    **absent(
        _NO_MEDIA,
        multi_modal_data=(),
        media_io_kwargs=(),
        mm_processor_kwargs=(),
        multi_modal_uuids=(),
        prompt_embeds=(),
        token_type_ids=(),
        prompt_token_offsets=(),
    ),
    **absent("only decoder models are run", encoder_prompt=(), decoder_prompt=()),
}
