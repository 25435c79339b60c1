"""Reward models: pairs of answers, and one number for each of them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from finetune.recipe.extensions import Objective, ObjectiveSection, chosen

if TYPE_CHECKING:
    from finetune.run.run_files import Evaluation


class Reward(ObjectiveSection):
    """Pairs of answers, from which a model of rewards is made."""

    formats = ("rated",)
    loss_at = "finetune.objectives.reward.loss:RewardObjective"
    head = "reward"
    card = (
        "A reward model of {base}, trained with Sluice: {trained} with one"
        " output, in peft's format for transformers' sequence classification. The reward of a"
        " conversation is read at the token that ends its last answer."
    )

    method: Literal["reward"] = chosen("reward")
    beta: float = Field(
        default=0.0,
        ge=0,
        description="Weight of (chosen + rejected reward)^2, which keeps rewards around 0.",
    )

    def merged(self, means: dict[str, float], parts: "Sequence[Evaluation]") -> dict[str, float]:
        """Return the means with the least and the largest reward of all."""
        least, most = (f"rewards/{name}" for name in ("min", "max"))
        return means | {
            least: min(part.metrics[least] for part in parts),
            most: max(part.metrics[most] for part in parts),
        }


EXTENSION = Objective(
    settings=Reward,
    summary="makes a model of rewards from pairs of answers",
    words={"center_rewards_coefficient": "beta"},
)
