"""The sections of a recipe: each setting with its limits, its default and what it means.

Defaults are only here: all lower layers take run settings as required arguments, because a default
written twice is a default with two values. A field's own limits are next to it; rules that read
several fields are in `finetune.recipe.capabilities`.
"""

import math
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, GetPydanticSchema, SerializeAsAny, field_validator
from pydantic_core import core_schema

from finetune.recipe.adapters import AdapterSection, Names
from finetune.recipe.extensions import (
    FORMATS,
    Head,
    NameIn,
    ObjectiveSection,
    Section,
    column_names,
)
from offload.plan.facts.codec import CODECS, NATIVE
from offload.plan.facts.optimizer import DEFAULT, OPTIMIZERS
from offload.plan.facts.workload import FusedPart
from offload.plan.machine.machine import GIB, Dtype, ExpertsImplementation, Tier
from offload.registry import Registry


def name_in(registry: Registry[Any]) -> GetPydanticSchema:
    """Return what makes a field take the names of extensions, as a `Literal` of them would."""
    return GetPydanticSchema(lambda *_: core_schema.literal_schema([*registry]))


def listed(registry: Registry[Any]) -> str:
    """Describe each extension after its name."""
    return "; ".join(f"`{name}` {extension.doc}" for name, extension in registry.items())


CodecName = Annotated[str, name_in(CODECS)]
OptimizerName = Annotated[str, name_in(OPTIMIZERS)]

# Lists arrive as lists from YAML and are kept as tuples, which are immutable.
Counts = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)]
FormatName = Annotated[str, NameIn(lambda: ("auto", *FORMATS))]
EmptyThink = Literal["prompt", "learn"]
ColumnNames = dict[Annotated[str, NameIn(column_names)], Annotated[str, Field(min_length=1)]]


Revision = Annotated[str, Field(min_length=1)] | None


class MixSource(Section):
    """One source of `data.mix`; what it leaves out is as in `data`."""

    path: str = Field(min_length=1, description="As `data.path`.", examples=["data/chats.jsonl"])
    revision: Revision = Field(default=None, description="As `data.revision`.", examples=["main"])
    weight: float = Field(
        default=1.0, gt=0, description="Its share of the rows is this over the sum of weights."
    )
    format: FormatName | None = Field(
        default=None, description="Form of its rows.", examples=["messages"]
    )
    columns: ColumnNames | None = Field(
        default=None,
        description="Its columns under other names.",
        examples=[{"prompt": "question", "completion": "answer"}],
    )
    system: str | None = Field(
        default=None,
        min_length=1,
        description="System prompt put before its conversations that have none.",
        examples=["Answer briefly."],
    )
    max_rows: int | None = Field(
        default=None, ge=1, description="Its first rows, at most.", examples=[1000]
    )


