"""A model on an engine within a Trainer: how it is attached, and what is computed of its batches.

A Trainer hands out a step's micro-batches one by one. Here they are held as a step: the first that
is asked for has the loss of all of them computed, layer by layer, and the others have nothing left
to add.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from peft import PeftModel

from finetune.adapter.linear_lora import compute_by_peft, compute_in_base_dtype
from finetune.errors import ConfigError, DataError
from offload import attach
from offload.engine.batch import IGNORED, ROW_LENS, Batch
from offload.engine.bound import EngineOptions
from offload.engine.engine import Engine
from offload.engine.passes.scores import TokenScores
from offload.plan.facts.codec import CodecName
from offload.plan.facts.workload import WeightPlace
from offload.plan.plan import Plan
from offload.plan.request import HEAD_CHUNK_TOKENS

TAKEN = ("input_ids", "labels", "attention_mask", "position_ids")
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""How collators tell kernels where the rows of a flattened sequence begin: `row_lens` says it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Streaming:
    """How a Trainer's model is attached; each is as for `offload.attach`.

    Attributes:
        num_slots: Layers on the device at a time.
        codec: How the layers' matrices are stored off the device.
        stash: Where layer inputs wait for the backward.
        head_chunk_tokens: Tokens whose logits exist at a time.
        kept_graphs: Last layers whose activations stay on the device for the backward.
        kept_outputs: Layers before these whose attention's output stays there.
        sent_outputs: Layers before these whose attention's output goes to host memory.
        sent_graphs: Layers before those with kept graphs whose activations go to host memory.
        mlp_chunk_tokens: Tokens that an MLP computes at a time; None for all of a batch.
        layer_kernels: What computes norms, rotary embedding and gated activations.
        embeddings: Where the input embedding's weight is.
        head: Where the output head's weight is.
        compute_dtype: What the adapters of linear layers are computed in until the Trainer is
            detached: `float32` by peft, as the plain Trainer does it, or `auto`, at the precision
            of the weights, which is faster and holds less; see `adapter.compute_dtype`.
    """

    num_slots: int
    codec: CodecName = "native"
    stash: Literal["device", "host"] = "device"
    head_chunk_tokens: int = HEAD_CHUNK_TOKENS
    kept_graphs: int = 0
    kept_outputs: int = 0
    sent_outputs: int = 0
    sent_graphs: int = 0
    mlp_chunk_tokens: int | None = None
    layer_kernels: Literal["plain", "fused"] = "plain"
    embeddings: WeightPlace = "device"
    head: WeightPlace = "device"
    compute_dtype: Literal["float32", "auto"] = "float32"

    @classmethod
    def of(cls, plan: Plan) -> "Streaming":
        """Return what a plan chose; see `finetune.integrations.planned.plan_steps`."""
        options = EngineOptions.planned(plan)
        return cls(
            num_slots=options.num_slots,
            codec=options.codec,
            stash=options.stash,
            head_chunk_tokens=options.head_chunk_tokens,
            kept_graphs=options.num_kept_graphs,
            kept_outputs=options.num_kept_outputs,
            sent_outputs=options.num_sent_outputs,
            sent_graphs=options.num_sent_graphs,
            mlp_chunk_tokens=options.mlp_chunk_tokens,
            layer_kernels=options.layer_kernels,
            embeddings=options.embeddings,
            head=options.head,
            compute_dtype="auto" if plan.request.typical.adapter.is_in_base_dtype else "float32",
        )

    def attach(self, model: object, *, device: torch.device) -> Engine:
        """Take over a model with an adapter.

        Args:
            model: On the host.
            device: Where to compute.

        Raises:
            ConfigError: It has no adapter.
            OffloadError: It cannot be attached; see `offload.attach`.
        """
        if not isinstance(model, PeftModel):
            raise ConfigError(
                f"the model is a {type(model).__name__}",
                limit="a Trainer that streams trains an adapter of peft's: the layers are frozen",
                hint="`peft.get_peft_model(model, LoraConfig(...))`; `sluice finetune` with"
                " `train.what: all` trains all weights",
            )
        settings = asdict(self)
        compute_by_peft(model)  # an engine that was detached by itself has left it as it was
        if settings.pop("compute_dtype") == "auto":
            compute_in_base_dtype(model)
        try:
            return attach(model, device=str(device), **settings)
        except BaseException:
            compute_by_peft(model)
            raise


@dataclass(kw_only=True)
class StepBatches:
    """The micro-batches of one optimizer step, as a Trainer has fetched them.

    Attributes:
        fetched: As the collator made them.
        num_left: How many the Trainer has not asked for yet.
    """

    fetched: Sequence[Mapping[str, Any]]
    num_left: int = field(init=False)

    def __post_init__(self) -> None:
        """Begin with all of them."""
        self.num_left = len(self.fetched)

    def take(self, inputs: object) -> bool:
        """Note that a micro-batch is asked for; return whether it is the step's first.

        Raises:
            DataError: It is not the next of the step.
        """
        number = len(self.fetched) - self.num_left
        if not self.num_left or self.fetched[number] is not inputs:
            raise DataError(
                "a micro-batch is trained on that is not the next of its step",
                limit="the micro-batches of a step are those that `get_batch_samples` returned",
                hint="leave them as they are; change rows in the data set or the collator",
            )
        self.num_left -= 1
        return number == 0


def micro_batch(inputs: Mapping[str, Any]) -> Batch:
    """Return what a collator made as the engine's micro-batch.

    A flattened sequence whose row boundaries are given becomes packed rows: they are kept apart by
    the engine in every architecture, whatever the attention kernels read.

    Args:
        inputs: input_ids and labels (B, T), and what else the collator adds.

    Raises:
        DataError: It has something that an engine does not compute with, or no labels, or its
            rows are not apart.
    """
    given = {name: value for name, value in inputs.items() if value is not None}
    if "labels" not in given:
        raise DataError(
            f"a batch has no `labels`, only {', '.join(given)}",
            limit="the loss is that of the tokens with a label",
            hint="`DataCollatorForLanguageModeling(tokenizer, mlm=False)` copies them from the"
            " tokens; or a column `labels`",
        )
    unknown = sorted(given.keys() - {*TAKEN, *_BOUNDS})
    if unknown:
        raise DataError(
            f"a batch has `{unknown[0]}`",
            limit=f"an engine computes with {', '.join(TAKEN)}",
            hint=f"`remove_unused_columns=True`, or leave `{unknown[0]}` out of the data set",
        )
    # a data loader may have moved them; the engine counts labels on the host
    batch = {name: given[name].cpu() for name in TAKEN if name in given}
    if "cu_seq_lens_q" not in given:
        return batch
    row_lens = given["cu_seq_lens_q"].diff().long().cpu()
    _require_rows_apart(batch, row_lens.tolist())
    return {"input_ids": batch["input_ids"], "labels": batch["labels"], ROW_LENS: row_lens}


def _require_rows_apart(batch: Batch, row_lens: Sequence[int]) -> None:
    """Check that a flattened sequence means what packed rows mean to the engine.

    Raises:
        DataError: A row does not begin at position 0, is masked, or its first token has a label.
    """
    positions = torch.cat([torch.arange(length) for length in row_lens])
    starts = positions == 0
    problem = ""
    if "attention_mask" in batch:
        problem = "an `attention_mask`"
    elif "position_ids" not in batch or not batch["position_ids"].equal(positions.unsqueeze(0)):
        problem = "no `position_ids` that begin at 0 in each row"
    elif (batch["labels"][0, starts][1:] != IGNORED).any():
        problem = "a label at the first token of a row"
    if problem:
        raise DataError(
            f"a flattened batch with `cu_seq_lens_q` has {problem}",
            limit="no row sees another, each starts at position 0, and its first token has no loss",
            hint="`DataCollatorWithFlattening` makes such batches; or leave `cu_seq_lens_q` away",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLoss:
    """The loss of a batch that is not trained on.

    Attributes:
        loss: Mean over its label tokens; NaN if it has none, as a model's own.
        num_label_tokens: Tokens with a label.
        accuracy: The fraction of them that are the most probable token.
    """

    loss: float
    num_label_tokens: int
    accuracy: float


NOTHING = BatchLoss(loss=float("nan"), num_label_tokens=0, accuracy=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The losses of batches that passed the layers together.

    Attributes:
        batches: Of each.
        num_loads: Layers copied from host to device for all of them.
    """

    batches: tuple[BatchLoss, ...]
    num_loads: int


