"""The feed-forward part of a layer as data: one MLP for every token, or experts of which each token takes a few."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GateClamp:
    """Bounds of a gated activation: up lies in [-limit, limit], and the gate is at most `limit`, before the activation
    or, with after_activation, behind it.

    slope: of silu, g * sigmoid(slope * g). up_offset is added to up behind its bounds. GPT-OSS has 7, 1.702 and 1.
    """

    limit: float
    after_activation: bool = False
    slope: float = 1.0
    up_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class MLPConfig:
    """down(activation(gate(x)) * up(x)), or down(activation(up(x))) where it is not gated. activation: "silu",
    "gelu_tanh", "gelu" (by erf), "quick_gelu", "relu" or "relu_squared"; clamp: of a gated one."""

    width: int
    activation: str
    has_bias: bool = False
    is_gated: bool = True
    clamp: GateClamp | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Which experts a token takes, and with what weights.

    Logits are a linear layer of the token, with a bias where has_bias says so; logit_cap c turns one into
    c * tanh(l / c). Their scores are, by `scoring`:

    - "softmax": over all experts. Renormalised over the chosen ones it is the softmax of theirs alone.
    - "sigmoid": of each by itself (arXiv 2408.15664).
    - "sparse_mixer": the two picks of arXiv 2409.12136 as they are at inference; `jitter` is its threshold.

    The top_k experts are those with the highest scores. has_correction: a vector is added to the scores for this choice
    alone. num_groups: experts are in so many groups of neighbours, of which those num_chosen_groups count that have the
    highest sums of their two best.

    A chosen expert's weight is its score; renormalised: divided by their sum + renormalised_floor; then times
    `scale`, and times the expert's own scale with has_expert_scale. The weight multiplies what the expert gives, or
    with scales_input what it takes.
    """

    scoring: str
    top_k: int
    has_bias: bool = False
    logit_cap: float | None = None
    has_correction: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    is_renormalised: bool = False
    renormalised_floor: float = 0.0
    scale: float = 1.0
    has_expert_scale: bool = False
    scales_input: bool = False
    jitter: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A token goes through those experts that the router gives it, each of them an MLP as `expert` says.

    shared: an MLP beside them that every token goes through; shared_has_gate: its output is multiplied with the sigmoid
    of a linear layer of the token. held: the experts whose weights the model has, where others of the num_experts are
    other workers' (`sharding`); None: all.
    """

    num_experts: int
    expert: MLPConfig
    router: RouterConfig
    shared: MLPConfig | None = None
    shared_has_gate: bool = False
    held: range | None = None

    @property
    def held_experts(self) -> range:
        return range(self.num_experts) if self.held is None else self.held
