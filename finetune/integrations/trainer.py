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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.variants import DoraLinearVariant
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput, has_length

from finetune.adapter.linear_lora import compute_by_peft, compute_in_base_dtype
from finetune.errors import ConfigError, DataError
from finetune.model.facts import facts_from
from finetune.planning.candidates import HEAD_CHUNKS, choose, with_forms
from finetune.recipe.capabilities import OF_ARGUMENTS, OF_OPTIONS, OF_TRAINER, require_followed
from offload import attach
from offload.engine.batch import IGNORED, ROW_LENS, Batch
from offload.engine.engine import Engine, EngineOptions
from offload.engine.passes.scoring import TokenScores
from offload.plan.facts.facts import AdapterSpec, ModelFacts
from offload.plan.facts.optimizer import DEFAULT, optimizers_that
from offload.plan.facts.workload import WeightPlace, Workload
from offload.plan.machine.machine import Machine
from offload.plan.plan import Plan
from offload.plan.request import HEAD_CHUNK_TOKENS, PlanRequest, with_workload
from offload.probe.machine import PROBE_S, probe

# ---------------------------------------------------------------------------------------------
# The plan of a Trainer's steps, from its model and arguments: what `Streaming.of` attaches.
#
# `SluiceTrainer(model, args, streaming=Streaming.of(plan_steps(model, args, seq_len=2048)), ...)`

_SLOTS = "`Streaming(num_slots=...)` without a plan"


def plan_steps(
    model: PeftModel,
    args: TrainingArguments,
    *,
    seq_len: int,
    codec: str = "native",
    compute_dtype: Literal["float32", "auto"] = "float32",
    machine: Machine | None = None,
) -> Plan:
    """Plan the steps of a Trainer: the fastest that fits, with its predicted time and memory.

    Args:
        model: With a LoRA adapter, on the host.
        args: Sizes of micro-batches and steps are read off it.
        seq_len: Tokens of the longest row; all are counted as if they were so long.
        codec: How the layers' matrices are stored off the device.
        compute_dtype: What adapters of linear layers are computed in; see `Streaming`.
        machine: Where; None measures this one, which takes some seconds.

    Raises:
        ConfigError: The adapter or the model's dtype is none that can be planned.
        DoesNotFitError: It does not fit, with what would.
        MachineError: This machine cannot be measured.
    """
    base: Any = model.get_base_model()
    config = base.config.to_dict()
    facts = facts_from(config, is_published=False)
    dtype = _dtype(base)
    if machine is None:
        device = "cuda" if args.device.type == "cuda" else "cpu"
        machine = probe(device=device, seconds=PROBE_S, dtype=str(dtype).removeprefix("torch."))
    num_rows = args.per_device_train_batch_size
    optim = str(getattr(args.optim, "value", args.optim))
    workload = Workload(
        micro_batch_size=num_rows,
        seq_len=seq_len,
        label_tokens=num_rows * seq_len,
        head_chunk_tokens=HEAD_CHUNK_TOKENS,
        adapter=replace(
            _adapter_spec(model, facts),
            is_in_base_dtype=compute_dtype == "auto" and _has_plain_branches(model),
        ),
        optimizer=next(iter(optimizers_that(lambda one: optim in one.aliases)), DEFAULT),
        dtype_bytes=dtype.itemsize,
        codec=codec,
    )
    request = PlanRequest(
        typical=workload,
        largest=workload,
        num_micro_batches=args.gradient_accumulation_steps,
        num_slots=None,
        num_kept_graphs=None,
        vram_budget_bytes=None,
        num_workers=args.dataloader_num_workers,
        is_stashed=False,
        is_on_disk=False,
        is_masked=True,
        has_outputs=base.config._attn_implementation == "sdpa",  # no other is recorded
        has_sent_graphs=True,
    )
    ways = [
        with_workload(replace(request, is_stashed=is_stashed), head_chunk_tokens=num_tokens)
        for num_tokens in HEAD_CHUNKS
        for is_stashed in (False, True)
    ]
    has_dropout = workload.adapter.has_dropout
    forms = with_forms(
        facts, ways, may_tile=not has_dropout, may_move_embeddings=True, may_move_head=True
    )
    return choose(facts, machine, forms).plan


