"""transformers' Trainer with a model whose layers are streamed.

    from finetune.integrations.trainer import SluiceTrainer, Streaming

    trainer = SluiceTrainer(model, TrainingArguments(...), streaming=Streaming(num_slots=4),
                            train_dataset=rows, data_collator=collator)
    trainer.train()

`gradient_accumulation_steps` micro-batches pass a layer before the next is loaded, so a step loads
each layer twice at most, however many micro-batches it has. Data, optimizer, schedule, clipping,
logs, callbacks and checkpoints are the Trainer's own; losses and the trained adapter are those of
the plain Trainer within rounding.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import EvalLoopOutput, has_length

from finetune.adapter.linear_lora import compute_by_peft
from finetune.errors import DataError
from finetune.integrations.refusals import (
    refuse_packed_logits,
    require_arguments,
    require_own_methods,
    require_trainer,
)
from finetune.integrations.stream import (
    BatchLoss,
    StepBatches,
    Streaming,
    computing_adapters,
    evaluated,
    micro_batch,
)

__all__ = ["SluiceTrainer", "Streaming"]


class SluiceTrainer(Trainer):
    """A Trainer whose steps and evaluations run on an engine.

    Attributes:
        engine: Holds the model, from the Trainer's first moment until `detach`.
        num_loads: Layers copied to the device so far, by steps and by evaluations of losses.
    """

    loss_without_labels = float("nan")
    """What a batch without labels adds to the mean of an evaluation, as in the plain Trainer."""

    def __init__(self, model: Any, args: Any, *, streaming: Streaming, **options: Any) -> None:
        """Make the Trainer, and attach its model.

        Args:
            model: With an adapter of peft's, on the host.
            args: TrainingArguments. They are copied; gradient checkpointing is switched off in the
                copy, since the engine computes layers again by itself.
            streaming: How the model is attached.
            options: As for transformers' Trainer.

        Raises:
            ConfigError: A setting asks for what an engine does not do; its name and a fix are said.
            OffloadError: The model cannot be attached; see `offload.attach`.
        """
        require_own_methods(type(self))
        require_arguments(model, args, options)
        args = copy.copy(args)
        args.activation_checkpointing = args.gradient_checkpointing = False
        args.activation_checkpointing_kwargs = args.gradient_checkpointing_kwargs = None
        super().__init__(model, args, **options)
        require_trainer(self)
        self._step = StepBatches(fetched=())
        self.num_loads = 0
        self.engine = streaming.attach(self.model, device=self.args.device)

    def detach(self) -> None:
        """Give the model back as a plain one, with its trained adapter; the Trainer is done."""
        model: Any = self.model
        self.engine.detach()
        compute_by_peft(model)

    # ------------------------------------------------------------------------------------ placement

    def _prepare_for_training(self, *args: Any, **options: Any) -> Any:
        with self._in_place():
            made: Any = super()
            return made._prepare_for_training(*args, **options)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Let accelerate leave the model where it is; data loaders are made outside, as always."""
        before = self.accelerator.device_placement
        self.accelerator.device_placement = False
        try:
            yield
        finally:
            self.accelerator.device_placement = before

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is: the engine moves what computes."""

    # ------------------------------------------------------------------------------------- training

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Fetch the micro-batches of a step, and hold them."""
        fetched, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._step = StepBatches(fetched=fetched)
        return fetched, num_items

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Train on all micro-batches of a step when its first is asked for.

        Args:
            model: The attached model.
            inputs: The micro-batch.
            num_items_in_batch: Label tokens of the step.

        Returns:
            The loss of the step for its first micro-batch, and 0 for the others: the Trainer adds
            them up.

        Raises:
            DataError: No token of the step has a label, or a batch has what an engine does not
                compute with.
        """
        if not self._step.take(inputs):
            return torch.zeros((), device=self.args.device)
        self._set_mode("train")
        batches = [micro_batch(one) for one in self._step.fetched]
        if not num_items_in_batch:
            raise DataError(
                f"no token in the {len(batches)} micro-batches of step"
                f" {self.state.global_step + 1} has a label",
                limit="the loss is a mean over label tokens",
                hint="leave out rows that are all prompt, or cut them less: `max_length`",
            )
        result = self.engine.forward_backward(
            batches,
            num_label_tokens=int(num_items_in_batch),
            dropout_seed=(self.args.seed * 1_000_003 + self.state.global_step) % 2**31,
        )
        self.num_loads += result.num_loads
        return torch.tensor(result.loss, device=self.args.device)

    # ----------------------------------------------------------------------------------- evaluation

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate; for losses alone, as many batches as a step has pass the layers together.

        The model computes with the adapter that is switched on, or without any, as in
        `with model.disable_adapter():`. Several at once are evaluated a batch at a time.

        Args:
            dataloader: Of the batches.
            description: As for the plain Trainer, as are all others.
            prediction_loss_only: Whether logits are left out. With logits, each batch is a pass.
            ignore_keys: Outputs of the model that are left out.
            metric_key_prefix: Of the names of the metrics.
        """
        if prediction_loss_only is None:
            prediction_loss_only = self.args.prediction_loss_only
        model: Any = self.model
        adapters = computing_adapters(model)
        if not prediction_loss_only or adapters is None or len(adapters) > 1:
            with self._in_place():
                return super().evaluation_loop(
                    dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
                )
        self._set_mode("eval")
        adapter = adapters[0] if adapters else None
        self.callback_handler.eval_dataloader = dataloader
        found, counts, num_observed = list[float](), list[int](), 0
        fetched = self._fetched(dataloader)
        while group := list(islice(fetched, self.args.gradient_accumulation_steps)):
            batches = [micro_batch(inputs) for inputs, _ in group]
            result = evaluated(self.engine, batches, adapter=adapter)
            self.num_loads += result.num_loads
            for one in result.batches:
                self._note_evaluated(one)
                found.append(one.loss if one.num_label_tokens else self.loss_without_labels)
                self.control = self.callback_handler.on_prediction_step(
                    self.args, self.state, self.control
                )
            counts += [count for _, count in group]
            num_observed += sum(len(inputs["input_ids"]) for inputs, _ in group)
        metrics = {}
        if found:
            losses_R = np.repeat(np.array(found, dtype=np.float32), counts)
            finite = np.isfinite(losses_R)
            if self.args.logging_nan_inf_filter and finite.any():
                losses_R = losses_R[finite]
            metrics[f"{metric_key_prefix}_loss"] = losses_R.mean().item()
        rows = getattr(dataloader, "dataset", None)
        return EvalLoopOutput(
            predictions=None,  # type: ignore[arg-type] # as the plain Trainer's, for losses alone
            label_ids=None,
            metrics=metrics,
            num_samples=(len(rows) if has_length(rows) else 0) or num_observed,
        )

    def _set_mode(self, mode: Literal["train", "eval"]) -> None:
        """Set the mode of the model, and of an optimizer that has one."""
        for one in (self.model, self.optimizer):
            switch = getattr(one, mode, None)
            if callable(switch):
                switch()

    def _fetched(self, dataloader: DataLoader[Any]) -> Iterator[tuple[Mapping[str, Any], int]]:
        """Yield each batch, and how many times the plain Trainer counts its loss.

        accelerate knows of the newest batch alone whether it is the last, and how many rows that
        has, so it is asked before the next is fetched.
        """
        for inputs in dataloader:
            yield inputs, len(self.gather_function(torch.zeros(self.args.eval_batch_size)))

    def _note_evaluated(self, one: BatchLoss) -> None:
        """Note the loss of a batch; for trainers that log more of it."""

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[torch.Tensor | None, Any, Any]:
        """Return loss, logits and labels of a batch, in a pass of its own."""
        return Trainer.prediction_step(self, model, inputs, prediction_loss_only, ignore_keys)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return the loss of a batch that is evaluated with its logits; steps do not come here.

        Args:
            model: The attached model, in evaluation mode.
            inputs: The batch, with labels.
            return_outputs: Whether the model's outputs are wanted too.
            num_items_in_batch: Its label tokens, whose mean the model takes by itself.

        Raises:
            ConfigError: Its rows share a sequence.
        """
        if "cu_seq_lens_q" in inputs:
            refuse_packed_logits()
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss
