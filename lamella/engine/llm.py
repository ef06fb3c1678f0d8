"""The offline batch interface: `LLM(model).generate(prompts)`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm.auto import tqdm

from lamella.argument_checks import shown, truth_value
from lamella.distributed.open_engine import open_engine
from lamella.engine.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from lamella.engine.chat_boundaries import characters_before
from lamella.engine.config import EngineConfig
from lamella.engine.engine import Engine
from lamella.engine.generate_progress import generate_progress
from lamella.engine.lora_request import LoRARequest
from lamella.engine.model_opening import ServedConfig
from lamella.engine.outputs import RequestOutput
from lamella.engine.prefix_boundaries import message_indices, tokens_before
from lamella.engine.prompts import ParsedPrompt, Prompt, TokensPrompt, split_prompts
from lamella.engine.sampling_params import RequestOutputKind, SamplingParams
from lamella.engine.saved_prefixes import PrefixFile
from lamella.engine.scores import ScoredPair, ScoreOutput, encode_pair, pairs_of
from lamella.engine.turns import Turns, in_turn
from lamella.engine.vllm_keywords import refuse_foreign
from lamella.engine.vllm_request_arguments import BEAM_SEARCH_ARGUMENTS, CHAT_ARGUMENTS, GENERATE_ARGUMENTS
from lamella.errors import EngineClosedError, LamellaError, RequestError
from lamella.kv_cache.pinned_prefixes import PinnedPrefix
from lamella.model_executor.text.tokenizer import Tokenizer

Message = Mapping[str, Any]
_CHAT_ARGUMENTS = (
    "messages",
    "sampling_params",
    "use_tqdm",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "chat_template_kwargs",
    "lora_request",
    "prefix_boundary",
)


class LLM:
    """A model for offline batches. Keyword arguments are EngineConfig's; unknown ones raise TypeError. vLLM's other
    arguments, here and of its methods, are taken where they ask for nothing; elsewhere UnsupportedArgumentError says
    what lamella has instead.
    use_tqdm_on_load: say on stderr what loading does where that takes long, as the first time, when weights are
    converted.

    A context manager; `close()` gives the memory back. Any thread may call: of several calls of `generate` and `chat`,
    one runs and the others wait for it; `close` ends a running one with EngineClosedError after its step.
    """

    def __init__(self, model: str, *, use_tqdm_on_load: bool = True, **engine_arguments: Any) -> None:
        # Offline the order is ours to choose; outputs come back in the order of the prompts either way.
        engine_arguments.setdefault("scheduling_policy", "prefix")
        config = EngineConfig(model=model, **engine_arguments)
        self.engine: Engine = open_engine(config, shows_progress=use_tqdm_on_load)
        self._next_id = itertools.count()
        self._ids: list[str] = []  # requests of a `generate` that has not ended them yet
        self._turns = Turns()

    @classmethod
    def from_engine_args(cls, engine_args: EngineConfig) -> LLM:
        """An LLM with every argument as given there: also scheduling_policy, "fcfs" unless told otherwise."""
        return cls(**{field.name: getattr(engine_args, field.name) for field in dataclasses.fields(engine_args)})

    @property
    def llm_engine(self) -> Engine:
        """`engine` under vLLM's name."""
        return self.engine

    @property
    def load_seconds(self) -> float:
        return self.engine.load_seconds

    @property
    def model_config(self) -> ServedConfig:
        return self.engine.model_config

    def get_default_sampling_params(self) -> SamplingParams:
        """SamplingParams() with what the model's generation_config.json says of sampling."""
        return self.engine.get_default_sampling_params()

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.get_tokenizer()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs are in the order of the prompts.

        prompts: a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}, or a list of
        these, mixed freely. sampling_params: one for all, or one per prompt; None: the model's own defaults.
        use_tqdm: show a progress bar that moves with tokens on stderr, or, where that is no terminal, a line every ten
        seconds; or make the bar with this callable, which then counts prompts.
        lora_request: the adapter to run with, one for all or one per prompt, None among them for the model alone.
        All prompts are checked before anything runs, and adapters loaded: RequestError names the first bad prompt,
        ModelLoadError what is wrong with an adapter.
        """
        known = ("prompts", "sampling_params", "use_tqdm", "lora_request")
        refuse_foreign("generate", vllm_arguments, known=known, foreign=GENERATE_ARGUMENTS)
        split = split_prompts(prompts)
        all_params = self._params_per_prompt(sampling_params, len(split))
        requests = _adapter_per_prompt(lora_request, len(split))
        parsed: list[ParsedPrompt] = []
        for index, (prompt, params) in enumerate(zip(split, all_params, strict=True)):
            try:
                parsed.append(self.engine.parse(prompt, params))
            except RequestError as error:
                raise type(error)(f"prompts[{index}]: {error}") from error
        if lora_request is not None:
            # Each is loaded once, however many stay loaded.
            adapters = {
                request: self.engine.load_adapter(request) for request in dict.fromkeys(requests) if request is not None
            }
            parsed = [
                prompt if request is None else dataclasses.replace(prompt, adapter=adapters[request])
                for prompt, request in zip(parsed, requests, strict=True)
            ]
        return self._run(parsed, all_params, use_tqdm)

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        continuations: str | Sequence[int] | Sequence[str | Sequence[int]],
        *,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
    ) -> list[ScoreOutput]:
        """How likely each continuation is after its prompt; outputs are in the order of the continuations.

        prompts: as for `generate`; one, or one for each continuation. continuations: strings or lists of token ids. Two
        texts are tokenised as one, and a space between them belongs to the continuation. Equal prompts are computed
        once, as far as the prefix cache holds them; only the continuations' tokens are scored.
        All are checked before anything runs: RequestError names the first bad one.
        """
        pairs: list[ScoredPair] = []
        parsed: list[ParsedPrompt] = []
        tokenizer = self.get_tokenizer()
        for index, (prompt, continuation) in enumerate(pairs_of(prompts, continuations)):
            try:
                pairs.append(encode_pair(prompt, continuation, tokenizer))
                parsed.append(self.engine.parse(pairs[-1].prompt, pairs[-1].params))
            except RequestError as error:
                raise type(error)(f"continuations[{index}]: {error}") from error
        outputs = self._run(parsed, [pair.params for pair in pairs], use_tqdm)
        return [pair.score(output) for pair, output in zip(pairs, outputs, strict=True)]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        *,
        use_tqdm: bool = False,
        **vllm_arguments: Any,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` most likely texts that a beam search finds for each prompt, the best first; outputs are in
        the order of the prompts. prompts: as for `generate`. use_tqdm: show a bar that moves with rounds.

        All prompts are checked before anything runs: RequestError names the first bad one.
        """
        known = ("prompts", "params", "use_tqdm")
        refuse_foreign("beam_search", vllm_arguments, known=known, foreign=BEAM_SEARCH_ARGUMENTS)
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params is {type(params).__name__}: must be a BeamSearchParams")
        parsed: list[ParsedPrompt] = []
        for index, prompt in enumerate(split_prompts(prompts)):
            try:
                parsed.append(self.engine.parse(prompt, SamplingParams(max_tokens=params.max_tokens)))
                room = self.engine.max_model_len - len(parsed[-1].token_ids)
                if params.max_tokens > room:
                    raise RequestError(
                        f"max_tokens={params.max_tokens}: a prompt of {len(parsed[-1].token_ids)} tokens leaves room "
                        f"for {room} within max_model_len={self.engine.max_model_len}"
                    )
            except RequestError as error:
                raise type(error)(f"prompts[{index}]: {error}") from error
        config = self.model_config
        rounds = search_beams(
            parsed,
            params,
            config.eos_token_ids,
            lambda asked, requests: self._run(asked, requests, use_tqdm=False),
            config.vocab_size,
            self.get_tokenizer(),
        )
        found: list[BeamSearchOutput] = []
        for outputs in tqdm(rounds, total=params.max_tokens + 1, disable=not use_tqdm):
            found = outputs
        return found

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        prefix_boundary: int | Sequence[int] | None = None,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of them, rendered with the model's chat template.

        messages: [{"role": "user", "content": ...}, ...]; what else a message may hold depends on the template.
        chat_template: a Jinja template to use instead, or the name of one of the model's. continue_final_message: go on
        with the last message instead of answering it, which needs add_generation_prompt=False. tools: JSON schemas, or
        functions with type hints and a docstring. chat_template_kwargs: further variables for the template, such as
        enable_thinking. prefix_boundary: index of a message, or of several, after which other conversations will part
        from these (0: after the first, the system message): see docs/prefixes.md.
        lora_request: as `generate` takes it.
        """
        refuse_foreign("chat", vllm_arguments, known=_CHAT_ARGUMENTS, foreign=CHAT_ARGUMENTS)
        prompts = self.chat_prompts(
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            prefix_boundary=prefix_boundary,
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def chat_prompts(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        prefix_boundary: int | Sequence[int] | None = None,
    ) -> list[TokensPrompt]:
        """The prompts that `chat` gives to `generate`, which take the same arguments: for `pin_prefix`, `save_prefix`
        and engines that are stepped."""
        truth_value("add_generation_prompt", add_generation_prompt, RequestError)
        conversations = _split_conversations(messages)
        tokenizer = self.get_tokenizer()
        arguments: dict[str, Any] = {
            "tools": tools,
            "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        variables = dict(chat_template_kwargs or {})
        if clashing := sorted(set(variables) & {*arguments, "messages", "tokenize", "return_dict"}):
            raise RequestError(f"chat_template_kwargs has {', '.join(clashing)}: pass them to chat itself")
        prompts: list[TokensPrompt] = []
        for index, conversation in enumerate(conversations):

            def render(messages: Sequence[Message]) -> str:
                text: str = tokenizer.apply_chat_template(messages, **arguments, **variables)
                return text

            try:
                text = render(conversation)
                indices = message_indices(prefix_boundary, len(conversation))
                ends = characters_before(render, conversation, text, indices)
            except RequestError as error:
                if len(conversations) == 1:
                    raise
                raise RequestError(f"conversation {index}: {error}") from error
            # Chat templates write the special tokens themselves.
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompt: TokensPrompt = {"prompt": text, "prompt_token_ids": ids}
            if ends:
                prompt["prefix_boundary"] = tokens_before(tokenizer, text, ids, ends, add_special_tokens=False)
            prompts.append(prompt)
        return prompts

    def pin_prefix(self, prompt: Prompt, *, cache_salt: str | None = None, name: str | None = None) -> PinnedPrefix:
        """`Engine.pin_prefix`, and compute the prompt now if it is not cached. Where that fails it is not pinned."""
        engine = self.engine
        pinned = engine.pin_prefix(prompt, cache_salt=cache_salt, name=name)
        if pinned.is_cached:
            return pinned
        try:
            self._compute_prefix(prompt, cache_salt)
        except BaseException:
            if not engine.is_closed:
                engine.unpin_prefix(pinned)
            raise
        return next(one for one in engine.pinned_prefixes() if one.name == pinned.name)

    def unpin_prefix(self, prefix: PinnedPrefix | str) -> None:
        """Undo `pin_prefix`, by what that returned or by name."""
        self.engine.unpin_prefix(prefix)

    def pinned_prefixes(self) -> list[PinnedPrefix]:
        """All pinned prefixes, in the order in which they were pinned."""
        return self.engine.pinned_prefixes()

    def save_prefix(self, path: str | Path, prompt: Prompt, *, cache_salt: str | None = None) -> PrefixFile:
        """Compute a prompt, as far as it is not cached, and write its KV to a file: see `Engine.save_prefix`."""
        self._compute_prefix(prompt, cache_salt)
        return self.engine.save_prefix(path, prompt, cache_salt=cache_salt)

    def load_prefix(self, path: str | Path) -> PrefixFile:
        """Put what `save_prefix` wrote into the cache: see `Engine.load_prefix`."""
        return self.engine.load_prefix(path)

    def _compute_prefix(self, prompt: Prompt, cache_salt: str | None) -> None:
        """Run a request with this prompt, whose end becomes a place to resume that goes after others."""
        params = SamplingParams(temperature=0, max_tokens=1)
        parsed = self.engine.parse_prefix(prompt, cache_salt)
        self._run([dataclasses.replace(parsed, prefix_boundaries=(len(parsed.token_ids),))], [params], False)

    def reset_prefix_cache(self, **vllm_arguments: Any) -> bool:
        """Forget cached prefixes; True when none is left but pinned ones, which stay."""
        return self.engine.reset_prefix_cache(**vllm_arguments)

    def close(self) -> None:
        """Give all memory back. Closing twice is fine."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _params_per_prompt(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or self.get_default_sampling_params()] * num_prompts
        if not isinstance(sampling_params, Sequence):
            raise RequestError(
                f"sampling_params is {type(sampling_params).__name__}: must be a SamplingParams or a list of them"
            )
        if len(sampling_params) != num_prompts:
            raise RequestError(
                f"sampling_params has {len(sampling_params)} entries for {num_prompts} prompts: give one for all, "
                "or one per prompt"
            )
        return list(sampling_params)

    @in_turn
    def _run(
        self, prompts: list[ParsedPrompt], all_params: list[SamplingParams], use_tqdm: bool | Callable[..., tqdm[Any]]
    ) -> list[RequestOutput]:
        engine = self.engine
        if self._ids:  # a call was interrupted, and interrupted again before it had ended its requests
            engine.abort(self._ids)
            self._ids = []
        if engine.has_unfinished_requests():
            raise LamellaError(
                f"the engine still has {engine.num_unfinished_requests} requests from add_request: step until they "
                "are finished, or abort them, before calling generate"
            )
        ids = [f"llm-{next(self._next_id)}" for _ in prompts]
        finished: dict[str, RequestOutput] = {}
        most_tokens = {
            request_id: len(prompt.token_ids)
            + (engine.max_model_len - len(prompt.token_ids) if params.max_tokens is None else params.max_tokens)
            * params.n
            for request_id, prompt, params in zip(ids, prompts, all_params, strict=True)
        }
        progress = generate_progress(most_tokens, use_tqdm, engine.running_tokens)
        try:
            self._ids = ids
            for request_id, prompt, params in zip(ids, prompts, all_params, strict=True):
                final_only = dataclasses.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)
                engine.add_parsed(request_id, prompt, final_only)
            while engine.has_unfinished_requests():
                outputs = engine.step()
                finished.update({output.request_id: output for output in outputs})
                progress.step(outputs)
        finally:
            if not engine.is_closed:
                engine.abort(ids)  # it ignores those that have finished
            self._ids = []
            progress.close()
        if len(finished) < len(ids):
            if engine.is_closed:
                raise EngineClosedError("the engine was closed while generate ran: its unfinished requests are dropped")
            raise LamellaError(
                "outputs are missing: something else stepped the engine or aborted its requests while generate ran; "
                "leave the engine to generate until it returns"
            )
        return [finished[request_id] for request_id in ids]


