"""Rules for recipes whose processes each hold a part of the model: what it cannot have."""

from collections.abc import Iterator
from dataclasses import replace

from finetune.recipe.breach import Allowed, Breach, breaches
from finetune.recipe.offload_section import OffloadSection
from finetune.recipe.sections import Settings, TrainSection

OPTIMIZERS = ("adamw", "sgd")
_OF_SLOTS = (
    "num_slots",
    "kept_graphs",
    "sent_graphs",
    "attention_outputs",
    "stash",
    "embeddings",
    "head",
)
_OF_CHUNKS = ("head_chunk", "mlp_chunk")


def broken_sharded_rules(recipe: Settings) -> Iterator[Breach]:
    """Yield the rules that a recipe breaks with `train.parallel: fsdp2`."""
    for breach in breaches(
        (*_training(recipe), *_holding(recipe)), setting="train.parallel", value="fsdp2"
    ):
        yield replace(breach, hint=f"{breach.hint}, or {streamed_instead(recipe.train)}")


def streamed_instead(train: TrainSection) -> str:
    """Return the setting that streams the model in place of sharding it, for hints."""
    return "`train.parallel: stream`" + (" with one process" if train.is_full else "")


def _training(recipe: Settings) -> Iterator[Allowed]:
    """Yield what is trained and how: field, value, whether it is possible, the limit, the fix."""
    model, adapter, train, objective = recipe.model, recipe.adapter, recipe.train, recipe.objective
    yield (
        "objective.method",
        objective.method,
        objective.is_sft,
        "a loss that compares rows needs all of a step's at once, and here each micro-batch passes"
        " through the model by itself",
        "sft",
    )
    yield (
        "data.packing",
        recipe.data.packing,
        recipe.data.packing != "on",
        "packed rows are kept apart layer by layer, as they are streamed",
        "off",
    )
    yield (
        "model.dtype",
        model.dtype,
        model.dtype != "float16",
        "the loss is not scaled, and gradients would vanish",
        "bfloat16",
    )
    yield (
        "adapter.method",
        adapter.method,
        adapter.method == "lora",
        "only LoRA is known to give what it gives when layers are streamed",
        "lora",
    )
    yield (
        "train.gradient_checkpointing",
        train.gradient_checkpointing,
        train.gradient_checkpointing is not False,
        "each layer is checkpointed: its backward gathers it again, and computes it again",
        "true",
    )
    yield (
        "adapter.dora",
        adapter.dora,
        not adapter.dora,
        "only LoRA is known to give what it gives when layers are streamed",
        "false",
    )
    yield (
        "adapter.experts",
        adapter.experts,
        not adapter.experts,
        "adapters of experts are computed as layers are streamed",
        "false",
    )
    yield (
        "adapter.dtype",
        adapter.dtype,
        adapter.dtype == "float32",
        "each process would round its part of a tensor by itself",
        "float32",
    )
    yield (
        "adapter.modules_to_save",
        ", ".join(adapter.modules_to_save),
        not adapter.modules_to_save,
        "modules that train whole have another type than adapters, and are added up apart",
        "[]",
    )
    yield (
        "train.optimizer",
        train.optimizer,
        train.optimizer in OPTIMIZERS,
        "each process updates its part of a tensor, element by element: " + " or ".join(OPTIMIZERS),
        "adamw",
    )
    yield (
        "train.shares",
        train.shares,
        isinstance(train.shares, str),
        "all processes gather each layer together, for equal numbers of micro-batches",
        "equal",
    )
    yield (
        "train.reduce_dtype",
        train.reduce_dtype,
        train.reduce_dtype == "fp32",
        "gradients are added up in fp32",
        "fp32",
    )
    yield (
        "train.compile",
        train.compile,
        not train.compile,
        "layers that are gathered have not been compiled",
        "false",
    )
    yield (
        "train.router_loss_coef",
        train.router_loss_coef,
        not train.router_loss_coef,
        "a router loss counts the tokens of the whole step",
        "0",
    )
    yield (
        "model.layer_kernels",
        model.layer_kernels,
        model.kernels != "fused",
        "layers are computed by the model's own code",
        "plain",
    )
    yield (
        "model.experts_implementation",
        model.experts_implementation,
        model.experts_implementation != "triton",
        "layers are computed by the model's own code",
        "grouped_mm",
    )


def _holding(recipe: Settings) -> Iterator[Allowed]:
    """Yield where weights are, and what is written: the same five values."""
    offload, none = recipe.offload, OffloadSection()
    yield (
        "offload.codec",
        offload.codec,
        offload.codec in ("auto", "native"),
        "parts of layers are gathered in the form that they compute in",
        "native",
    )
    yield (
        "offload.tier",
        offload.tier,
        offload.tier != "disk",
        "each process holds its part of all layers, and no layer waits",
        "auto",
    )
    for names, limit in (
        (_OF_SLOTS, "nothing is streamed: each process holds its part of all layers"),
        (_OF_CHUNKS, "each micro-batch passes through the model's own head and MLPs whole"),
    ):
        for name in names:
            value, default = getattr(offload, name), getattr(none, name)
            yield f"offload.{name}", value, value == default, limit, default
    yield (
        "output.best_checkpoint",
        recipe.output.best_checkpoint,
        recipe.output.best_checkpoint != "use",
        "the result is taken from the processes' parts as they are after the last step",
        "keep",
    )
    yield (
        "report.samples",
        recipe.report.samples,
        not recipe.report.samples,
        "answers are generated by one process, and it has a part of the model only",
        "0",
    )
