"""`lamella models`: which architectures run, and whose layers run them."""

from __future__ import annotations

from typing import Any

from lamella.kv_cache.report import format_table
from lamella.model_executor.models.registry import FAMILIES


def model_rows() -> list[dict[str, Any]]:
    """One row per architecture that config.json may name, native families first, then what transformers alone has.

    backend: "native" or "transformers" (which a native one can be run with, too). status: what can be counted on.
    """
    rows: list[dict[str, Any]] = []
    named: set[str] = set()
    for family in FAMILIES:
        for name in (*family.architectures, *family.multimodal_architectures):
            if not name[:1].isupper() or name in named:  # the lower-case ones are model_type's words for the same
                continue
            named.add(name)
            is_text_of_more = name in family.multimodal_architectures
            reads_gguf = family.config_from_gguf is not None
            rows.append(
                {
                    "architecture": name,
                    "family": family.name,
                    "backend": "native",
                    "gguf": family.gguf_architecture if reads_gguf else None,
                    "status": "supported, its text model" if is_text_of_more else "supported",
                }
            )
    for name in _transformers_architectures():
        if name not in named:
            rows.append(
                {
                    "architecture": name,
                    "family": None,
                    "backend": "transformers",
                    "gguf": None,
                    "status": "checked when it is loaded",
                }
            )
    return rows


def _transformers_architectures() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    names = set()
    for value in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        names |= {value} if isinstance(value, str) else set(value)
    return sorted(name for name in names if name.endswith("ForCausalLM"))


def models_table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    header = ["architecture", "backend", "gguf", "status"]
    return format_table(header, ([str(row[name] or "-") for name in header] for row in rows))
