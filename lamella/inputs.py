"""Forms of prompts, where vLLM has them: `TokensPrompt(prompt_token_ids=[1, 2])` is a dict."""

from lamella.engine.prompts import Prompt as PromptType
from lamella.engine.prompts import TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
