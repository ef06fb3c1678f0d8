"""Layers that compute only the tokens which something depends on, in a loop over layers that is transformers' own.

The loop hands each layer tensors of all tokens: hidden states, rotary embeddings, inputs per layer. Before a layer
runs, its arguments are cut to the tokens that it takes in. Which dimension of an argument counts tokens is learned from
two passes of different lengths. A model whose loop does more with hidden states than to pass them on is not pruned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from lamella.model_executor.models.transformers_backend.attention_interface import set_handler
from lamella.model_executor.models.transformers_backend.recorder import RecordedLayer, run_tokens
from lamella.model_executor.models.transformers_backend.token_mixing import own_value
from lamella.model_executor.step_attention import StepAttention

Path = tuple[Any, ...]  # where an argument stands: its position or keyword, then places within
Rows = Callable[[int, int], torch.Tensor | None]  # `StepAttention.rows_between`
_LENGTHS = (2, 5)


class LayerPruning:
    """Cuts the arguments of a model's decoder layers. `begin(step)` before a pass, `end()` after it."""

    def __init__(self, model: torch.nn.Module, layers: list[torch.nn.Module]) -> None:
        self.is_usable = False
        self._rows: Rows | None = None
        self._num_tokens: list[int] = []  # that each layer before has taken in
        self._shapes: list[dict[Path, list[torch.Size]]] = [{} for _ in layers]
        self._token_dims: list[dict[Path, int]] = []
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(self._hook(index), with_kwargs=True)
        self._learn(model, len(layers))

    def begin(self, step: StepAttention, num_tokens: int) -> None:
        """From now on each layer takes in what `step` says; `num_tokens`: what the first does."""
        self._begin(step.rows_between if step.needed_tokens else None, num_tokens)

    def end(self) -> None:
        self._rows = None

    def _begin(self, rows: Rows | None, num_tokens: int) -> None:
        self._rows, self._num_tokens = rows, [num_tokens]

    def _hook(self, index: int) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]] | None]:
        def before(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not self._token_dims:
                for path, tensor in _tensors((args, kwargs)):
                    self._shapes[index].setdefault(path, []).append(tensor.shape)
                return None
            if self._rows is None or index == 0:
                return None
            rows_of_all, rows_of_last = _some(self._rows(0, index)), _some(self._rows(index - 1, index))
            num_all, num_last = self._num_tokens[0], self._num_tokens[-1]
            self._num_tokens.append(num_last if rows_of_last is None else len(rows_of_last))
            if rows_of_all is None:
                return None

            def cut(path: Path, tensor: torch.Tensor) -> torch.Tensor:
                dim = self._token_dims[index].get(path)
                if dim is None:
                    return tensor
                rows = rows_of_last if tensor.shape[dim] == num_last else rows_of_all
                assert tensor.shape[dim] in (num_last, num_all)
                return tensor if rows is None else tensor.index_select(dim, rows)

            return _mapped((args, kwargs), cut)

        return before

    def _learn(self, model: torch.nn.Module, num_layers: int) -> None:
        """Find the dimensions that count tokens, and try whether the model gives the same with its last layers cut."""
        device = next(model.parameters()).device
        set_handler(model, own_value)
        whole = [run_tokens(model, torch.arange(length, device=device)) for length in _LENGTHS][1]
        self._token_dims, self._shapes = [_token_dims(shapes) for shapes in self._shapes], []
        # The last ones: layers that share KV get that of all tokens, and `own_value` takes its end.
        wanted = torch.tensor([3, 4], device=device)
        middle = (num_layers + 1) // 2

        def rows(lower: int, upper: int) -> torch.Tensor | None:
            return wanted if lower < middle <= upper else None

        if num_layers == 1:
            return
        self._begin(rows, _LENGTHS[1])
        try:
            cut = run_tokens(model, torch.arange(_LENGTHS[1], device=device), num_left=len(wanted))
            self.is_usable = cut.shape[0] == len(wanted) and torch.allclose(cut, whole[wanted], rtol=1e-3, atol=1e-3)
        except Exception:  # whatever the loop does with states of fewer tokens, it is then run with all of them
            self.is_usable = False
        finally:
            self.end()


def decoder_layers(model: torch.nn.Module, recorded: list[RecordedLayer]) -> list[torch.nn.Module]:
    """The modules that the model's loop runs one after the other, one per attention call; empty where that is not how
    it is built."""
    modules = []
    for index, layer in enumerate(recorded):
        parts = layer.module_name.split(".")
        place = next((n for n, part in enumerate(parts) if part == str(index)), None)
        if place is None:
            return []
        modules.append(model.get_submodule(".".join(parts[: place + 1])))
    return modules


def _some(rows: torch.Tensor | None) -> torch.Tensor | None:
    """`rows`, or the first one where there are none: transformers' layers cannot run without tokens. Attention leaves
    that one alone."""
    return rows.new_zeros(1) if rows is not None and not len(rows) else rows


def _token_dims(shapes: dict[Path, list[torch.Size]]) -> dict[Path, int]:
    both = ((path, found) for path, found in shapes.items() if len(found) == len(_LENGTHS))
    return {path: dim for path, found in both if (dim := _differing(found[0], found[1])) is not None}


def _differing(one: torch.Size, other: torch.Size) -> int | None:
    """The only dimension in which the shapes differ by the lengths of the passes."""
    if len(one) != len(other):
        return None
    dims = [dim for dim, sizes in enumerate(zip(one, other, strict=True)) if sizes == _LENGTHS]
    return dims[0] if len(dims) == 1 else None


def _tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (tuple, list)):
        for place, item in enumerate(value):
            yield from _tensors(item, (*path, place))
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, (*path, key))


def _mapped(value: Any, change: Callable[[Path, torch.Tensor], torch.Tensor], path: Path = ()) -> Any:
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(item, change, (*path, place)) for place, item in enumerate(value))
    if isinstance(value, dict):
        return {key: _mapped(item, change, (*path, key)) for key, item in value.items()}
    return value
