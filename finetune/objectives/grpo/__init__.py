"""Group-relative policy optimisation: sampled answers with rewards."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from finetune.errors import DataError
from finetune.recipe.extensions import Contradiction, Objective, ObjectiveSection, StepData, chosen

if TYPE_CHECKING:
    from finetune.data.step_rows import StepRows
    from finetune.run.run_files import Evaluation
    from offload.engine.objective import Objective as StepObjective

_OF_ANSWERS = ("reward", "reward_std", "frac_reward_zero_std")
_OF_TOKENS = ("clip_ratio/", "kl", "sampling/")
"""Metrics of sampled answers: over these, and how the names of those over their tokens begin."""
SamplingMode = Literal[
    "none", "ratio", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


class Grpo(ObjectiveSection):
    """Sampled answers with rewards, each against the others to its prompt."""

    formats = ("sampled",)
    loss_at = "finetune.objectives.grpo.loss:GrpoObjective"

    method: Literal["grpo"] = chosen("grpo")
    loss: Literal["dapo", "grpo", "dr_grpo", "rloo"] = Field(
        default="dapo", description="What the loss is a mean over, and what a ratio is of."
    )
    beta: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the KL divergence to the reference; left out, rloo takes 0.05.",
    )
    reference: Literal["base", "precomputed"] | None = Field(
        default=None,
        description="What the KL divergence is to: `base`, the model without its adapter, in the"
        " same visits; `precomputed`, log-probabilities known before step 1. Null takes base where"
        " `objective.beta` is above 0.",
        examples=["base"],
    )
    clip_epsilon: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="How far the ratio of probabilities may fall or rise before it is clipped.",
    )
    clip_epsilon_high: float | None = Field(
        default=None,
        gt=0,
        description="How far it may rise, where that differs from `objective.clip_epsilon`.",
        examples=[0.28],
    )
    importance_sampling_mode: SamplingMode = Field(
        default="none",
        description="What the sampler's log-probabilities in the rows are for: `none`; `ratio`,"
        " they are those of the old policy; or weights of each token or sequence that"
        " correct for the sampler, truncated at `objective.importance_sampling_cap` or left out"
        " above it.",
    )
    importance_sampling_cap: float | None = Field(
        default=None,
        gt=0,
        description="Largest weight that corrects for the sampler, of a token or a sequence. Null"
        " takes 3.0, as TRL's `vllm_importance_sampling_cap` does.",
        examples=[3.0],
    )

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, values: Any) -> Any:
        """Give the reference and the cap their defaults where they are read."""
        if not isinstance(values, dict):
            return values
        loss, mode = values.get("loss"), values.get("importance_sampling_mode")
        beta = values.get("beta", 0.05 if loss == "rloo" else 0.0)
        defaults = {
            "beta": beta,
            "reference": "base" if beta != 0 else None,
            "importance_sampling_cap": 3.0 if _is_capped(mode) else None,
        }
        return values | {name: v for name, v in defaults.items() if values.get(name) is None}

    def contradictions(self) -> Iterable[Contradiction]:
        """Yield what the loss or the mode of sampling does not read."""
        mode, is_per_token = self.importance_sampling_mode, self.loss != "rloo"
        yield (
            self.reference is not None and not self.beta,
            "reference",
            "beta",
            "it is read by the KL divergence, whose weight that is",
            "leave out `objective.reference`, or `objective.beta: 0.05`",
        )
        yield (
            is_per_token and self.precomputes_reference,
            "reference",
            "loss",
            "the KL divergence is of each token, and sums of whole answers are kept",
            "`objective.reference: base`, or `objective.loss: rloo`",
        )
        yield (
            not is_per_token and mode.startswith("token"),
            "importance_sampling_mode",
            "loss",
            "its ratio is of whole answers",
            f"`objective.importance_sampling_mode: {mode.replace('token', 'sequence')}`",
        )
        yield (
            self.importance_sampling_cap is not None and not _is_capped(mode),
            "importance_sampling_cap",
            "importance_sampling_mode",
            "it is the largest of the weights that correct for the sampler",
            "leave out `objective.importance_sampling_cap`, or"
            " `objective.importance_sampling_mode: sequence_truncate`",
        )

    @property
    def without_reference(self) -> str:
        """The setting with which no reference is computed, for hints."""
        return super().without_reference if self.loss == "rloo" else "`objective.beta: 0`"

    def weight(self, *, num_groups: int, num_rows: int, num_label_tokens: int) -> int:
        """Return what held-out rows count for: that which the loss is a mean over."""
        return num_label_tokens if self.loss == "dapo" else num_rows

    def counts(
        self, rows: "StepRows", label_lens: Sequence[int], metrics: Mapping[str, float]
    ) -> dict[str, int]:
        """Return the answers that metrics are means over, and the tokens."""
        counts = dict.fromkeys(_OF_ANSWERS, rows.num_trained)
        if self.loss != "rloo":  # whose means are over answers too
            num_tokens = sum(label_lens)
            counts |= {name: num_tokens for name in metrics if name.startswith(_OF_TOKENS)}
        return counts

    def merged(self, means: dict[str, float], parts: "Sequence[Evaluation]") -> dict[str, float]:
        """Return the means with the standard deviation of all rewards, from those of parts."""
        nums, mean = [part.counts["reward"] for part in parts], means["reward"]
        squares = sum(
            (num - 1) * part.metrics["reward_std"] ** 2 + num * (part.metrics["reward"] - mean) ** 2
            for num, part in zip(nums, parts, strict=True)
        )
        return means | {"reward_std": math.sqrt(squares / (sum(nums) - 1))}

    @property
    def clip_range(self) -> tuple[float, float]:
        """What ratios are clipped to."""
        above = self.clip_epsilon_high or self.clip_epsilon
        return 1 - self.clip_epsilon, 1 + above

    @property
    def max_weight(self) -> float:
        """What weights that correct for the sampler are truncated or left out above."""
        return self.importance_sampling_cap or math.inf  # null where no weight is taken

    def objective(self, step: StepData) -> "StepObjective":
        """Return the loss of a step's answers.

        Raises:
            DataError: Rows lack the sampler's log-probabilities.
        """
        if self.importance_sampling_mode != "none" and step.rows.sampler_N is None:
            raise DataError(
                "the rows have no log-probabilities of the sampler and"
                f" objective.importance_sampling_mode is {self.importance_sampling_mode}",
                limit="it needs one for each token of an answer",
                hint="`objective.importance_sampling_mode: none`, or rows with `logprobs`",
            )
        return super().objective(step)


def _is_capped(mode: object) -> bool:
    """Return whether the sampler's log-probabilities make weights that have a largest value."""
    return isinstance(mode, str) and mode.endswith(("_truncate", "_mask"))


EXTENSION = Objective(
    settings=Grpo,
    summary="learns from sampled answers with rewards",
    words={
        "kl_coef": "beta",
        "clip_ratio_low": "clip_epsilon",
        "clip_ratio_high": "clip_epsilon_high",
        "epsilon_high": "clip_epsilon_high",
        "vllm_importance_sampling_mode": "importance_sampling_mode",
        "vllm_importance_sampling_cap": "importance_sampling_cap",
        "vllm_importance_sampling_clip_max": "importance_sampling_cap",
    },
)
