"""The section `objective` of a recipe: what a run learns from, and by which loss."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from finetune.recipe.section import Section

Method = Literal[
    "sft",
    "dpo",
    "simpo",
    "cpo",
    "orpo",
    "kto",
    "grpo",
    "distill",
    "reward",
    "classify",
    "classify_tokens",
]
Head = Literal["tokens", "reward", "classes", "token_classes"]
LossName = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "sigmoid_norm",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "aot",
    "aot_unpaired",
    "apo_zero",
    "apo_down",
    "discopop",
    "plackett_luce",
    "kto",
    "apo_zero_unpaired",
    "grpo",
    "dapo",
    "dr_grpo",
    "rloo",
    "kl",
    "kl_top",
]
SamplingMode = Literal[
    "none", "ratio", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]

LOSSES: Mapping[str, tuple[LossName, ...]] = {
    "dpo": (
        "sigmoid",
        "hinge",
        "ipo",
        "robust",
        "sigmoid_norm",
        "exo_pair",
        "nca_pair",
        "bco_pair",
        "sppo_hard",
        "aot",
        "aot_unpaired",
        "apo_zero",
        "apo_down",
        "discopop",
        "plackett_luce",
    ),
    "cpo": ("sigmoid", "hinge", "ipo"),
    "kto": ("kto", "apo_zero_unpaired"),
    "grpo": ("dapo", "grpo", "dr_grpo", "rloo"),
    "distill": ("kl", "kl_top"),
}
"""Method -> its losses, the default first; others have one loss only."""

HEADS: Mapping[str, Head] = {
    "reward": "reward",
    "classify": "classes",
    "classify_tokens": "token_classes",
}
"""Method -> its head; others learn by the model's own."""

_OF_METHOD: Mapping[str, Mapping[str, object]] = {
    "sft": {},
    "dpo": {"beta": 0.1, "sft_weight": 0.0, "reference": "base"},
    "simpo": {"beta": 2.0, "gamma": 0.5, "label_smoothing": 0.0, "sft_weight": 0.0},
    "cpo": {"beta": 0.1, "sft_weight": 1.0},
    "orpo": {"beta": 0.1},
    "kto": {
        "beta": 0.1,
        "reference": "base",
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
    },
    "grpo": {"beta": 0.0, "clip_epsilon": 0.2, "importance_sampling_mode": "none"},
    "distill": {"sft_weight": 0.0},
    "reward": {"beta": 0.0},
    "classify": {},
    "classify_tokens": {},
}
_SMOOTHED = {"label_smoothing": 0.0}
_OF_LOSS: Mapping[tuple[str, str], Mapping[str, object]] = {
    ("dpo", "sigmoid"): _SMOOTHED,
    ("dpo", "robust"): _SMOOTHED,
    ("dpo", "exo_pair"): {"label_smoothing": 1e-3},
    ("dpo", "aot"): _SMOOTHED,
    ("dpo", "aot_unpaired"): _SMOOTHED,
    ("cpo", "sigmoid"): _SMOOTHED,
    ("grpo", "rloo"): {"beta": 0.05},
    ("distill", "kl_top"): {"temperature": 1.0},
}

SUPERVISED = ("messages", "alpaca", "sharegpt", "prompt_completion", "text")
COMPARED = (
    "preference",
    "ranking",
    "labelled",
    "sampled",
    "distilled",
    "rated",
    "classified",
    "tagged",
)

_FORMATS = {
    "sft": SUPERVISED,
    "kto": ("labelled",),
    "grpo": ("sampled",),
    "distill": ("distilled",),
    "reward": ("rated",),
    "classify": ("classified",),
    "classify_tokens": ("tagged",),
}