def computing_adapters(model: PeftModel) -> Sequence[str] | None:
    """Return the adapters that a forward computes with; None if its modules are not alike in it.

    Args:
        model: Whose modules know it: `model.active_adapter` stays as it is when they are switched
            off, and names one where several are on.
    """
    status = model.get_model_status()
    if status.enabled is False:
        return ()
    active = status.active_adapters
    return None if status.enabled == "irregular" or isinstance(active, str) else active


def evaluated(engine: Engine, batches: Sequence[Batch], *, adapter: str | None) -> Evaluated:
    """Return the loss of each batch, all of them in one pass over the layers.

    Args:
        engine: Of the model.
        batches: As `micro_batch` returns them.
        adapter: With which; None for the model without any.
    """
    scorable = [_rows_with_labels(batch) for batch in batches]
    kept = [batch for batch in scorable if batch is not None]
    if not kept:
        return Evaluated(batches=(NOTHING,) * len(batches), num_loads=0)
    result = engine.score(kept, adapters=[adapter])
    scores = iter(result.scores[0])
    found = (NOTHING if batch is None else _loss(next(scores)) for batch in scorable)
    return Evaluated(batches=tuple(found), num_loads=result.num_loads)


def _loss(tokens: TokenScores) -> BatchLoss:
    num = len(tokens.logps_N)
    return BatchLoss(
        loss=float(-tokens.logps_N.double().sum() / num),
        num_label_tokens=num,
        accuracy=float(tokens.is_greedy_N.double().mean()),
    )


def _rows_with_labels(batch: Batch) -> Batch | None:
    """Return the rows of a batch that have a label, which alone have a loss; None if none has."""
    if ROW_LENS in batch:
        return _packed_with_labels(batch)
    has_label_B = (batch["labels"][:, 1:] != IGNORED).any(dim=1)
    if not has_label_B.any():
        return None
    if has_label_B.all():
        return batch
    num_rows = len(has_label_B)
    return {
        name: value[has_label_B] if len(value) == num_rows else value
        for name, value in batch.items()
    }


def _packed_with_labels(batch: Batch) -> Batch | None:
    lens, labels = batch[ROW_LENS].tolist(), batch["labels"][0].split(batch[ROW_LENS].tolist())
    has_label = torch.tensor([bool((one[1:] != IGNORED).any()) for one in labels])
    if not has_label.any():
        return None
    kept_T = has_label.repeat_interleave(torch.tensor(lens))
    return {
        ROW_LENS: batch[ROW_LENS][has_label],
        "input_ids": batch["input_ids"][:, kept_T],
        "labels": batch["labels"][:, kept_T],
    }
