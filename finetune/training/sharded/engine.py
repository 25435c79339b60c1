"""Steps of a model that is cut among the ranks: micro-batch by micro-batch, with its own forward.

It is the alternative to the engine that streams layers, behind the same loop: it is given the same
micro-batches and seeds, and leaves gradients and losses. The gradients are the sums over all ranks,
each rank has those of its part, and losses are the rank's own share.

All ranks must gather each layer together. A rank that has fewer micro-batches than others passes a
row without labels through the model in their place, which adds nothing to loss or gradients.

Dropout and NEFTune's noise are seeded as in a streamed step: by the step, the layer and the number
of the micro-batch in the whole step. Each layer is checkpointed.

If a rank fails within a pass, others may wait for it in a collective. So it leaves at once, which
closes its connections and ends their waits.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint

from finetune.training.ranks import Ranks
from offload.engine.batch import Batch, LabelledBatch, checked_batch, checked_batches, with_labels
from offload.engine.model.layers import LayeredModel, cross_entropy_sum, vocabulary_of
from offload.engine.model.placement import switch_off_checkpointing
from offload.engine.passes.part import RunStep
from offload.engine.randomness import FRONT_LAYER, VisitRandomness, seed_of
from offload.engine.results import ForwardResult
from offload.plan.schedule.op import Kind
from offload.plan.schedule.timeline import Span, Timeline

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

EMPTY_TOKENS = 8  # of the row that takes the place of a micro-batch


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedResult:
    """What a step found."""

    loss: float  # sum of this rank's losses, divided by the label tokens of all
    num_label_tokens: int  # the number of label tokens
    timeline: Timeline  # visits as measured, and between them the waits for layers
    metrics: Mapping[str, float] = field(default_factory=dict)  # None are known here
    num_loads: int = 0  # layers that were loaded: none


@dataclass(kw_only=True, slots=True)
class _Pass:
    """Where a pass of one micro-batch is."""

    seed: int  # the seed of the step
    number: int  # the number of the micro-batch in the whole step
    clock: "_Clock"  # when each visit began

    def seed_of(self, layer: int) -> int:
        return seed_of(self.seed, layer, self.number)


class ShardedEngine:
    """A model of which each rank has a part."""

    def __init__(
        self,
        model: "PeftModel | PreTrainedModel",
        *,
        device: torch.device,
        ranks: Ranks,
    ) -> None:
        """Cut the model; it has to be on the host, with what trains.

        Args:
            model: The model, the same on all ranks.
            device: The device that this rank computes on.
            ranks: The processes that share it.
        """
        from finetune.training.sharded.shard import shard

        layered = LayeredModel(model)
        switch_off_checkpointing(model)
        self._vocabulary = vocabulary_of(layered.model)
        self._device, self._ranks = device, ranks
        self._randomness = VisitRandomness(device)
        self._pass: _Pass | None = None
        self.num_layers = len(layered.layers)
        self._module: nn.Module = model
        self._model: FSDPModule = shard(model, device=device, world_size=ranks.num)
        for number, layer in enumerate(layered.layers):
            self._wrap(number, layer)

    def forward_backward_runs(self, runs: Sequence[RunStep]) -> list[ShardedResult]:
        """Add the gradients of a step's rows, of all ranks, to those of this rank's part.

        Args:
            runs: One, with a cross-entropy.

        Raises:
            OffloadError: A micro-batch is invalid.
            RankError: Another rank is gone.
        """
        (run,) = runs
        assert run.objective is None, "a rule of recipes"
        assert run.num_label_tokens is not None
        assert run.micro_batch_ids is not None
        assert run.dropout_seed is not None
        batches = checked_batches(run.micro_batches, self._vocabulary)
        num_passes = max(self._ranks.exchange(len(batches), is_step=True))
        batches += [_empty()] * (num_passes - len(batches))
        ids = [*run.micro_batch_ids, *[0] * (num_passes - len(run.micro_batch_ids))]
        clock = _Clock(self._device)
        loss = torch.zeros((), device=self._device)
        with self._ranks.in_collectives(is_step=True):
            for m, (number, batch) in enumerate(zip(ids, batches, strict=True)):
                clock.begin(m)
                self._pass = _Pass(seed=run.dropout_seed, number=number, clock=clock)
                loss += self._train(batch, num_label_tokens=run.num_label_tokens)
                clock.note_skipped(self.num_layers)
            self._pass = None
            clock.end()
            timeline = clock.timeline()
        return [
            ShardedResult(
                loss=float(loss), num_label_tokens=run.num_label_tokens, timeline=timeline
            )
        ]

    def forward(self, batch: Batch | None) -> ForwardResult:
        """Return the loss of a batch, without gradients; all ranks call it together.

        Args:
            batch: With labels; None takes part in the others' pass.
        """
        checked = _empty() if batch is None else checked_batch(batch, self._vocabulary)
        labelled = with_labels(checked, self._device)
        with self._ranks.in_collectives(is_step=False), torch.no_grad():
            loss = self._loss(labelled)
            self._model.reshard()  # what is around the layers stays gathered until a backward
            loss_sum = float(loss)
        return ForwardResult(
            loss_sum=loss_sum,
            num_label_tokens=len(labelled.positions),
            logits=None,
            num_loads=0,
        )

    def frozen_weights(self) -> dict[str, torch.Tensor]:
        """Return what does not train in one piece, on the main rank; all ranks call it."""
        from finetune.training.sharded.update import whole_of

        is_main = self._ranks.is_main
        frozen = {n: p for n, p in self._module.named_parameters() if not p.requires_grad}
        with self._ranks.in_collectives(is_step=False):
            whole = {name: whole_of(p.detach(), is_main=is_main) for name, p in frozen.items()}
        return whole if is_main else {}

    def wait(self) -> None:
        """Wait until the device has finished all issued work."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Do nothing: the parts are the model's, and go with it."""

    def _train(self, batch: Batch, *, num_label_tokens: int) -> torch.Tensor:
        """Run a micro-batch up and down; return its loss."""
        labelled = with_labels(batch, self._device)
        assert self._pass is not None
        self._randomness.seed(self._pass.seed_of(FRONT_LAYER))
        loss = self._loss(labelled) / num_label_tokens
        loss.backward()
        return loss.detach()

    def _loss(self, batch: LabelledBatch) -> torch.Tensor:
        """Return the sum of the losses of a batch's labels."""
        logits_BTV = self._module(**batch.inputs, use_cache=False).logits
        labelled_1NV = logits_BTV.flatten(0, 1)[batch.positions].unsqueeze(0)
        return cross_entropy_sum(labelled_1NV, batch.next_tokens.unsqueeze(0))

    def _wrap(self, number: int, layer: nn.Module) -> None:
        """Checkpoint a layer, seed each of its computations, and note when visits begin.

        The checkpoint is inside of what gathers the layer: a recompute finds it gathered.
        """
        compute: Callable[..., Any] = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            now = self._pass
            if now is None:  # without gradients
                return compute(*args, **kwargs)

            kinds = iter((Kind.FORWARD, Kind.BACKWARD))

            def visited(*args: Any, **kwargs: Any) -> Any:
                now.clock.mark(next(kinds), number)
                found, _ = self._randomness.visit(
                    number, now.seed_of(number), lambda: compute(*args, **kwargs)
                )
                return found

            out = checkpoint(
                visited, *args, use_reentrant=False, preserve_rng_state=False, **kwargs
            )
            hidden = out[0] if isinstance(out, tuple) else out
            if hidden.requires_grad:
                hidden.register_hook(lambda _: now.clock.mark(Kind.GATHER, number))
            if number == self.num_layers - 1:
                now.clock.mark(Kind.TAIL, None)
            return out

        def begun(*_: object) -> None:
            if self._pass is not None:
                self._pass.clock.mark(Kind.GATHER, number)

        layer.forward = forward
        layer.register_forward_pre_hook(begun, prepend=True)


