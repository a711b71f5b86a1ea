"""Settings of a mixture of experts; imports no jax."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from sppo_jax.config.section import AUTO, ConfigError, Section, WorkedOut


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Section):
    """Experts in place of the MLP of every layer: a router sends each token to a few of them, and drops none.

    Args:
        count: experts of a layer; 0 to 32767, where 0 is a plain MLP.
        chosen: experts to which the router sends a token; at least 1, at most `model.experts.count`.
        size: elements of the hidden layer of an expert; 1 to 10000000; "auto": `model.mlp_size`.
        mlp: kind of expert: "swiglu" and "geglu" have a gate with SiLU or GELU; "clamped" is gpt-oss's, whose gate is
            at most 7, whose other half is between -7 and 7, and which computes `(up + 1) gate sigmoid(1.702 gate)`.
        bias: whether the experts and the router have biases; true or false.
        shared_size: elements of the hidden layer of the expert that every token passes; 1 to 10000000; null: no such
            expert.
        shared_gate: whether a learnt gate of each token multiplies the output of the shared expert; true or false.
        scores: function that turns the router's products into scores: "softmax" over all experts, "sigmoid" of each
            expert, or "softmax_of_chosen", which chooses by the products and takes the softmax over the chosen.
        normalized: whether the weights of a token's experts are divided by their sum; true or false.
        scaling: number by which the weights of a token's experts are multiplied; above 0.
        choice_bias: whether each expert has a bias that counts only for the choice and that each step moves by
            `model.experts.bias_rate` against the expert's load; true or false.
        bias_rate: change of a choice bias in a step; at least 0.
        expert_groups: groups of equally many experts, of which a token may use only some; a divisor of
            `model.experts.count`.
        chosen_groups: groups that a token may use, the ones with the largest sum of their two best scores; at least 1,
            at most `model.experts.expert_groups`.
        balance: coefficient of the loss that balances the load of experts; at least 0, and 0 is no such loss. A Hugging
            Face folder has 0 unless its `output_router_logits` is true.
        balance_form: "model" is transformers' loss, of the means over all layers; "layer" is Megatron's, a sum over
            layers.
        balance_over: tokens whose sums one loss is of: those of a packed "sequence", which weighs by its share of a
            step's tokens without padding, or those of the whole "batch". The second, and the first with
            `sequence.groups` "flex", need all forwards of a step before its first backward.
        z: coefficient of the router's z-loss, the sum over layers of the mean square of log sum exp; at least 0, and
            0 is no such loss.
    """

    section: ClassVar[str] = "model.experts"
    count: int = 0
    chosen: int = 1
    size: WorkedOut = AUTO
    mlp: Literal["swiglu", "geglu", "clamped"] = "swiglu"
    bias: bool = False
    shared_size: int | None = None
    shared_gate: bool = False
    scores: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    normalized: bool = True
    scaling: float = 1.0
    choice_bias: bool = False
    bias_rate: float = 0.001
    expert_groups: int = 1
    chosen_groups: int = 1
    balance: float = 0.001
    balance_form: Literal["model", "layer"] = "model"
    balance_over: Literal["sequence", "batch"] = "sequence"
    z: float = 0.0

    @property
    def is_penalised(self) -> bool:
        """Whether training adds a loss of the router's sums."""
        return self.count > 0 and (self.balance > 0 or self.z > 0)

    @property
    def penalty_over(self) -> str | None:
        """Whose tokens this loss is of, "sequence" or "batch"; None where training adds none."""
        return self.balance_over if self.is_penalised else None

    def _check(self) -> None:
        self._at_least(0, "count", "balance", "z", "bias_rate")
        self._at_least(1, "chosen", "expert_groups", "chosen_groups", "size", "shared_size")
        self._at_most(32767, "count")
        self._at_most(10**7, "size", "shared_size")
        if not self.count:
            return
        if self.scaling <= 0:
            raise ConfigError(f"model.experts.scaling must be above 0, got {self.scaling}; use 1 for no scaling")
        if self.count % self.expert_groups:
            raise ConfigError(
                f"model.experts.expert_groups must divide model.experts.count={self.count}, got {self.expert_groups}; "
                "change one of the two"
            )
        if self.chosen_groups > self.expert_groups:
            raise ConfigError(
                f"model.experts.chosen_groups must be at most model.experts.expert_groups={self.expert_groups}, got "
                f"{self.chosen_groups}; lower it"
            )
        reachable = self.count // self.expert_groups * self.chosen_groups
        if self.chosen > reachable:
            raise ConfigError(
                f"model.experts.chosen must be at most {reachable}, the experts that a token may use, got "
                f"{self.chosen}; lower it, or raise model.experts.count"
            )
        if self.scores == "softmax_of_chosen" and (self.choice_bias or self.expert_groups > 1):
            raise ConfigError(
                "model.experts.scores=softmax_of_chosen chooses by the router's products, got choice_bias or "
                "expert_groups; use scores=softmax or sigmoid"
            )
        if self.shared_gate and self.shared_size is None:
            raise ConfigError(
                "model.experts.shared_gate must have a shared expert, got model.experts.shared_size=null; set the size"
            )