class DataSection(Section):
    """The rows to train on, and those held out."""

    path: str | None = Field(
        default=None,
        min_length=1,
        description="File (jsonl, json, csv, parquet, txt), directory of files, saved data set, or"
        " hub id (id#config:split). Either this or `data.mix`.",
        examples=["data/train.jsonl"],
    )
    revision: Revision = Field(
        default=None,
        description="Branch, tag or commit of `data.path` on the hub; null takes the newest. A run"
        " keeps the commit in its `recipe.yaml`.",
        examples=["main"],
    )
    mix: Annotated[tuple[MixSource, ...], Field(strict=False)] = Field(
        default=(),
        description="Several sources, each with `path`, `weight` (its share of the rows), and"
        " `format`, `columns`, `system`, `max_rows` of its own.",
        examples=[[{"path": "data/chats.jsonl", "weight": 3}, {"path": "data/code.jsonl"}]],
    )
    format: FormatName = Field(
        default="auto",
        description="Form of a row; `auto` finds it by the column names, among those that the"
        " objective reads.",
    )
    columns: ColumnNames = Field(
        default={},
        description="Columns under other names: the format's name, and the file's.",
        examples=[{"instruction": "question", "output": "answer"}],
    )
    ignored_columns: Names = Field(
        default=(),
        description="Columns, and keys of turns, whose meaning is left out on purpose.",
        examples=[["tools"]],
    )
    system: str | None = Field(
        default=None,
        min_length=1,
        description="System prompt put before conversations that have none.",
        examples=["Answer briefly."],
    )
    max_rows: int | None = Field(
        default=None,
        ge=1,
        description="The first rows of `data.path`, or rows of an epoch of `data.mix`, at most.",
        examples=[1000],
    )
    drop_duplicates: bool = Field(
        default=False,
        description="Drop rows that were in the same source before; they are counted.",
    )
    skip_bad: int = Field(
        default=0,
        ge=0,
        description="Empty or malformed rows that may be skipped and named; one more is an error.",
    )
    too_long: Literal["drop", "truncate", "split", "error"] = Field(
        default="truncate",
        description="Rows of more than `train.seq_len` tokens: cut off there, `drop`ped, `split`"
        " into several, or an `error`.",
    )
    eval_path: str | None = Field(
        default=None,
        min_length=1,
        description="Held-out rows, in the same form as `data.path`.",
        examples=["data/eval.jsonl"],
    )
    eval_revision: Revision = Field(
        default=None,
        description="Branch, tag or commit of `data.eval_path` on the hub; null takes that of"
        " `data.revision` if both are one repository, or else the newest.",
        examples=["main"],
    )
    eval_frac: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Part of the rows that is held out, in place of `data.eval_path`.",
        examples=[0.05],
    )
    loss_on: Literal["assistant", "last", "all"] = Field(
        default="assistant",
        description="Tokens that the loss is taken on: of every answer, of the last one, or all."
        " `train: false` in a turn leaves its answer out.",
    )
    empty_think: EmptyThink = Field(
        default="prompt",
        description="The empty think block that a chat template writes before answers without"
        " reasoning: part of the `prompt`, which a server sends only if it is set to, or `learn`ed"
        " with the answer, after the prompt that servers send by default.",
    )
    packing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Whether short rows share a sequence, none seeing another. A step then has"
        " `train.tokens_per_step` real tokens. `auto` is `on`, except with `train.compile`.",
    )
    allow_downloads: bool = Field(
        default=False,
        description="Download images that rows name by http(s) URLs, each time they are tokenised;"
        " files and bytes in the rows need no network.",
    )
    num_workers: int = Field(
        default=1,
        ge=0,
        le=256,
        description="Processes that prepare batches ahead of the step; 0 prepares in the step, and"
        " tokenises in the main process in place of one process per core.",
    )

    @field_validator("packing", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        """Take `on` and `off` as YAML reads them, which are booleans there."""
        return ("on" if value else "off") if isinstance(value, bool) else value

    @property
    def set_for_turns(self) -> tuple[str, ...]:
        """The settings that are not at their defaults and say nothing of documents."""
        changed = {
            "loss_on": self.loss_on != "assistant",
            "system": self.system is not None,
            "too_long": self.too_long != "truncate",
            "empty_think": self.empty_think != "prompt",
        }
        return tuple(name for name, is_changed in changed.items() if is_changed)

    @property
    def sources(self) -> tuple[MixSource, ...]:
        """What is trained on: the sources of the mix, or `path` as the only one."""
        return self.mix or (MixSource(path=self.path or "", revision=self.revision),)


class ImageSection(Section):
    """The images of rows, which a frozen tower turns into tokens once, before step 1."""

    max_tokens: int | None = Field(
        default=None,
        ge=4,
        le=2**16,
        description="Tokens of an image at most, in the terms of the model's own processor, which"
        " makes larger images smaller; null takes what the processor is published with. A token of"
        " features is as many bytes on disk as a hidden state, or four of them (Qwen3-VL), and"
        " patches are some 28 x 28 to 48 x 48 pixels.",
        examples=[512],
    )


class OffloadSection(Section):
    """Where the base weights lie and how they travel."""

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="What computes; `auto` takes CUDA where there is one."
    )
    tier: Literal["auto", "ram", "disk"] = Field(
        default="auto",
        description="Where layers wait that are in no slot: `ram`, or a file on `disk`.",
    )
    codec: Literal["auto"] | CodecName = Field(
        default="auto",
        description=f"Form in which the layers' matrices wait: {listed(CODECS)}. `auto` takes the"
        " faster of those that leave weights in `model.dtype` as they are; of two that are as fast"
        " to 1 %, the one with less RAM.",
    )
    num_slots: Literal["auto", "all"] | Annotated[int, Field(ge=2)] = Field(
        default="auto",
        description="Layers that the device holds at a time; `all` makes the model resident.",
    )
    kept_graphs: Literal["auto", "all"] | Annotated[int, Field(ge=0)] = Field(
        default="auto",
        description="Layers, from the last, that the backward does not compute again because what"
        " autograd saved of them stays on the device; `auto` takes as many as fit and pay.",
    )
    sent_graphs: Literal["auto", "none"] = Field(
        default="auto",
        description="Whether other layers are not computed again either, because what autograd"
        " saved of them waits in page-locked memory; `auto` sends as many as fit and pay.",
    )
    attention_outputs: Literal["auto", "none"] = Field(
        default="auto",
        description="Whether outputs of fused attention wait for the backward, which then does not"
        " compute it again, on the device or in page-locked memory; `auto` keeps and sends as many"
        " as fit and pay.",
    )
    stash: Literal["auto", "device", "host"] = Field(
        default="auto",
        description="Where the layers' inputs wait for the backward; `host` saves device memory.",
    )
    head_chunk: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="Labelled tokens whose logits exist at a time; `auto` takes 1,024, or 256 or 64"
        " where a step would not fit otherwise.",
    )
    mlp_chunk: Literal["auto", "whole"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="Tokens that an MLP computes at a time; `auto` takes `whole`, or 8,192, 2,048"
        " or 512 where a step would not fit otherwise.",
    )
    vram_budget: Literal["auto"] | Annotated[float, Field(gt=0, le=1_000_000)] = Field(
        default="auto",
        description="Device memory that the plan may use, in GiB; `auto` takes what is free.",
    )
    embeddings: Literal["auto", "device", "host"] = Field(
        default="auto",
        description="Where the input embedding waits; from `host`, each micro-batch brings the rows"
        " of its tokens. One that trains is on the device. `auto` takes `host` where a step would"
        " not fit otherwise. If the head has its weight, both are in one place.",
    )
    head: Literal["auto", "device", "host"] = Field(
        default="auto",
        description="Where the output head waits; from `host`, it is copied once per step over the"
        " slots of layers that are needed again last. One that trains is on the device. `auto`"
        " takes `host` where a step would not fit otherwise, even with the embedding in RAM. If it"
        " has the embedding's weight, both are in one place.",
    )

    @property
    def layer_codec(self) -> str:
        """The codec of layers while they wait; `auto` is lossless."""
        return NATIVE if self.codec == "auto" else self.codec

    @property
    def load_tier(self) -> Tier:
        """The tier that the layers are loaded to."""
        return "disk" if self.tier == "disk" else "ram"

    @property
    def vram_budget_bytes(self) -> int | None:
        """The budget in bytes; None where the plan takes what is free."""
        return None if self.vram_budget == "auto" else int(self.vram_budget * GIB)


