"""`LoRARequest`, where vLLM has it."""

from lamella.engine.lora_request import LoRARequest

__all__ = ["LoRARequest"]
