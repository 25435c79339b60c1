"""Group-relative policy optimisation: answers with rewards, sampled before or in training."""

import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from finetune.errors import DataError
from finetune.recipe.extensions import (
    Contradiction,
    Objective,
    ObjectiveSection,
    Section,
    StepData,
    chosen,
    formats_like,
)
from offload.plan.machine.machine import GIB

if TYPE_CHECKING:
    from finetune.data.dataset import Rows
    from finetune.data.step_rows import StepRows
    from finetune.recipe.sections import TrainSection
    from finetune.report.rows import Row
    from finetune.run.run_files import Evaluation
    from offload.engine.objective import Objective as StepObjective
    from offload.plan.plan import Plan

_OF_ANSWERS = ("reward", "reward_std", "frac_reward_zero_std")
_OF_TOKENS = ("clip_ratio/", "kl", "sampling/")
"""Metrics of sampled answers: over these, and how the names of those over their tokens begin."""
SamplingMode = Literal[
    "none", "ratio", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


class Reward(Section):
    """A function that gives an answer a reward."""

    function: str = Field(
        min_length=1,
        description="A file with a function `reward`, `rewards.py`; another function of it,"
        " `rewards.py:length`; or `exact_match`, `format`, `unit_tests`.",
        examples=["rewards.py"],
    )
    weight: float = Field(default=1.0, description="What its value counts for in the sum.")
    timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds that it may take for an answer."
    )
    memory_gib: float = Field(
        default=2.0, gt=0, description="Memory that its process may use, in GiB."
    )
    options: dict[str, Any] = Field(
        default={},
        description="Further arguments of the function, by name.",
        examples=[{"pattern": "<think>.*</think>.+"}],
    )

    @property
    def memory_bytes(self) -> int:
        """The same in bytes."""
        return int(self.memory_gib * GIB)

    def __str__(self) -> str:
        return self.function

    @property
    def label(self) -> str:
        """What metrics call it: the function's name, of `reward` the file's."""
        _, colon, name = self.function.rpartition(".py:")
        return name if colon else PurePath(self.function).name.removesuffix(".py")


