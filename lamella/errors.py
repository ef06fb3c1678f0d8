"""Every error lamella raises on purpose.

Messages have one form: what was given, why it cannot be, what would work.
"""


class LamellaError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(LamellaError, ValueError):
    """An engine argument that cannot be used."""


class CapacityError(ConfigError):
    """KV memory too small for what was asked of it."""


class ModelLoadError(LamellaError, ValueError):
    """A model that cannot be loaded: wrong file, unknown architecture, missing tensor, wrong shape."""


class UnbuiltVariantError(ModelLoadError):
    """A variant that a model's native family does not build, of files that are well formed: other code may run it."""


class RequestError(LamellaError, ValueError):
    """A request that is refused; other requests are not touched."""


class RequestFailedError(LamellaError, RuntimeError):
    """A request that failed alone while it ran; other requests are not touched."""


class InterruptedRequestError(LamellaError, RuntimeError):
    """A request that Ctrl-C ended before it had finished."""


class UnsupportedArgumentError(ConfigError, RequestError):
    """An argument of vLLM's that lamella does not have, with a value that asks for something. It is one class for
    engines and requests, so that a script that is being ported need not tell them apart."""


class PrefixFileError(LamellaError, ValueError):
    """A file of a saved prefix that cannot be written or loaded: wrong, old, cut or damaged."""


class StepFailedError(LamellaError, RuntimeError):
    """A request that was ended because steps with it kept failing. `__cause__` is what they failed with."""


class EngineClosedError(LamellaError, RuntimeError):
    """The engine was used after `close()`."""


class WorkerLostError(LamellaError, RuntimeError):
    """A process that an engine computes with has ended, or does not answer. The engine has ended, too."""


class ReplicaLostError(LamellaError, RuntimeError):
    """One of several engines that share requests ended more often than it is started again."""


class EngineCrashedError(EngineClosedError):
    """The thread of an AsyncEngine ended by an error. `__cause__` is that error."""


class ForkedProcessError(LamellaError, RuntimeError):
    """lamella was used in a child that was forked after something was loaded; "spawn" works."""


class InvariantError(LamellaError, AssertionError):
    """The KV bookkeeping contradicts itself. Always a fault in lamella, never the caller's."""