# Upper limit of a step: a plan examines each micro-batch, and no step that trains comes near it.
MAX_MICRO_BATCHES = 10_000
Schedule = Literal["cosine", "cosine_with_restarts", "linear", "constant"]


FusedParts = Annotated[tuple[FusedPart, ...], Field(strict=False, min_length=1)]


class ModelSection(Section):
    """Which model is trained, and where its weights and tokenizer come from."""

    @property
    def kernels(self) -> Literal["auto", "plain", "fused"]:
        """What computes norms, rotary embedding, gates and the loss, or the first of them."""
        return "fused" if isinstance(self.layer_kernels, tuple) else self.layer_kernels

    @property
    def plain_parts(self) -> frozenset[FusedPart]:
        """What the model's own code computes where others are fused."""
        listed = self.layer_kernels
        return (
            frozenset(get_args(FusedPart)).difference(listed)
            if isinstance(listed, tuple)
            else frozenset()
        )

    path: str | None = Field(
        default=None,
        min_length=1,
        description="Hub id or local directory of the model. Either this or `model.config`.",
        examples=["Qwen/Qwen3-0.6B"],
    )
    revision: Revision = Field(
        default=None,
        description="Branch, tag or commit of `model.path` on the hub; null takes what is in the"
        " cache whole, or else the newest commit. A run keeps the commit in its `recipe.yaml`.",
        examples=["main"],
    )
    config: str | None = Field(
        default=None,
        min_length=1,
        description="Shipped shape, or path of a config.json, to build with random weights.",
        examples=["tiny-qwen3"],
    )
    init: Literal["pretrained", "random"] = Field(
        default="pretrained",
        description="`random` builds the model from its config alone: for tests and measurements.",
    )
    dtype: Dtype = Field(
        default="bfloat16",
        description="Type of the base weights as they compute; `float16`, for cards without"
        " bfloat16, scales the loss and skips steps whose gradients overflow.",
    )
    tokenizer: str | None = Field(
        default=None,
        min_length=1,
        description="Hub id or local directory of the tokenizer; null means that of `model.path`.",
        examples=["Qwen/Qwen3-0.6B"],
    )
    tokenizer_revision: Revision = Field(
        default=None,
        description="Branch, tag or commit of `model.tokenizer` on the hub; null takes that of"
        " `model.revision` if both are one repository, or else the newest.",
        examples=["main"],
    )
    experts_implementation: Literal["auto"] | ExpertsImplementation = Field(
        default="auto",
        description="How a mixture's experts are multiplied: `eager` one by one, `grouped_mm` by"
        " torch, `triton` by our kernels; `auto` is the fastest of a trial on CUDA, `eager` on a"
        " CPU.",
    )
    layer_kernels: Literal["auto", "plain", "fused"] | FusedParts = Field(
        default="auto",
        description="How norms, rotary embedding, gates and the loss are computed: `plain` by the"
        " model's code, `fused` by one kernel each, or a list of those that are, of `norms`,"
        " `rotary`, `gates` and `loss`; `auto` is what a short trial on CUDA finds right and no"
        " slower, each by itself.",
    )

    head: Head = Field(
        default="tokens",
        description="What follows the layers: `tokens`, the model's own head, which predicts them;"
        " `reward`, a new one with one output, or `classes`, one with an output for each class, as"
        " in transformers' sequence classification; `token_classes`, as in its token"
        " classification. `objective.method` sets it.",
    )
    num_classes: int | None = Field(
        default=None,
        ge=2,
        le=2**16,
        description="Classes that a classifier of rows or words tells apart.",
        examples=[3],
    )

    @property
    def num_outputs(self) -> int:
        """Outputs of a new head; 0 where the model keeps its own."""
        return 1 if self.head == "reward" else self.num_classes or 0

    @property
    def tokenizer_source(self) -> str | None:
        """Where the tokenizer comes from: its own setting, else the model's."""
        return self.tokenizer or self.path