class ObjectiveSection(Section):
    """What is learned from the rows: to repeat them, to prefer some of them, or their rewards."""

    method: Method = Field(
        default="sft",
        description="`sft` repeats the rows (cross-entropy). Pairs of answers: `dpo`, `simpo`,"
        " `cpo`, `orpo`. Answers that are desired or not: `kto`. Sampled answers with rewards:"
        " `grpo`. Answers with a teacher's distribution at each token: `distill`. Pairs, from which"
        " a model of rewards is made: `reward`. Texts with a class: `classify`. Words with one"
        " each: `classify_tokens`.",
    )
    loss: LossName | None = Field(
        default=None,
        description="Loss of `dpo`, `cpo`, `kto`, `grpo` or `distill`; null takes sigmoid, sigmoid,"
        " kto, dapo, kl.",
        examples=["sigmoid"],
    )
    beta: float | None = Field(
        default=None,
        ge=0,
        description="Scale of the rewards; of `orpo` the weight of the odds ratio, of `grpo` that"
        " of the KL divergence to the reference, of `reward` that of (chosen + rejected reward)^2,"
        " which keeps rewards around 0. Null takes 0.1; simpo 2.0, grpo and reward 0.0, rloo 0.05.",
        examples=[0.1],
    )
    reference: Literal["base", "precomputed"] | None = Field(
        default=None,
        description="What `dpo`, `kto` and `grpo` compare with: `base`, the model without its"
        " adapter, in the same visits; `precomputed`, log-probabilities known before step 1.",
        examples=["base"],
    )
    label_smoothing: float | None = Field(
        default=None,
        ge=0,
        lt=0.5,
        description="Part of the pairs that may be labelled the wrong way round. Null takes 0.0;"
        " exo_pair 0.001.",
        examples=[0.1],
    )
    sft_weight: float | None = Field(
        default=None,
        ge=0,
        description="Weight of the mean cross-entropy of the chosen answers, added to the loss of"
        " `dpo`, `simpo` or `cpo`, or of all answers in `distill`. Null takes 0.0; cpo 1.0.",
        examples=[1.0],
    )
    gamma: float | None = Field(
        default=None,
        ge=0,
        description="Margin that `simpo` asks for between the rewards. Null takes 0.5.",
        examples=[0.5],
    )
    desirable_weight: float | None = Field(
        default=None,
        ge=0,
        description="Weight of desired answers in `kto`. Null takes 1.0.",
        examples=[1.0],
    )
    undesirable_weight: float | None = Field(
        default=None,
        ge=0,
        description="Weight of undesired answers in `kto`. Null takes 1.0.",
        examples=[1.33],
    )
    clip_epsilon: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="How far the ratio of probabilities may fall or rise before `grpo` clips it."
        " Null takes 0.2.",
        examples=[0.2],
    )
    clip_epsilon_high: float | None = Field(
        default=None,
        gt=0,
        description="How far it may rise, where that differs from `objective.clip_epsilon`.",
        examples=[0.28],
    )
    importance_sampling_mode: SamplingMode | None = Field(
        default=None,
        description="What the sampler's log-probabilities in the rows are for: `none`; `ratio`,"
        " they are those of the old policy; or weights of each token or sequence that"
        " correct for the sampler, truncated at `objective.importance_sampling_cap` or left out"
        " above it. Null takes none.",
        examples=["sequence_mask"],
    )
    importance_sampling_cap: float | None = Field(
        default=None,
        gt=0,
        description="Largest weight that corrects for the sampler, of a token or a sequence. Null"
        " takes 3.0, as TRL's `vllm_importance_sampling_cap` does.",
        examples=[3.0],
    )
    temperature: float | None = Field(
        default=None,
        gt=0,
        description="What `distill` with the loss `kl_top` divides log-probabilities of teacher and"
        " model by before it compares them. Null takes 1.0.",
        examples=[2.0],
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Any) -> Any:
        """Give the settings that the method reads their defaults, so that a run keeps them."""
        if not isinstance(values, dict):
            return values
        method = values.get("method", "sft")
        losses = LOSSES.get(method) if isinstance(method, str) else None
        filled = dict(values)
        if losses and filled.get("loss") is None:
            filled["loss"] = losses[0]
        for name, value in defaults_of(method, filled.get("loss")).items():
            if filled.get(name) is None:
                filled[name] = value
        if method == "grpo" and filled.get("reference") is None and filled.get("beta") != 0:
            filled["reference"] = "base"
        is_capped = _is_capped(filled.get("importance_sampling_mode"))
        if method == "grpo" and is_capped and filled.get("importance_sampling_cap") is None:
            filled["importance_sampling_cap"] = 3.0
        return filled

    @property
    def is_sft(self) -> bool:
        """Whether rows are repeated, by the cross-entropy of their tokens."""
        return self.method == "sft"

    @property
    def nll_weight(self) -> float:
        """Weight of the cross-entropy of the chosen answers' tokens in the loss of pairs."""
        return 1.0 if self.method == "orpo" else self.sft_weight or 0.0

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with another model."""
        return self.reference is not None

    @property
    def computes_reference(self) -> bool:
        """Whether a step computes what it compares with."""
        return self.reference == "base"

    @property
    def scores_mismatched(self) -> bool:
        """Whether rows are also scored with another row's answer, for the KL divergence of KTO."""
        return self.loss == "kto"

    @property
    def is_ranking(self) -> bool:
        """Whether a prompt may have more than two answers, in an order."""
        return self.loss == "plackett_luce"

    @property
    def has_teacher(self) -> bool:
        """Whether rows have a teacher's distribution at each token."""
        return self.method == "distill"

    @property
    def is_reward(self) -> bool:
        """Whether one number is learned for each row, by a head of its own."""
        return self.method == "reward"

    @property
    def is_classification(self) -> bool:
        """Whether classes are learned, of rows or of words, by a head of its own."""
        return self.method in ("classify", "classify_tokens")

    @property
    def classifies_tokens(self) -> bool:
        """Whether the class of each word is learned."""
        return self.method == "classify_tokens"

    @property
    def head(self) -> Head:
        """What it learns by; see `model.head`."""
        return HEADS.get(self.method, "tokens")

    @property
    def takes_sampler(self) -> bool:
        """Whether rows need the log-probabilities that the sampler drew their tokens with."""
        return self.importance_sampling_mode not in (None, "none")


def defaults_of(method: object, loss: object) -> Mapping[str, object]:
    """Return the settings that a method reads with this loss, and their defaults."""
    if not isinstance(method, str):
        return {}
    of_loss = _OF_LOSS.get((method, loss), {}) if isinstance(loss, str) else {}
    return {**_OF_METHOD.get(method, {}), **of_loss}


def read_settings(section: ObjectiveSection) -> frozenset[str]:
    """Return the names of the settings that have an effect."""
    names = {"method", *defaults_of(section.method, section.loss)}
    if section.method in LOSSES:
        names.add("loss")
    if section.method == "grpo":
        names.add("clip_epsilon_high")
        if section.beta:
            names.add("reference")
        if _is_capped(section.importance_sampling_mode):
            names.add("importance_sampling_cap")
    return frozenset(names)


def _is_capped(mode: object) -> bool:
    """Return whether the sampler's log-probabilities make weights that have a largest value."""
    return isinstance(mode, str) and mode.endswith(("_truncate", "_mask"))


def formats_of(objective: ObjectiveSection) -> tuple[str, ...]:
    """Return the values of `data.format` that an objective reads; of `auto`, one of these."""
    if objective.is_ranking:
        return ("preference", "ranking")
    return _FORMATS.get(objective.method, ("preference",))