def _empty() -> Batch:
    """Return a row without a label."""
    tokens = torch.zeros(1, EMPTY_TOKENS, dtype=torch.int64)
    return {"input_ids": tokens, "labels": torch.full_like(tokens, -100)}


class _Clock:
    """When visits of a step began, and waits for the layers that they gather, one after another.

    Gradients are added up within a backward visit. On CUDA events are recorded, which wait for
    nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._marks: list[tuple[Kind, int | None, int, Any]] = []
        self._micro_batch = 0

    def begin(self, micro_batch: int) -> None:
        """Note that a micro-batch begins."""
        self._micro_batch = micro_batch
        self.mark(Kind.FRONT, None)

    def mark(self, kind: Kind, layer: int | None) -> None:
        """Note that a visit begins."""
        self._marks.append((kind, layer, self._micro_batch, self._now()))

    def end(self) -> None:
        """Note that the last visit has ended."""
        self._last = self._now()

    def note_skipped(self, num_layers: int) -> None:
        """Note layers that no gradient has come to, as below the first that trains."""
        come = {
            layer
            for kind, layer, m, _ in self._marks
            if kind is Kind.BACKWARD and m == self._micro_batch
        }
        for layer in set(range(num_layers)) - come:
            self.mark(Kind.BACKWARD, layer)

    def timeline(self) -> Timeline:
        """Return the visits; waits for the device."""
        if self._is_cuda:
            self._last.synchronize()
        times = [self._since_first_s(mark[-1]) for mark in self._marks]
        ends = [*times[1:], self._since_first_s(self._last)]
        return Timeline(
            spans=tuple(
                Span(
                    kind=kind,
                    layer=layer,
                    micro_batch=m,
                    num_bytes=0,
                    start_s=start_s,
                    end_s=end_s,
                )
                for (kind, layer, m, _), start_s, end_s in zip(
                    self._marks, times, ends, strict=True
                )
            )
        )

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since_first_s(self, moment: Any) -> float:
        first = self._marks[0][-1]
        if self._is_cuda:
            return float(first.elapsed_time(moment)) / 1e3
        return float(moment - first)
