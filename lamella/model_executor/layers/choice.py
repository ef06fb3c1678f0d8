"""Which operators a model runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lamella.errors import ConfigError
from lamella.model_executor.layers.contract import Operators
from lamella.model_executor.layers.description import Experts, Model
from lamella.model_executor.layers.worker_sum import ONE_WORKER, WorkerSum
from lamella.model_executor.weights.model_source import ModelSource

if TYPE_CHECKING:
    from lamella.model_executor.weights.gguf_form import GgufBlocks

QUANTIZATIONS = (None, "none", "int8", "w8a8", "gguf")


def choose_operators(
    quantization: str | None,
    backend_name: str,
    source: ModelSource,
    model: Model,
    workers: WorkerSum = ONE_WORKER,
) -> Operators:
    """The operators that go with the attention backend `backend_name`, for the weights of `source`. workers: who
    computes each layer together.

    Raises ConfigError for a quantization that they do not have, and for stored blocks that are not cut.
    """
    if backend_name != "native":
        if quantization not in (None, "none"):
            raise ConfigError(
                f"quantization={quantization!r} needs the native CPU path, and attention runs on {backend_name!r} here "
                "(the log says why); leave quantization out, or see attention_backend='native' for what is in the way"
            )
        if backend_name == "triton":
            from lamella.model_executor.layers.triton.operators import TritonOperators

            return TritonOperators(workers)
        from lamella.model_executor.layers.torch_operators import TorchOperators

        return TorchOperators(workers)
    from lamella.model_executor.layers.linear_kinds import Float32Linear, Int8Linear, LinearKind
    from lamella.model_executor.layers.native_operators import NativeOperators

    kind: LinearKind = Float32Linear(f"{model.head.name}.weight")
    if quantization is None and (blocks := mxfp4_blocks(source, model)) is not None:
        if workers.num_workers > 1:
            raise ConfigError(
                f"tensor_parallel_size={workers.num_workers}: the experts are stored in MXFP4, whose blocks are kept "
                'here and are not cut; give quantization="none", which takes them as floats'
            )
        from lamella.model_executor.layers.gguf_kind import GgufLinear

        return NativeOperators(GgufLinear(blocks))
    if quantization == "int8":
        kind = Int8Linear()
    elif quantization == "w8a8":
        kind = Int8Linear(activations="int8")
    elif quantization == "gguf":
        if source.kind != "gguf":
            raise ConfigError(
                f"quantization='gguf' keeps the blocks of a GGUF file, and the weights of {source.folder} are of kind "
                f"{source.kind!r}; give a .gguf file as the model, or quantization='int8'"
            )
        from lamella.model_executor.layers.gguf_kind import GgufLinear
        from lamella.model_executor.models.registry import weight_map
        from lamella.model_executor.weights.checkpoint import GgufCheckpoint
        from lamella.model_executor.weights.gguf_form import GgufBlocks

        checkpoint = GgufCheckpoint(source.paths[0], weight_map(model.config))
        kind = GgufLinear(GgufBlocks(checkpoint, model.parameters()))
    return NativeOperators(kind, workers)


def mxfp4_blocks(source: ModelSource, model: Model) -> GgufBlocks | None:
    """The form of weights that are stored in MXFP4 and keep their blocks; None where none are."""
    if source.kind != "safetensors" or not any(isinstance(layer.mlp, Experts) for layer in model.layers):
        return None
    from lamella.model_executor.models.registry import weight_map
    from lamella.model_executor.weights.checkpoint import SafetensorsCheckpoint
    from lamella.model_executor.weights.gguf_form import GgufBlocks

    checkpoint = SafetensorsCheckpoint(source.paths, weight_map(model.config))
    if all(tensor.scales_name is None for tensor in checkpoint.tensors.values()):
        return None
    return GgufBlocks(checkpoint, model.parameters())