class TrainSection(Section):
    """The optimizer step: how many tokens, how many steps, and the update."""

    what: Literal["adapter", "head", "all"] | Names = Field(
        default="adapter",
        description="What trains: an `adapter` on the frozen model, a new `head` alone, on what the"
        " frozen layers give it, computed once (linear probing), `all` weights of the model,"
        " or a list of groups (`biases`, `norms`, `last_4_layers`) and of patterns of their names;"
        " weights that train are updated in RAM.",
        examples=[["biases"], ["last_4_layers", "lm_head.*"]],
    )

    seq_len: int = Field(default=2048, ge=8, le=2**24, description="Longest sequence, in tokens.")
    micro_batch_size: Literal["auto"] | Annotated[int, Field(ge=1, le=2**16)] = Field(
        default=1,
        description="Sequences per forward; `auto` takes what is fastest for `tokens_per_step`.",
    )
    grad_accum_steps: int | None = Field(
        default=None,
        ge=1,
        le=MAX_MICRO_BATCHES,
        description="Micro-batches per optimizer step. Either this or `train.tokens_per_step`.",
        examples=[8],
    )
    tokens_per_step: int | None = Field(
        default=None,
        ge=1,
        description="Tokens per optimizer step, a multiple of micro_batch_size x seq_len: real ones"
        " where rows are packed, else those of full sequences.",
        examples=[49152],
    )
    steps: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Optimizer steps to run. Either this or `train.epochs`.",
        examples=[500],
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        le=10**6,
        description="Passes over the training rows, with which the last step ends. Either this or"
        " `train.steps`.",
        examples=[1],
    )
    probe_steps: int | None = Field(
        default=None,
        ge=1,
        le=10**9,
        description="Steps before step 1 in which only a new head learns, on what the frozen layers"
        " give it, computed once and kept in RAM; null has none.",
        examples=[200],
    )
    probe_lr: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Peak learning rate of `train.probe_steps`; null takes `train.lr`.",
        examples=[1e-3],
    )
    optimizer: OptimizerName = Field(
        default=DEFAULT,
        description=f"What updates the weights: {listed(OPTIMIZERS)}.",
    )
    lr: float = Field(
        default=2e-4,
        gt=0,
        le=1,
        description="Peak learning rate: about how far a step moves each weight, if the optimizer"
        " scales steps.",
    )
    weight_decay: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Decoupled weight decay; norms, biases and DoRA's magnitudes have none.",
    )
    schedule: Schedule = Field(
        default="cosine",
        description="How the learning rate falls after the warm-up; `cosine_with_restarts` falls"
        " `train.num_cycles` times.",
    )
    num_cycles: int | None = Field(
        default=None,
        ge=2,
        description="How often `cosine_with_restarts` falls from the peak to 0.",
        examples=[4],
    )
    warmup_steps: int = Field(
        default=0,
        ge=0,
        description="Steps over which the learning rate rises from 0, which is the first step's.",
    )
    warmup_ratio: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="`train.warmup_steps` as a part of all steps, rounded up, and not all; only one"
        " of the two.",
        examples=[0.03],
    )
    neftune_alpha: float | None = Field(
        default=None,
        gt=0,
        description="Uniform noise of up to alpha / sqrt(T x D) on the token embeddings while"
        " training (NEFTune); null adds none.",
        examples=[5],
    )
    early_stopping_patience: int | None = Field(
        default=None,
        ge=1,
        description="Evaluations without a lower loss on held-out rows after which the run ends;"
        " null runs all steps.",
        examples=[3],
    )
    early_stopping_min_delta: float = Field(
        default=0.0,
        ge=0,
        description="By more than how much the loss must fall to count as lower.",
    )
    max_grad_norm: float | None = Field(
        default=1.0, gt=0, description="Norm that gradients are clipped to; null does not clip."
    )
    router_loss_coef: float | None = Field(
        default=None,
        ge=0,
        description="Coefficient of a mixture's router (load-balancing) loss; 0 leaves the loss"
        " out, null does as the model's config says.",
        examples=[0.001],
    )
    reduce_dtype: Literal["fp32", "bf16"] = Field(
        default="fp32",
        description="What gradients are sent in between processes: `bf16` halves the bytes, and"
        " rounds each process's gradient and their sum, which is taken in fp32.",
    )
    shares: Literal["auto", "equal"] | Counts = Field(
        default="auto",
        description="How several processes share the micro-batches of a step: `auto` in proportion"
        " to the predicted rates of their cards where these differ in kind, else `equal`; or a"
        " number for each process.",
        examples=[[3, 1]],
    )
    parallel: Literal["auto", "stream", "fsdp2"] = Field(
        default="stream",
        description="How several processes share a step: `stream`, each streams all layers, or"
        " `fsdp2`, each holds a part of the model, gathered layer by layer (torch's `fully_shard`),"
        " where the devices hold it in sum; `auto` takes what the plan says is faster on GPUs.",
    )
    seed: int = Field(
        default=0, ge=0, lt=2**32, description="Seed of initial weights, data order and dropout."
    )
    compile: bool = Field(
        default=False,
        description="Let torch compile each kind of layer, in a minute or so at the start.",
    )
    gradient_checkpointing: Literal["auto"] | bool = Field(
        default="auto",
        description="Whether the backward computes each layer again (`true`) or none (`false`);"
        " `auto` decides layer by layer, see `offload.kept_graphs`.",
    )

    @property
    def is_full(self) -> bool:
        """Whether weights of the model itself train, and no adapter."""
        return self.what not in ("adapter", "head")

    @property
    def is_head_alone(self) -> bool:
        """Whether a new head trains and nothing else."""
        return self.what == "head"

    @property
    def takes_features(self) -> bool:
        """Whether a new head trains alone, before step 1 or in all steps."""
        return self.is_head_alone or self.probe_steps is not None

    @property
    def of_probe(self) -> "TrainSection | None":
        """The settings of the steps in which only the head learns; None if there are none.

        They have the run's rows, optimizer and schedule, and no warm-up: features do not change.
        """
        if self.probe_steps is None:
            return None
        changes = {"steps": self.probe_steps, "epochs": None, "warmup_steps": 0}
        lr = self.lr if self.probe_lr is None else self.probe_lr
        return self.model_copy(update={**changes, "warmup_ratio": None, "lr": lr})

    @property
    def exact_epochs(self) -> Fraction:
        """Passes over the training rows, as they are written in the recipe."""
        assert self.epochs is not None, "either this or `steps`"
        return Fraction(str(self.epochs))

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds a part of the model, and nothing is streamed."""
        return self.parallel == "fsdp2"

    def num_warmup_steps(self, num_steps: int) -> int:
        """Steps over which the learning rate rises, in a run of so many: by a ratio not in all."""
        if self.warmup_ratio is None:
            return self.warmup_steps
        return min(math.ceil(num_steps * self.warmup_ratio), num_steps - 1)

    @property
    def sequences(self) -> int:
        """Sequences per forward, once they are chosen."""
        assert self.micro_batch_size != "auto", "settled by finetune.planning.request"
        return self.micro_batch_size

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per optimizer step, from whichever of the two settings was given."""
        if self.grad_accum_steps is not None:
            return self.grad_accum_steps
        return self.global_batch_size // self.sequences

    @property
    def global_batch_size(self) -> int:
        """Sequences per optimizer step, however they are cut into micro-batches."""
        if self.grad_accum_steps is not None:
            return self.sequences * self.grad_accum_steps
        assert self.tokens_per_step is not None
        return self.tokens_per_step // self.seq_len


