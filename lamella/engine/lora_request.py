"""Which adapter a request runs with, as its caller names it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from lamella.argument_checks import WholeRange, path_text, shown
from lamella.errors import RequestError

_INT_ID = WholeRange(1, 2**31 - 1)


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter, with vLLM's names.

    lora_name: what messages call it. lora_int_id: what tells adapters apart, 1 to 2**31 - 1. lora_path: its folder, as
    PEFT saves one. Raises RequestError for values of other kinds.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        if not isinstance(self.lora_name, str) or not self.lora_name:
            raise RequestError(f"lora_name={shown(self.lora_name)}: must be a string that is not empty")
        object.__setattr__(self, "lora_int_id", _INT_ID.check("lora_int_id", self.lora_int_id, RequestError))
        object.__setattr__(self, "lora_path", path_text("lora_path", self.lora_path, RequestError))

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return str(self.lora_path)
