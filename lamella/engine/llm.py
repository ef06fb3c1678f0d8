"""The offline batch interface: `LLM(model).generate(prompts)`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from tqdm.auto import tqdm

from lamella.argument_checks import shown, truth_value
from lamella.distributed.open_engine import open_engine
from lamella.engine.beam_search import BeamSearchOutput, BeamSearchParams, search_beams
from lamella.engine.chat_prompts import Message, chat_prompts, split_conversations
from lamella.engine.config import EngineConfig
from lamella.engine.engine import Engine
from lamella.engine.generate_progress import generate_progress
from lamella.engine.lora_request import LoRARequest
from lamella.engine.model_opening import ServedConfig
from lamella.engine.offline_requests import (
    CheckedRequest,
    GivenRequest,
    RefusedRequest,
    check_lookahead,
    checked_list,
    checked_requests,
    given_requests,
    is_iterated,
    returns_errors,
)
from lamella.engine.offline_runs import OfflineRun, OfflineRuns, interrupted_output
from lamella.engine.offline_stream import OutputStream
from lamella.engine.outputs import RequestOutput
from lamella.engine.prompts import ParsedPrompt, Prompt, TokensPrompt, split_prompts
from lamella.engine.sampling_params import SamplingParams
from lamella.engine.saved_prefixes import PrefixFile
from lamella.engine.scores import ScoredPair, ScoreOutput, encode_pair, pairs_of
from lamella.engine.turns import Turns, in_turn
from lamella.engine.vllm_keywords import refuse_foreign
from lamella.engine.vllm_request_arguments import BEAM_SEARCH_ARGUMENTS, CHAT_ARGUMENTS, GENERATE_ARGUMENTS
from lamella.errors import RequestError
from lamella.kv_cache.pinned_prefixes import PinnedPrefix
from lamella.model_executor.text.tokenizer import Tokenizer
from lamella.observability.metric_values import Metric

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
    "on_error",
    "lookahead_prompts",
)


class LLM:
    """A model for offline batches. Keyword arguments are EngineConfig's; unknown ones raise TypeError. vLLM's other
    arguments, here and of its methods, are taken where they ask for nothing; elsewhere UnsupportedArgumentError says
    what lamella has instead.
    use_tqdm_on_load: say on stderr what loading does where that takes long, as the first time, when weights are
    converted.

    A context manager; `close()` gives the memory back. Any thread may call: of several calls of `generate` and `chat`,
    one runs and the others wait for it; `close` ends a running one with EngineClosedError after its step. Streams run
    while they are asked for an output, and other calls may come between.
    """

    def __init__(self, model: str, *, use_tqdm_on_load: bool = True, **engine_arguments: Any) -> None:
        # Offline the order is ours to choose; outputs come back in the order of the prompts either way.
        engine_arguments.setdefault("scheduling_policy", "prefix")
        config = EngineConfig(model=model, **engine_arguments)
        self.engine: Engine = open_engine(config, shows_progress=use_tqdm_on_load)
        self._runs = OfflineRuns(self.engine)
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

    def get_metrics(self) -> list[Metric]:
        """`Engine.get_metrics`."""
        return self.engine.get_metrics()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        on_error: Literal["raise", "return"] = "raise",
        lookahead_prompts: int = 4096,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Complete each prompt; outputs are in the order of the prompts.

        prompts: a string, a list of token ids, {"prompt": ...} or {"prompt_token_ids": ...}; or a list of these, mixed
        freely; or a generator, an iterator or a data set of them. sampling_params: one for all, or one per prompt, also
        from an iterator beside one; None: the model's own defaults.
        use_tqdm: show a progress bar that moves with tokens on stderr, or, where that is no terminal, a line every ten
        seconds; or make the bar with this callable, which then counts prompts.
        lora_request: the adapter to run with, one for all or one per prompt, None among them for the model alone.
        Prompts of a list are checked, all of them, before anything runs, and adapters loaded: RequestError names the
        first bad prompt, ModelLoadError what is wrong with an adapter. Those of an iterator are taken as they are
        needed, and checked then; no more than lookahead_prompts that have not finished are held (docs/batch.md).
        on_error: "return": what is bad of one request, and what fails of it, is the `error` of an output in its place,
        and the others run; after Ctrl-C what has finished is returned, and the rest with InterruptedRequestError.
        "raise": the first bad request is raised, and KeyboardInterrupt too, and nothing is returned.
        """
        known = ("prompts", "sampling_params", "use_tqdm", "lora_request", "on_error", "lookahead_prompts")
        refuse_foreign("generate", vllm_arguments, known=known, foreign=GENERATE_ARGUMENTS)
        returns, most_ahead = returns_errors(on_error), check_lookahead(lookahead_prompts)
        if is_iterated(prompts):
            given = given_requests(prompts, sampling_params, lora_request, self.get_default_sampling_params())
            return self._collect(self._iterated(prompts, given, use_tqdm, returns, most_ahead))
        split = split_prompts(prompts)
        requests = list(
            map(
                GivenRequest,
                split,
                self._params_per_prompt(sampling_params, len(split)),
                _adapter_per_prompt(lora_request, len(split)),
            )
        )
        return self._generate_list(requests, use_tqdm, returns)

    def stream(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        in_order: bool = False,
        use_tqdm: bool | Callable[..., tqdm[Any]] = False,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        on_error: Literal["raise", "return"] = "raise",
        lookahead_prompts: int = 4096,
    ) -> OutputStream:
        """Outputs as requests finish, or with in_order in the order of the prompts. `index` of each is the place of its
        prompt.

        Arguments are those of `generate`, but that prompts of a list, too, are taken as they are needed: no more than
        lookahead_prompts are held that have not been given back as outputs. Leaving the loop aborts what has not
        finished and frees its pages; so does any exception, KeyboardInterrupt too. Between two outputs other calls of
        this LLM may be made, which bring the stream on as well.
        """
        returns, most_ahead = returns_errors(on_error), check_lookahead(lookahead_prompts)
        truth_value("in_order", in_order, RequestError)
        if not is_iterated(prompts):
            prompts = split_prompts(prompts)
        given = given_requests(prompts, sampling_params, lora_request, self.get_default_sampling_params())
        run = self._iterated(prompts, given, use_tqdm, returns, most_ahead, in_order=bool(in_order))
        return OutputStream(self._runs, run, self._turns)

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
        messages: Sequence[Message] | Iterable[Sequence[Message]],
        sampling_params: SamplingParams | Iterable[SamplingParams] | None = None,
        *,
        use_tqdm: bool | Callable[..., tqdm[Any]] = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any] | Callable[..., Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | Iterable[LoRARequest | None] | None = None,
        prefix_boundary: int | Sequence[int] | None = None,
        on_error: Literal["raise", "return"] = "raise",
        lookahead_prompts: int = 4096,
        **vllm_arguments: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, rendered with the model's chat template.

        messages: [{"role": "user", "content": ...}, ...]; what else a message may hold depends on the template.
        chat_template: a Jinja template to use instead, or the name of one of the model's. continue_final_message: go on
        with the last message instead of answering it, which needs add_generation_prompt=False. tools: JSON schemas, or
        functions with type hints and a docstring. chat_template_kwargs: further variables for the template, such as
        enable_thinking. prefix_boundary: index of a message, or of several, after which other conversations will part
        from these (0: after the first, the system message): see docs/prefixes.md.
        Conversations may come from an iterator. lora_request, on_error, lookahead_prompts: as `generate` takes them.
        """
        refuse_foreign("chat", vllm_arguments, known=_CHAT_ARGUMENTS, foreign=CHAT_ARGUMENTS)
        returns, most_ahead = returns_errors(on_error), check_lookahead(lookahead_prompts)

        def rendered(messages: Any) -> list[TokensPrompt]:
            return self.chat_prompts(
                messages,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                prefix_boundary=prefix_boundary,
            )

        if not returns and not is_iterated(messages):
            prompts = rendered(messages)
            return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

        def rendered_one(index: int, request: GivenRequest) -> GivenRequest:
            try:
                if not isinstance(request.prompt, (list, tuple)) or not request.prompt:
                    raise RequestError("a conversation must be a non-empty list of messages")
                (prompt,) = rendered(request.prompt)
            except RequestError as error:
                if not returns:
                    raise RequestError(f"conversation {index}: {error}") from error
                return request._replace(prompt=None, error=error)
            return request._replace(prompt=prompt)

        truth_value("add_generation_prompt", add_generation_prompt, RequestError)
        if is_iterated(messages):
            given = given_requests(messages, sampling_params, lora_request, self.get_default_sampling_params())
            requests = itertools.starmap(rendered_one, enumerate(given))
            return self._collect(self._iterated(messages, requests, use_tqdm, returns, most_ahead))
        conversations = split_conversations(messages, refuses_bad=False)
        each = map(
            GivenRequest,
            conversations,
            self._params_per_prompt(sampling_params, len(conversations)),
            _adapter_per_prompt(lora_request, len(conversations)),
        )
        return self._generate_list(list(itertools.starmap(rendered_one, enumerate(each))), use_tqdm, returns)

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
        return chat_prompts(
            self.get_tokenizer(),
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
            prefix_boundary=prefix_boundary,
        )

    def pin_prefix(
        self,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        name: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PinnedPrefix:
        """`Engine.pin_prefix`, and compute the prompt now if it is not cached. Where that fails it is not pinned."""
        engine = self.engine
        pinned = engine.pin_prefix(prompt, cache_salt=cache_salt, name=name, lora_request=lora_request)
        if pinned.is_cached:
            return pinned
        try:
            self._compute_prefix(prompt, cache_salt, lora_request)
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

    def save_prefix(
        self,
        path: str | Path,
        prompt: Prompt,
        *,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PrefixFile:
        """Compute a prompt, as far as it is not cached, and write its KV to a file: see `Engine.save_prefix`."""
        self._compute_prefix(prompt, cache_salt, lora_request)
        return self.engine.save_prefix(path, prompt, cache_salt=cache_salt, lora_request=lora_request)

    def load_prefix(self, path: str | Path, *, lora_request: LoRARequest | None = None) -> PrefixFile:
        """Put what `save_prefix` wrote into the cache: see `Engine.load_prefix`."""
        return self.engine.load_prefix(path, lora_request=lora_request)

    def _compute_prefix(self, prompt: Prompt, cache_salt: str | None, lora_request: LoRARequest | None) -> None:
        """Run a request with this prompt, whose end becomes a place to resume that goes after others."""
        params = SamplingParams(temperature=0, max_tokens=1)
        parsed = self.engine.parse_prefix(prompt, cache_salt, lora_request)
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
        self, sampling_params: SamplingParams | Iterable[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or self.get_default_sampling_params()] * num_prompts
        if isinstance(sampling_params, Iterator):
            sampling_params = list(itertools.islice(sampling_params, num_prompts))
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

    def _run(
        self, prompts: list[ParsedPrompt], all_params: list[SamplingParams], use_tqdm: bool | Callable[..., tqdm[Any]]
    ) -> list[RequestOutput]:
        return self._run_checked(list(map(CheckedRequest, prompts, all_params)), use_tqdm, returns=False)

    def _generate_list(
        self, requests: list[GivenRequest], use_tqdm: bool | Callable[..., tqdm[Any]], returns: bool
    ) -> list[RequestOutput]:
        try:
            checked = checked_list(self.engine, requests, returns_errors=returns)
        except KeyboardInterrupt:
            if not returns:
                raise
            return [interrupted_output(None, index, request.prompt) for index, request in enumerate(requests)]
        return self._run_checked(checked, use_tqdm, returns=returns)

    def _run_checked(
        self,
        requests: Sequence[CheckedRequest | RefusedRequest],
        use_tqdm: bool | Callable[..., tqdm[Any]],
        *,
        returns: bool,
    ) -> list[RequestOutput]:
        """All are queued before the first step."""
        progress = generate_progress(len(requests), use_tqdm, self.engine.running_tokens)
        run = OfflineRun(iter(requests), progress, most_ahead=None, returns_errors=returns)
        return self._collect(run, requests)

    def _iterated(
        self,
        prompts: Iterable[Any],
        given: Iterable[GivenRequest],
        use_tqdm: bool | Callable[..., tqdm[Any]],
        returns: bool,
        most_ahead: int,
        *,
        in_order: bool = False,
    ) -> OfflineRun:
        num_prompts = len(prompts) if isinstance(prompts, Sized) else None
        return OfflineRun(
            checked_requests(self.engine, given, returns_errors=returns),
            generate_progress(num_prompts, use_tqdm, self.engine.running_tokens, is_iterated=True),
            most_ahead=most_ahead,
            returns_errors=returns,
            in_order=in_order,
        )

    @in_turn
    def _collect(
        self, run: OfflineRun, requests: Sequence[CheckedRequest | RefusedRequest] = ()
    ) -> list[RequestOutput]:
        """All outputs of a run, in order. requests: all that it takes, where they are known."""
        runs, found = self._runs, dict[int, RequestOutput]()
        try:
            runs.begin()
            while not run.is_done:
                runs.advance(run)
                while run.ready:
                    output = run.require_right(run.ready[0])
                    assert output.index is not None
                    found[output.index] = output
                    run.ready.popleft()
        except KeyboardInterrupt:
            if not run.returns_errors:
                raise
            found.update({output.index: output for output in run.ready if output.index is not None})
            last = runs.end(run)
            num_requests = max(len(requests), run.num_taken, *(index + 1 for index in (*found, *last)), 0)
            for index in range(num_requests):
                if index not in found:
                    request = requests[index] if index < len(requests) else None
                    prompt = request.parsed.text if isinstance(request, CheckedRequest) else None
                    found[index] = interrupted_output(last.get(index), index, prompt)
        finally:
            runs.end(run)
        return [found[index] for index in range(len(found))]


def _adapter_per_prompt(
    lora_request: LoRARequest | Iterable[LoRARequest | None] | None, num_prompts: int
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