class OutputSection(Section):
    """What a run writes, and how often."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run: letters, digits, dot, dash and underscore.",
        examples=["my-first-run"],
    )
    dir: str | None = Field(
        default=None,
        min_length=1,
        description="Directory of the run, from the current directory; null means runs/NAME.",
        examples=["runs/my-first-run"],
    )
    checkpoint_every: int | None = Field(
        default=None,
        ge=1,
        description="Steps between checkpoints; null saves at the end and on Ctrl-C only.",
        examples=[50],
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="Newest checkpoints that are kept.")
    eval_every: int | None = Field(
        default=None,
        ge=1,
        description="Steps between losses on the held-out rows; null never takes one.",
        examples=[50],
    )
    best_checkpoint: Literal["keep", "use"] | None = Field(
        default=None,
        description="`keep` saves each step with the lowest loss on held-out rows so far and keeps"
        " the best one in addition to the newest; `use` also takes the adapter from it.",
        examples=["keep"],
    )
    card_system: bool = Field(
        default=False,
        description="Whether the model card shows the data's system prompts; otherwise it says that"
        " they are left out.",
    )

    @property
    def run_dir(self) -> Path:
        """The directory of the run."""
        return Path(self.dir) if self.dir is not None else Path("runs") / self.name


class ReportSection(Section):
    """What is shown and recorded in addition to the adapter."""

    log_to: Annotated[tuple[Literal["tensorboard", "wandb"], ...], Field(strict=False)] = Field(
        default=(), description="Where metrics go in addition to metrics.jsonl."
    )
    profile: int | None = Field(
        default=None,
        ge=1,
        description="Step recorded by torch.profiler, with a memory snapshot; null records none.",
        examples=[3],
    )
    samples: int = Field(
        default=0,
        ge=0,
        le=10**6,
        description="Held-out rows answered before and after training and scored for exact match.",
    )
    notify: str | None = Field(
        default=None,
        min_length=1,
        description="Command that is given JSON on its standard input when the run ends, fails or"
        " diverges; null calls none.",
        examples=["curl -s -d @- https://ntfy.sh/my-runs"],
    )
    price_per_kwh: float | None = Field(
        default=None,
        gt=0,
        le=1e6,
        description="What a kilowatt-hour costs, to show what a run costs; null shows its energy"
        " alone.",
        examples=[0.32],
    )
    currency: str | None = Field(
        default=None,
        pattern=r"^\S{1,8}$",
        description="Of the price: a text that is shown after it.",
        examples=["EUR"],
    )


class Settings(Section):
    """All sections, each right by itself; `finetune.recipe.recipe` has the rules between them."""

    model: ModelSection = Field(description="Which model is trained.")
    adapter: SerializeAsAny[AdapterSection] = Field(
        default_factory=lambda: AdapterSection.model_validate({}),
        description="What is trained: an adapter, and modules trained whole.",
    )
    data: DataSection = Field(description="The rows to train on.")
    image: ImageSection = Field(default=ImageSection(), description="How large images may be.")
    objective: SerializeAsAny[ObjectiveSection] = Field(
        default_factory=lambda: ObjectiveSection.model_validate({}),
        description="What is learned from the rows: to repeat them, or to prefer some of them.",
    )
    train: TrainSection = Field(description="The optimizer step and how many of them.")
    offload: OffloadSection = Field(
        default=OffloadSection(), description="Where the weights lie and how they travel."
    )
    output: OutputSection = Field(description="What the run writes.")
    report: ReportSection = Field(
        default=ReportSection(),
        description="What is shown and recorded in addition to the adapter.",
    )
