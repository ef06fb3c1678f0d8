"""What requests return, where vLLM has it."""

from lamella.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"]