def _adapter_per_prompt(
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None, num_prompts: int
) -> Sequence[LoRARequest | None]:
    given: list[Any] = list(lora_request) if isinstance(lora_request, (list, tuple)) else [lora_request]
    for request in given:
        if not (request is None or isinstance(request, LoRARequest)):
            raise RequestError(
                f"lora_request={shown(request)} is a {type(request).__name__}; give a LoRARequest(lora_name, "
                "lora_int_id, lora_path), or a list of them"
            )
    if not isinstance(lora_request, (list, tuple)):
        return given * num_prompts
    if len(lora_request) != num_prompts:
        raise RequestError(
            f"lora_request has {len(lora_request)} entries for {num_prompts} prompts: give one for all, or one per "
            "prompt"
        )
    return given


def _split_conversations(messages: Any) -> list[Sequence[Message]]:
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(
            'messages must be a non-empty list of {"role": ..., "content": ...}, or a list of such lists'
        )
    # A conversation is a list; a message is a mapping or an object with fields, which the renderer checks.
    if not any(isinstance(one, (list, tuple)) for one in messages):
        return [messages]
    for index, conversation in enumerate(messages):
        if not isinstance(conversation, (list, tuple)) or not conversation:
            raise RequestError(f"messages[{index}] must be a non-empty list of messages")
    return list(messages)
