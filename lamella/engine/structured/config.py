"""What an engine allows of structured outputs."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any

from lamella.argument_checks import RealRange, WholeRange, shown, truth_value
from lamella.errors import ConfigError

BACKENDS = ("auto", "guidance", "llguidance", "xgrammar")
_SECONDS = RealRange(0.0, 3600.0, "more than 0 and at most 3600 seconds", leaves_out_least=True)
_CACHE_SIZE = WholeRange(1, 2**20, "at least 1 grammar")


@dataclass(frozen=True, slots=True)
class StructuredOutputsConfig:
    """ConfigError says what would work.

    backend: the library that computes masks; "auto", "guidance" and "llguidance" are llguidance; "xgrammar" is a
        package that is not installed by default, and knows less of JSON schemas.
    disable_any_whitespace, disable_additional_properties: for all requests, see StructuredOutputsParams.
    compile_timeout_seconds: how long a request may wait for its grammar.
    cache_size: how many compiled grammars are kept, those that were used last.
    """

    _: KW_ONLY
    backend: str = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    compile_timeout_seconds: float = 10.0
    cache_size: int = 64

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ConfigError(f"backend={shown(self.backend)} is not known; choose one of {', '.join(BACKENDS)}")
        if self.backend == "xgrammar" and importlib.util.find_spec("xgrammar") is None:
            raise ConfigError(
                "backend='xgrammar' needs the package xgrammar, which is not installed: "
                "pip install xgrammar, or choose 'guidance'"
            )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            self._set(name, truth_value(name, getattr(self, name), ConfigError))
        seconds = _SECONDS.check("compile_timeout_seconds", self.compile_timeout_seconds, ConfigError)
        self._set("compile_timeout_seconds", seconds)
        self._set("cache_size", _CACHE_SIZE.check("cache_size", self.cache_size, ConfigError))

    @staticmethod
    def of(value: Any) -> StructuredOutputsConfig:
        """A value as it is, a dict of its fields, or the defaults for None."""
        if value is None:
            return StructuredOutputsConfig()
        if isinstance(value, StructuredOutputsConfig):
            return value
        if not isinstance(value, Mapping):
            raise ConfigError(f"structured_outputs_config={shown(value)} is a {type(value).__name__}; give a dict")
        known = [field.name for field in fields(StructuredOutputsConfig) if field.name != "_"]
        for name in value:
            if name not in known:
                raise ConfigError(f"structured_outputs_config has {shown(name)}; known: {', '.join(known)}")
        try:
            return StructuredOutputsConfig(**value)
        except ConfigError as error:
            raise ConfigError(f"structured_outputs_config: {error}") from error

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)
