"""TRL's SFTTrainer with a model whose layers are streamed; needs the extra `trl`.

    from finetune.integrations.sft import SluiceSFTTrainer, Streaming

    trainer = SluiceSFTTrainer(model, SFTConfig(..., bf16=False), streaming=Streaming(num_slots=4),
                               train_dataset=rows, processing_class=tokenizer)

Rows are prepared, packed and collated by TRL. Of its own metrics, those that need all logits of
what is trained on are not logged: `entropy`, and `mean_token_accuracy` of steps.
"""

from typing import Any

try:
    from trl import SFTTrainer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{error.name} is not installed: `pip install 'sluice-finetune[trl]'`", name=error.name
    ) from error

import torch
from torch import nn

from finetune.integrations.trainer import BatchLoss, SluiceTrainer, Streaming

__all__ = ["SluiceSFTTrainer", "Streaming"]


class SluiceSFTTrainer(SluiceTrainer, SFTTrainer):
    """An SFTTrainer whose steps and evaluations run on an engine; see `SluiceTrainer`."""

    loss_without_labels = 0.0

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Train as `SluiceTrainer` does, and count tokens as TRL does.

        Args:
            model: The attached model.
            inputs: The micro-batch.
            num_items_in_batch: Label tokens of the step.
        """
        loss = super().training_step(model, inputs, num_items_in_batch)
        mask = inputs.get("attention_mask")
        self._total_train_tokens += inputs["input_ids"].size(1) if mask is None else int(mask.sum())
        self._metrics["train"]["num_tokens"] = [self._total_train_tokens]
        return loss

    def _note_evaluated(self, one: BatchLoss) -> None:
        self._metrics["eval"]["mean_token_accuracy"].append(one.accuracy)
        self._metrics["eval"]["num_tokens"] = [self._total_train_tokens]