def _dtype(base: nn.Module) -> torch.dtype:
    """Return what the layers compute in: the dtype of the frozen weights.

    Raises:
        ConfigError: There are several, or it is none that rates are measured for.
    """
    found = {p.dtype for p in base.parameters() if not p.requires_grad and p.is_floating_point()}
    if found not in ({torch.float32}, {torch.bfloat16}):
        raise ConfigError(
            f"the frozen weights are of {', '.join(sorted(map(str, found)))}",
            limit="layers are planned in float32 or bfloat16",
            hint=f"`from_pretrained(..., dtype=torch.bfloat16)`, or {_SLOTS}",
        )
    return found.pop()


def _has_plain_branches(model: PeftModel) -> bool:
    """Return whether no adapter has a bias, or a variant of LoRA that peft alone computes."""
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    kinds = {type(kind) for layer in layers for kind in layer.lora_variant.values()}
    configs: list[Any] = list(model.peft_config.values())
    has_bias = any(config.lora_bias or config.bias != "none" for config in configs)
    return not has_bias and kinds <= {DoraLinearVariant}


def _adapter_spec(model: PeftModel, facts: ModelFacts) -> AdapterSpec:
    """Read off a model what of it trains.

    Raises:
        ConfigError: It is another adapter than LoRA, or several.
    """
    configs: list[Any] = list(model.peft_config.values())
    config = configs[0]
    if len(configs) != 1 or not isinstance(config, LoraConfig):
        raise ConfigError(
            f"the model has the adapters {', '.join(str(c.peft_type.value) for c in configs)}",
            limit="the steps of one LoRA adapter are planned",
            hint=_SLOTS,
        )
    adapted = (name for name, module in model.named_modules() if isinstance(module, LoraLayer))
    linears = {
        linear.name for layer in facts.layers for linear in layer.linears if linear.is_module
    }
    names = dict.fromkeys(name.rpartition(".")[2] for name in adapted)
    return AdapterSpec(
        rank=max([config.r, *(config.rank_pattern or {}).values()]),
        targets=tuple(name for name in names if name in linears),
        experts=bool(config.target_parameters),
        is_dora=config.use_dora,
        modules=tuple(config.modules_to_save or ()),
        has_dropout=config.lora_dropout > 0,
    )


# ---------------------------------------------------------------------------------------------
# What an engine cannot follow exactly, refused before the model is touched

TAKES_STEPS = (
    "_get_num_items_in_batch",
    "_inner_training_loop",
    "_prepare_input",
    "_prepare_inputs",
    "_run_epoch",
    "compute_loss",
    "compute_loss_context_manager",
    "evaluation_loop",
    "get_batch_samples",
    "prediction_step",
    "training_step",
)
"""Methods of a Trainer that decide what a step computes."""


_OWN = "finetune.integrations."
_KNOWN = ("transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.base_trainer")