def _listed(value: object) -> object:
    """Return rewards as a list of sections: one, or several, each perhaps by its name alone."""
    if value is None:
        return None
    listed = value if isinstance(value, (list, tuple)) else [value]
    return tuple({"function": one} if isinstance(one, str) else one for one in listed)


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
    rewards: Annotated[tuple[Reward, ...] | None, BeforeValidator(_listed)] = Field(
        default=None,
        description="Functions that give an answer its reward, the sum of their weighted values."
        " With them rows are prompts, and the model samples answers as it learns.",
        examples=["rewards.py", [{"function": "rewards.py:length", "weight": 0.5}, "exact_match"]],
    )
    num_answers: int | None = Field(
        default=None,
        ge=2,
        description="Answers that are sampled for a prompt; left out, 8. A step has those of"
        " `train.micro_batch_size` x `train.grad_accum_steps` / this many prompts.",
        examples=[8],
    )
    max_new_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Tokens after which an answer is cut off; left out, 256.",
        examples=[256],
    )
    temperature: float | None = Field(
        default=None,
        gt=0,
        description="Divisor of the logits, where answers are sampled and where they are learned;"
        " left out, 1.",
        examples=[1.0],
    )
    sampling: Literal["exact", "fast"] | None = Field(
        default=None,
        description="Whether the answers to each prompt are computed by themselves, `exact`, or"
        " with those to all prompts, shorter ones padded, `fast`: then rounding depends on which"
        " prompts share a round. Left out, exact.",
        examples=["fast"],
    )
    sampler: str | None = Field(
        default=None,
        pattern=r"^http://[^/\s]+/?$",
        description="Address of a vLLM server that samples the answers instead, with the adapter"
        " as it is before each round. Then `objective.importance_sampling_mode`, left out, is"
        " token_truncate, of rloo sequence_truncate; and a round that is sampled again after a"
        " resume is not the same to the bit.",
        examples=["http://127.0.0.1:8000"],
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
        """Give settings their defaults that depend on other settings."""
        if not isinstance(values, dict):
            return values
        loss, mode = values.get("loss"), values.get("importance_sampling_mode")
        beta = values.get("beta", 0.05 if loss == "rloo" else 0.0)
        by_server = bool(values.get("sampler"))
        if by_server and mode is None:
            mode = "sequence_truncate" if loss == "rloo" else "token_truncate"
        defaults = {
            "beta": beta,
            "reference": "base" if beta != 0 else None,
            "importance_sampling_mode": mode or "none",
            "importance_sampling_cap": 3.0 if _is_capped(mode) else None,
            **(_OF_SAMPLING if values.get("rewards") else {}),
            **({"sampling": None} if by_server else {}),
        }
        return values | {name: v for name, v in defaults.items() if values.get(name) is None}

    def contradictions(self) -> Iterable[Contradiction]:
        """Yield what the loss or the mode of sampling does not read."""
        mode, is_per_token = self.importance_sampling_mode, self.loss != "rloo"
        for name in (*_OF_SAMPLING, "sampler"):
            yield (
                not self.rewards and dict(self)[name] is not None,
                name,
                "rewards",
                "it says how answers are sampled, and the rows bring theirs",
                f"leave out `objective.{name}`, or `objective.rewards: rewards.py`",
            )
        yield (
            self.sampler is not None and self.sampling is not None,
            "sampling",
            "sampler",
            "the server decides which answers it computes together",
            "leave out `objective.sampling`, or `objective.sampler`",
        )
        yield (
            bool(self.rewards) and self.precomputes_reference,
            "reference",
            "rewards",
            "answers that are sampled in training are not known before step 1",
            "`objective.reference: base`",
        )
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
    def read_formats(self) -> tuple[str, ...]:
        """Prompts where answers are sampled in training, otherwise sampled answers."""
        return formats_like(("prompt",) if self.rewards else self.formats)

    @property
    def samples_answers(self) -> bool:
        """Whether there are functions to give them rewards."""
        return bool(self.rewards)

    @property
    def labels(self) -> tuple[str, ...]:
        """What metrics call the rewards; those of one name are numbered."""
        names = [reward.label for reward in self.rewards or ()]
        return tuple(
            name if names.count(name) == 1 else f"{name}_{number}"
            for number, name in enumerate(names, 1)
        )

    def require_ready(self) -> None:
        """Check that the functions are there, in a process of their own, and the server."""
        if self.rewards:
            import_module("finetune.online.rewards").require_functions(self.rewards)
        if self.sampler is not None:
            import_module("finetune.online.outside").require_server(self)

    def planned(self, rows: "Rows", *, seq_len: int) -> "Rows":
        """Return each prompt as often as it is answered, with the longest answers."""
        if not self.rewards:
            return rows
        from finetune.objectives.grpo.prompts import with_longest_answers

        return with_longest_answers(rows, self, seq_len=seq_len)

    def more_rows(
        self, plan: "Plan", train: "TrainSection", *, num_steps: int | None
    ) -> "list[Row]":
        """Return what a plan says of sampling.

        Raises:
            DoesNotFitError: The caches of the answers to one prompt do not fit.
        """
        if not self.rewards:
            return []
        from finetune.objectives.grpo.prompts import rows_of_sampling

        return rows_of_sampling(self, plan, train, num_steps=num_steps)

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


_OF_SAMPLING: Mapping[str, Any] = {
    "num_answers": 8,
    "max_new_tokens": 256,
    "temperature": 1.0,
    "sampling": "exact",
}
"""How answers are sampled in training, by default."""


def _is_capped(mode: object) -> bool:
    """Return whether the sampler's log-probabilities make weights that have a largest value."""
    return isinstance(mode, str) and mode.endswith(("_truncate", "_mask"))


EXTENSION = Objective(
    settings=Grpo,
    summary="learns from sampled answers with rewards",
    words={
        "num_generations": "num_answers",
        "max_completion_length": "max_new_tokens",
        "reward_funcs": "rewards",
        "kl_coef": "beta",
        "clip_ratio_low": "clip_epsilon",
        "clip_ratio_high": "clip_epsilon_high",
        "epsilon_high": "clip_epsilon_high",
        "vllm_server_base_url": "sampler",
        "vllm_importance_sampling_mode": "importance_sampling_mode",
        "vllm_importance_sampling_cap": "importance_sampling_cap",
        "vllm_importance_sampling_clip_max": "importance_sampling_cap",
    },
)
