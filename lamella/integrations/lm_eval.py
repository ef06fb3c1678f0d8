"""lm-evaluation-harness's interface to models: `lm_eval.simple_evaluate(model=lm_eval_model(LLM(...)), tasks=[...])`.

`HarnessModel` is the interface without the harness, which is imported by `lm_eval_model` alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lamella.argument_checks import shown
from lamella.engine.llm import LLM
from lamella.engine.prompts import Prompt
from lamella.engine.sampling_params import SamplingParams
from lamella.errors import RequestError

_MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
Window = tuple[list[int], list[int]]


class HarnessModel:
    """The three methods of a model of the harness. Their requests are its instances, of which `args` is read.

    max_length: most tokens that are scored at once; None: as many as the engine takes. Longer ones lose their
        beginnings, and longer documents are scored in parts.
    max_gen_toks: most tokens to generate where a task does not say.
    add_bos_token: whether texts begin with the tokenizer's own special tokens; None: as the tokenizer has it.
    prefix_token_id: what comes before a text that has no context; None: the tokenizer's bos, or else its eos.
    """

    def __init__(
        self,
        llm: LLM,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
    ) -> None:
        self.llm = llm
        self.tokenizer = llm.get_tokenizer()
        # A scored text has one token more than is computed, and its request generates one.
        most = llm.engine.max_model_len - 2
        if max_length is not None and not 1 <= max_length <= most:
            raise RequestError(
                f"max_length={max_length}: max_model_len={llm.engine.max_model_len} allows 1 to {most}; make the LLM "
                "with a larger max_model_len, or give less"
            )
        self.max_length = most if max_length is None else max_length
        self.max_gen_toks = max_gen_toks
        self.add_bos_token = add_bos_token
        prefixes = (prefix_token_id, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id)
        found = next((token_id for token_id in prefixes if token_id is not None), None)
        if found is None:
            raise RequestError("the tokenizer has neither bos nor eos: give prefix_token_id, what to begin texts with")
        self.prefix_token_id = found
        self._prefix_text: str = self.tokenizer.decode([found], False)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Of each (context, continuation): the continuation's log-probability, and whether greedy decoding would give
        it."""
        windows = [self._encode_pair(*request.args) for request in requests]
        answers = self._score(windows, use_tqdm=not disable_tqdm)
        for request, answer in zip(requests, answers, strict=True):
            self._remember("loglikelihood", request.args, answer)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Of each (text,): its log-probability, each token given as many tokens before it as there is room for."""
        documents = [list(self._windows(self.encode(request.args[0]))) for request in requests]
        scores = iter(self._score([one for windows in documents for one in windows], use_tqdm=not disable_tqdm))
        answers = [sum((next(scores)[0] for _ in windows), 0.0) for windows in documents]
        for request, answer in zip(requests, answers, strict=True):
            self._remember("loglikelihood_rolling", request.args, answer)
        return answers

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Of each (context, settings): what the model writes until one of the texts `until`, or an end token, or
        max_gen_toks tokens."""
        prompts: list[Prompt] = []
        params: list[SamplingParams] = []
        for request in requests:
            context, settings = request.args
            params.append(self._sampling_params(settings))
            assert params[-1].max_tokens is not None
            room = self.max_length - params[-1].max_tokens
            if room < 1:
                raise RequestError(
                    f"max_gen_toks={params[-1].max_tokens} leaves no room for a prompt within "
                    f"max_length={self.max_length}: let the task ask for less, or raise max_model_len"
                )
            prompts.append({"prompt_token_ids": self.encode(context)[-room:]})
        outputs = self.llm.generate(prompts, params, use_tqdm=not disable_tqdm)
        answers = [output.outputs[0].text for output in outputs]
        for request, answer in zip(requests, answers, strict=True):
            self._remember("generate_until", request.args, answer)
        return answers

    def encode(self, text: str, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids. A text that begins with the prefix token's own text gets no special tokens more."""
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token is not False and not text.startswith(self._prefix_text)
        return self.tokenizer.encode(text, add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as the model's chat template writes it."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    @property
    def tokenizer_name(self) -> str:
        return str(self.llm.engine.config.tokenizer or self.llm.engine.config.model).replace("/", "__")

    def _remember(self, kind: str, arguments: Any, answer: Any) -> None:
        """Called with each answer; the harness may keep them."""

    def _encode_pair(self, context: str, continuation: str) -> Window:
        """Tokens of context and continuation. Spaces between them belong to the continuation, as the harness has it."""
        if not context:
            ids = self.encode(continuation, add_special_tokens=False)
            return (ids[:1], ids[1:]) if ids[:1] == [self.prefix_token_id] else ([self.prefix_token_id], ids)
        stripped = context.rstrip()
        ids = self.encode(stripped)
        whole = self.encode(stripped + context[len(stripped) :] + continuation)
        return ids, whole[len(ids) :]

    def _windows(self, token_ids: list[int]) -> Iterator[Window]:
        """Parts of a long text, each token in one of them as a continuation."""
        most = self.max_length
        first = token_ids[:most]
        if first:
            yield [self.prefix_token_id], first
        for start in range(most, len(token_ids), most):
            end = min(start + most, len(token_ids))
            # The last part is filled up with what comes before it.
            yield token_ids[end - most - 1 : start], token_ids[start:end]

    def _score(self, windows: Sequence[Window], *, use_tqdm: bool) -> list[tuple[float, bool]]:
        """A continuation without tokens is certain."""
        asked = [place for place, (_, continuation) in enumerate(windows) if continuation]
        contexts, continuations = [], []
        for place in asked:
            context, continuation = windows[place]
            if len(continuation) > self.max_length:
                raise RequestError(
                    f"a continuation has {len(continuation)} tokens, more than max_length={self.max_length}: make the "
                    "LLM with a larger max_model_len"
                )
            room = self.max_length + 1 - len(continuation)
            contexts.append(context[-room:])
            continuations.append(continuation)
        scores = self.llm.score(contexts, continuations, use_tqdm=use_tqdm) if asked else []
        answers = [(0.0, True)] * len(windows)
        for place, score in zip(asked, scores, strict=True):
            answers[place] = score.logprob, score.is_all_greedy
        return answers

    def _sampling_params(self, settings: Mapping[str, Any]) -> SamplingParams:
        """The harness's settings of generation. Without do_sample or a temperature above 0 they are greedy."""
        given = dict(settings)
        until = given.pop("until", None) or []
        named = [given.pop(name) for name in _MAX_TOKENS_NAMES if name in given]
        max_tokens = next((int(one) for one in named if one is not None), self.max_gen_toks)
        do_sample = given.pop("do_sample", None)
        sampling = {name: given.pop(name) for name in _SAMPLING_NAMES if given.get(name) is not None}
        given = {name: value for name, value in given.items() if value is not None}
        if given:
            raise RequestError(
                f"generation settings have {shown(given)}, which is not known here; those are until, do_sample, "
                f"{', '.join((*_MAX_TOKENS_NAMES, *_SAMPLING_NAMES))}"
            )
        if do_sample is False or (do_sample is None and not sampling.get("temperature")):
            sampling["temperature"] = 0.0
        stop = [one for one in ([until] if isinstance(until, str) else until) if one]
        return SamplingParams(max_tokens=max_tokens, stop=stop, **sampling)


def lm_eval_model(llm: LLM, **options: Any) -> Any:
    """A model for `lm_eval.simple_evaluate` and `lm_eval.evaluate`. options: those of HarnessModel.

    Needs lm-evaluation-harness, which the extra `lm-eval` installs; ImportError without it.
    """
    from lm_eval.api.model import LM

    class LamellaLM(HarnessModel, LM):
        def __init__(self) -> None:
            LM.__init__(self)
            HarnessModel.__init__(self, llm, **options)

        def _remember(self, kind: str, arguments: Any, answer: Any) -> None:
            self.cache_hook.add_partial(kind, arguments, answer)

        def chat_template(self, chat_template: bool | str = False) -> str:
            """What tells one template from another in the harness's records."""
            return str(getattr(self.tokenizer, "chat_template", "") or "") if chat_template else ""

    return LamellaLM()