def require_arguments(model: object, args: object, options: dict[str, Any]) -> None:
    """Check what a Trainer is made with, before it is made.

    Args:
        model: Its model.
        args: Its TrainingArguments.
        options: Its other keyword arguments.

    Raises:
        ConfigError: An engine cannot do what one of them says; all such are named.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is {model!r}, a {type(model).__name__}",
            limit="it is loaded on the host, where its layers wait for the device",
            hint='`AutoModelForCausalLM.from_pretrained(name, device_map="cpu", dtype=...)`',
        )
    if not isinstance(args, TrainingArguments):
        raise ConfigError(
            f"args is a {type(args).__name__}",
            limit="what a step is, is read off TrainingArguments before the model is attached",
            hint="`TrainingArguments(output_dir=..., ...)`",
        )
    require_followed(OF_ARGUMENTS, lambda name: getattr(args, name, None))
    require_followed(OF_OPTIONS, options.get)


def require_own_methods(kind: type) -> None:
    """Check that no subclass, and no patch, computes a step in its own way.

    Args:
        kind: The class of the trainer.

    Raises:
        ConfigError: One does.
    """
    for one in kind.__mro__:
        for name in TAKES_STEPS:
            module = str(getattr(vars(one).get(name), "__module__", _OWN))
            if module not in _KNOWN and not module.startswith(_OWN):
                raise ConfigError(
                    f"{one.__name__}.{name} is that of {module}",
                    limit="a step is computed by the engine, which does not call it",
                    hint=f"leave `{name}` away; a loss of your own is an objective of"
                    " `engine.forward_backward(micro_batches, objective=...)`",
                )


def require_trainer(trainer: Any) -> None:
    """Check what a Trainer has found out when it was made, from its environment too.

    Args:
        trainer: Before its model is attached.

    Raises:
        ConfigError: It is set up in a way that an engine cannot follow.
    """
    state = trainer.accelerator.state
    config = trainer.model.config.get_text_config()
    found = {
        "mixed_precision": trainer.accelerator.mixed_precision,
        "dynamo_backend": state.dynamo_plugin.backend.value.lower(),
        "distributed_type": state.distributed_type.value.lower(),
        "model_accepts_loss_kwargs": trainer.model_accepts_loss_kwargs,
        "output_router_logits": getattr(config, "output_router_logits", False),
    }
    require_followed(OF_TRAINER, found.__getitem__)
    if getattr(trainer, "padding_free", False) and trainer.compute_metrics is not None:
        refuse_packed_logits()


def refuse_packed_logits() -> NoReturn:
    """Raise the error for logits of packed rows, which the engine does not return.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        "logits of rows that share a sequence are asked for",
        limit="the engine keeps such rows apart for their losses alone; logits are of padded rows",
        hint="leave `compute_metrics` away, or padding_free=False and packing=False;"
        " prediction_loss_only=True predicts losses",
    )


# ---------------------------------------------------------------------------------------------
# A model on an engine within a Trainer: how it is attached, and what is computed of its batches.
#
# A Trainer hands out a step's micro-batches one by one. Here they are held as a step: the first
# that is asked for has the loss of all of them computed, layer by layer, and the others have
# nothing left to add.

TAKEN = ("input_ids", "labels", "attention_mask", "position_ids")
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""How collators tell kernels where the rows of a flattened sequence begin: `row_lens` says it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Streaming:
    """How a Trainer's model is attached; each is as for `offload.attach`."""

    num_slots: int  # layers on the device at a time
    codec: str = "native"  # how the layers' matrices are stored off the device
    stash: Literal["device", "host"] = "device"  # where layer inputs wait for the backward
    head_chunk_tokens: int = HEAD_CHUNK_TOKENS  # tokens whose logits exist at a time
    kept_graphs: int = 0  # last layers whose activations stay on the device for the backward
    kept_outputs: int = 0  # layers before these whose attention's output stays there
    sent_outputs: int = 0  # layers before these whose attention's output goes to host memory
    sent_graphs: int = 0  # layers before those with kept graphs whose activations go to host memory
    # Tokens that an MLP computes at a time; None for all of a batch.
    mlp_chunk_tokens: int | None = None
    # What computes norms, rotary embedding and gated activations.
    layer_kernels: Literal["plain", "fused"] = "plain"
    embeddings: WeightPlace = "device"  # where the input embedding's weight is
    head: WeightPlace = "device"  # where the output head's weight is
    # What the adapters of linear layers are computed in until the Trainer is detached: `float32` by
    # peft, as the plain Trainer does it, or `auto`, at the precision of the weights, which is
    # faster and holds less; see `adapter.compute_dtype`.
    compute_dtype: Literal["float32", "auto"] = "float32"

    @classmethod
    def of(cls, plan: Plan) -> "Streaming":
        """Return what a plan chose; see `finetune.integrations.trainer.plan_steps`."""
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
    """The micro-batches of one optimizer step, as a Trainer has fetched them."""

    fetched: Sequence[Mapping[str, Any]]  # the batches, as the collator made them
    num_left: int = field(init=False)  # how many the Trainer has not asked for yet

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
    """The loss of a batch that is not trained on."""

    loss: float  # mean over its label tokens; NaN if it has none, as a model's own
    num_label_tokens: int  # tokens with a label
    accuracy: float  # the fraction of them that are the most probable token


NOTHING = BatchLoss(loss=float("nan"), num_label_tokens=0, accuracy=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The losses of batches that passed the layers together."""

    batches: tuple[BatchLoss, ...]  # the batches of each part
    num_loads: int  # layers copied from host to device for all of them


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
