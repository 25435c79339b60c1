"""Rules between the fields of a recipe, each broken one as an error in three parts.

A field's own limits are next to it in `finetune.recipe.sections`. A rule here reads several fields,
and one that is broken names the field to point at. Rules yield rather than raise, so that all of
them are reported at once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from finetune.recipe.sections import (
    FORMAT_COLUMNS,
    LOSSES,
    MAX_MICRO_BATCHES,
    AdapterSection,
    DataSection,
    Method,
    ModelSection,
    ObjectiveSection,
    OffloadSection,
    Settings,
    TrainSection,
    formats_of,
    read_settings,
)
from offload.plan.facts.optimizer import HOST_ONLY
from offload.plan.facts.trainable import EMBEDDING, HEAD, SCORE


@dataclass(frozen=True, kw_only=True, slots=True)
class Breach:
    """A rule between fields that a recipe breaks, in the three parts of an error.

    Args:
        field: Dotted path of the field to point at.
        what: What is wrong, with the values seen.
        limit: What the rule asks.
        hint: The exact setting that fixes it.
        reads: The other fields that the rule read.
    """

    field: str
    what: str
    limit: str
    hint: str
    reads: tuple[str, ...] = ()


Allowed = tuple[str, object, bool, str, str]
"""A field with a setting: its path, its value, whether that is possible, the limit, the fix."""


def breaches(
    rules: Iterable[Allowed], *, setting: str, value: object, instead: str = ""
) -> Iterator[Breach]:
    """Yield a breach for each field whose value is not possible with a setting.

    Args:
        rules: The fields.
        setting: Dotted path of the setting.
        value: Its value.
        instead: The setting's value with which all fields are possible; empty if there is none.
    """
    for field, found, is_possible, limit, fix in rules:
        if not is_possible:
            shown = str(found).lower() if isinstance(found, bool) else found
            yield Breach(
                field=field,
                what=f"{field} is {shown} and {setting} is {value}",
                limit=limit,
                hint=f"`{field}: {fix}`" + (f", or `{setting}: {instead}`" if instead else ""),
                reads=(setting,),
            )


EVERY_METHOD = frozenset({"method", "targets", "init_from", "modules_to_save"})
READS = {
    "loha": EVERY_METHOD | {"rank", "alpha"},
    "lokr": EVERY_METHOD | {"rank", "alpha"},
    "ia3": EVERY_METHOD,
    "vera": EVERY_METHOD | {"rank", "dropout"},
    "oft": EVERY_METHOD | {"rank"},
    "miss": EVERY_METHOD | {"rank", "dropout"},
    "hira": EVERY_METHOD | {"rank", "dropout"},
    "prompt": frozenset({"method", "num_virtual_tokens"}),
    "p_tuning": frozenset({"method", "num_virtual_tokens"}),
    "prefix": frozenset({"method", "num_virtual_tokens"}),
    "prefix_mlp": frozenset({"method", "num_virtual_tokens"}),
}
"""Method -> the fields of the section that it reads."""


def broken_dtype_rules(recipe: Settings) -> Iterator[Breach]:
    """Yield what an adapter in bf16 cannot be combined with."""
    adapter = recipe.adapter
    if adapter.dtype != "bfloat16" or adapter.method != "lora":
        return
    rules = (
        (
            "adapter.dora",
            adapter.dora,
            not adapter.dora,
            "a magnitude rounded to bfloat16 is up to 0.2 % from the norm that it starts as",
            "false",
        ),
        (
            "adapter.compute_dtype",
            adapter.compute_dtype,
            adapter.compute_dtype == "auto",
            "peft, which computes in float32, multiplies in the type of A and B",
            "auto",
        ),
        (
            "model.dtype",
            recipe.model.dtype,
            recipe.model.dtype != "float16",
            "a model in float16 is for cards without bfloat16",
            "bfloat16",
        ),
    )
    yield from breaches(rules, setting="adapter.dtype", value="bfloat16", instead="float32")


def broken_method_rules(recipe: Settings) -> Iterator[Breach]:
    """Yield the fields that are set and that the method of the adapter does not read."""
    adapter, default = recipe.adapter, AdapterSection()
    if adapter.method == "lora":
        if adapter.num_virtual_tokens != default.num_virtual_tokens:
            yield Breach(
                field="adapter.num_virtual_tokens",
                what=f"adapter.num_virtual_tokens is {adapter.num_virtual_tokens} and"
                " adapter.method is lora",
                limit="it has no virtual tokens",
                hint="`adapter.method: prompt`, or leave it out",
                reads=("adapter.method",),
            )
        return
    if adapter.is_virtual:
        yield from _broken_virtual_rules(recipe)
    for name in sorted(AdapterSection.model_fields.keys() - READS[adapter.method]):
        value = getattr(adapter, name)
        if value != getattr(default, name):
            yield Breach(
                field=f"adapter.{name}",
                what=f"adapter.{name} is {value} and adapter.method is {adapter.method}",
                limit=f"{adapter.method} reads {', '.join(sorted(READS[adapter.method]))}",
                hint=f"leave `adapter.{name}` out, or `adapter.method: lora`",
                reads=("adapter.method",),
            )
    if recipe.train.compile:
        yield Breach(
            field="train.compile",
            what=f"train.compile is true and adapter.method is {adapter.method}",
            limit="layers are compiled with LoRA alone",
            hint="`train.compile: false`, or `adapter.method: lora`",
            reads=("adapter.method",),
        )
    if isinstance(recipe.offload.mlp_chunk, int) and not adapter.is_virtual:
        yield Breach(
            field="offload.mlp_chunk",
            what=f"offload.mlp_chunk is {recipe.offload.mlp_chunk} and adapter.method is"
            f" {adapter.method}",
            limit="its modules compute on whole weights, which each tile would do again",
            hint="`offload.mlp_chunk: whole`, or `adapter.method: lora`",
            reads=("adapter.method",),
        )


def _broken_virtual_rules(recipe: Settings) -> Iterator[Breach]:
    """Yield what virtual tokens in front of rows cannot be combined with."""
    rules = (
        (
            "objective.method",
            recipe.objective.method,
            recipe.objective.is_sft,
            "rows that are compared, classified or scored by a reference have no virtual tokens",
            "sft",
        ),
        (
            "train.what",
            recipe.train.what,
            not recipe.train.is_full and not recipe.train.is_head_alone,
            "virtual tokens are an adapter",
            "adapter",
        ),
        (
            "data.packing",
            recipe.data.packing,
            recipe.data.packing != "on",
            "the room of a sequence is for rows without virtual tokens",
            "off",
        ),
        (
            "train.neftune_alpha",
            recipe.train.neftune_alpha,
            recipe.train.neftune_alpha is None or not recipe.adapter.num_in_rows,
            "its noise is for embeddings of a row's own tokens",
            "null",
        ),
        (
            "report.samples",
            recipe.report.samples,
            not (recipe.report.samples and recipe.adapter.num_in_rows),
            "prompts are answered without virtual tokens",
            "0",
        ),
    )
    method = recipe.adapter.method
    yield from breaches(rules, setting="adapter.method", value=method, instead="lora")


def broken_embedding_rules(recipe: Settings) -> Iterator[Breach]:
    """Yield what trains with an adapter and is looked up in an embedding on the host."""
    if recipe.offload.embeddings != "host":
        return
    modules = recipe.adapter.modules_to_save
    others = ", ".join(name for name in modules if name != EMBEDDING)
    rules = (
        (
            "adapter.modules_to_save",
            ", ".join(modules),
            EMBEDDING not in modules,
            "an embedding in host memory is frozen",
            f"[{others}]",
        ),
        (
            "adapter.method",
            recipe.adapter.method,
            not recipe.adapter.num_in_rows,
            "virtual tokens train, and the embedding looks them up",
            "lora",
        ),
    )
    yield from breaches(rules, setting="offload.embeddings", value="host", instead="device")


def broken_head_rules(recipe: Settings) -> Iterator[Breach]:
    """Yield what trains with an adapter where the output head is on the host."""
    if recipe.offload.head != "host":
        return
    modules = recipe.adapter.modules_to_save
    others = ", ".join(name for name in modules if name != HEAD)
    on_device = "a head in host memory is frozen"
    named = ", ".join(modules)
    rules = (("adapter.modules_to_save", named, HEAD not in modules, on_device, f"[{others}]"),)
    yield from breaches(rules, setting="offload.head", value="host", instead="device")


_WHAT = ("train.what",)
_ON_DEVICE = {"adamw_bf16": "adamw", "lion_bf16": "lion"}


def broken_frozen_rules(train: TrainSection) -> Iterator[Breach]:
    """Yield what is set for weights of the model where an adapter or a new head trains."""
    if train.optimizer in HOST_ONLY:
        yield Breach(
            field="train.optimizer",
            what=f"train.optimizer is {train.optimizer} and train.what is {train.what}",
            limit="it updates weights of the model in RAM; an adapter's states are few bytes",
            hint=f"`train.optimizer: {_ON_DEVICE[train.optimizer]}`, or `train.what: all`",
            reads=_WHAT,
        )


def broken_full_rules(recipe: Settings) -> Iterator[Breach]:
    """Yield the rules that a recipe breaks in which weights of the model train."""
    what = recipe.train.what if isinstance(recipe.train.what, str) else list(recipe.train.what)
    if not what:
        yield Breach(
            field="train.what",
            what="train.what is an empty list",
            limit="a run trains something",
            hint="`train.what: all`, or patterns of the names of weights",
        )
    none = AdapterSection()
    for name in AdapterSection.model_fields:
        value = getattr(recipe.adapter, name)
        if value != getattr(none, name):
            yield Breach(
                field=f"adapter.{name}",
                what=f"adapter.{name} is {value} and train.what is {what}",
                limit="weights of the model train in place of an adapter, so there is none",
                hint=f"leave `adapter.{name}` out, or `train.what: adapter`",
                reads=_WHAT,
            )
    rules = (
        (
            "offload.codec",
            recipe.offload.codec,
            recipe.offload.codec in ("auto", "native"),
            "weights that train are updated in the form that they compute in",
            "native",
        ),
        (
            "offload.tier",
            recipe.offload.tier,
            recipe.offload.tier != "disk",
            "weights that train are updated in memory: a disk would be written in every step",
            "ram",
        ),
        (
            "train.optimizer",
            recipe.train.optimizer,
            recipe.train.optimizer != "paged_adamw_8bit",
            "states of weights that train are in RAM already",
            "adamw_8bit",
        ),
        (
            "train.compile",
            recipe.train.compile,
            not recipe.train.compile,
            "layers are compiled for frozen weights",
            "false",
        ),
        (
            "model.experts_implementation",
            recipe.model.experts_implementation,
            recipe.model.experts_implementation != "triton",
            "Triton's kernels have no gradients by the experts' own weights",
            "grouped_mm",
        ),
        (
            "model.layer_kernels",
            recipe.model.layer_kernels,
            recipe.model.kernels != "fused",
            "fused norms have no gradients by their weights",
            "plain",
        ),
    )
    yield from breaches(rules, setting="train.what", value=what)


_METHOD = ("objective.method",)
_STEPS = "train.probe_steps"
_OBJECTIVE_WHAT = "train.what"


def broken_objective_rules(recipe: Settings) -> Iterator[Breach]:
    """Yield the rules that a recipe breaks by its objective."""
    objective = recipe.objective
    losses = LOSSES.get(objective.method, ())
    if objective.loss is not None and losses and objective.loss not in losses:
        yield Breach(
            field="objective.loss",
            what=f"objective.loss is {objective.loss} and objective.method is {objective.method}",
            limit=f"the losses of {objective.method} are {', '.join(losses)}",
            hint=f"`objective.loss: {losses[0]}`",
            reads=_METHOD,
        )
        return
    yield from _unread(objective)
    yield from _broken_value_rules(objective)
    yield from _broken_format_rules(recipe)
    if not objective.is_sft:
        yield from _broken_row_rules(recipe)
    yield from _broken_head_rules(recipe)
    yield from broken_probe_rules(recipe)
    if recipe.train.is_head_alone:
        yield from broken_head_alone_rules(recipe)
    if objective.computes_reference and recipe.adapter.init_from is not None:
        hint = "`objective.reference: precomputed`, in one pass before step 1"
        if objective.scores_mismatched:
            hint += ", with `objective.loss: apo_zero_unpaired`"
        elif objective.method == "grpo" and objective.loss != "rloo":
            hint = "`objective.beta: 0`"
        yield Breach(
            field="objective.reference",
            what=f"objective.reference is base and adapter.init_from is {recipe.adapter.init_from}",
            limit="a run that goes on from an adapter is compared with the model as it begins",
            hint=hint,
            reads=("adapter.init_from", *_METHOD),
        )
    if objective.computes_reference and recipe.train.is_full:
        known = "`objective.reference: precomputed`"
        if objective.scores_mismatched:
            known += " with `objective.loss: apo_zero_unpaired`"
        what = recipe.train.what if isinstance(recipe.train.what, str) else list(recipe.train.what)
        yield Breach(
            field="objective.reference",
            what=f"objective.reference is base and train.what is {what}",
            limit="weights of the base train, so without them there is no model to compare with",
            hint=f"{known}, or `train.what: adapter`",
            reads=("train.what", *_METHOD),
        )


def _unread(objective: ObjectiveSection) -> Iterator[Breach]:
    """A setting that is set has an effect."""
    read = read_settings(objective)
    for name in ObjectiveSection.model_fields:
        value = getattr(objective, name)
        if name in read or value is None:
            continue
        reader = f"objective.method is {objective.method}"
        if objective.loss is not None and name != "loss":
            reader += f" and objective.loss is {objective.loss}"
        yield Breach(
            field=f"objective.{name}",
            what=f"objective.{name} is {value} and {reader}",
            limit="it has no effect there",
            hint=f"`objective.method: {_reader(name, value)}`, or leave out `objective.{name}`"
            if objective.is_sft
            else f"leave out `objective.{name}`",
            reads=(*_METHOD, "objective.loss"),
        )


def _reader(name: str, value: object) -> str:
    """Return a method that reads a setting."""
    if name == "loss":
        return next(method for method, losses in LOSSES.items() if value in losses)
    sections = (ObjectiveSection(method=method) for method in get_args(Method))
    return next((s.method for s in sections if name in read_settings(s)), "grpo")


def _broken_value_rules(objective: ObjectiveSection) -> Iterator[Breach]:
    """Values without which a loss is another one, or none."""
    if objective.method not in ("sft", "grpo", "distill", "reward") and objective.beta == 0:
        yield Breach(
            field="objective.beta",
            what=f"objective.beta is {objective.beta} and objective.method is {objective.method}",
            limit="rewards are multiplied by it, so it must be above 0",
            hint="`objective.beta: 0.1`",
            reads=_METHOD,
        )
    if objective.desirable_weight == 0 and objective.undesirable_weight == 0:
        yield Breach(
            field="objective.desirable_weight",
            what="objective.desirable_weight and objective.undesirable_weight are 0.0",
            limit="each answer's loss is multiplied by one of them, so nothing would be learned",
            hint="`objective.desirable_weight: 1.0`",
            reads=("objective.undesirable_weight",),
        )
    if objective.loss in ("robust", "exo_pair") and not objective.label_smoothing:
        yield Breach(
            field="objective.label_smoothing",
            what="objective.label_smoothing is 0.0 and objective.loss is " + objective.loss,
            limit="the loss corrects for pairs labelled the wrong way round, so some must be",
            hint="`objective.label_smoothing: 0.1`, or `objective.loss: sigmoid`",
            reads=("objective.loss",),
        )
    is_per_token = objective.method == "grpo" and objective.loss != "rloo"
    if is_per_token and objective.reference == "precomputed":
        yield Breach(
            field="objective.reference",
            what=f"objective.reference is precomputed and objective.loss is {objective.loss}",
            limit="the KL divergence is of each token, and sums of whole answers are kept",
            hint="`objective.reference: base`, or `objective.loss: rloo`",
            reads=("objective.loss",),
        )
    if objective.scores_mismatched and objective.reference == "precomputed":
        yield Breach(
            field="objective.reference",
            what="objective.reference is precomputed and objective.loss is kto",
            limit="the KL divergence reads prompts with each other's answers, which no row has",
            hint="`objective.reference: base`, or `objective.loss: apo_zero_unpaired`",
            reads=("objective.loss",),
        )
    mode = objective.importance_sampling_mode
    if objective.loss == "rloo" and mode in ("token_truncate", "token_mask"):
        yield Breach(
            field="objective.importance_sampling_mode",
            what=f"objective.importance_sampling_mode is {mode} and objective.loss is rloo",
            limit="its ratio is of whole answers",
            hint=f"`objective.importance_sampling_mode: {mode.replace('token', 'sequence')}`",
            reads=("objective.loss",),
        )


def _broken_format_rules(recipe: Settings) -> Iterator[Breach]:
    """Rows have what the objective reads."""
    objective = recipe.objective
    formats = formats_of(objective)
    of_mix = (("data.mix", one.format) for one in recipe.data.mix)
    for field, value in (("data.format", recipe.data.format), *of_mix):
        if value not in (None, "auto", *formats):
            which = f"objective.method is {objective.method}"
            yield Breach(
                field=field,
                what=f"{field} is {value} and {which}",
                limit=f"it reads rows of the format {' or '.join(formats)}",
                hint="leave the format out" if objective.is_sft else f"`data.format: {formats[0]}`",
                reads=_METHOD,
            )


def _broken_row_rules(recipe: Settings) -> Iterator[Breach]:
    """Settings of rows that are repeated say nothing of rows that are compared."""
    rules = (
        (
            "data.too_long",
            recipe.data.too_long,
            recipe.data.too_long != "split",
            "half an answer cannot be compared",
            "`data.too_long: truncate`, `drop` or `error`",
        ),
        (
            "data.loss_on",
            recipe.data.loss_on,
            recipe.data.loss_on == "assistant",
            "only what answers a prompt is compared",
            "leave it out",
        ),
        (
            "train.neftune_alpha",
            recipe.train.neftune_alpha,
            recipe.train.neftune_alpha is None,
            "log-probabilities that are compared are taken without noise",
            "leave it out",
        ),
        (
            "report.samples",
            recipe.report.samples,
            not recipe.report.samples,
            "samples are scored against the one right answer of a row",
            "leave it out; held-out rows are scored with `output.eval_every`",
        ),
    )
    yield from _impossible(recipe, rules)


def _impossible(recipe: Settings, rules: Iterable[Allowed]) -> Iterator[Breach]:
    """Yield the settings that the objective's method does not allow.

    Args:
        recipe: The settings.
        rules: The fields; each fix is the whole hint.
    """
    for field, value, is_possible, limit, fix in rules:
        if not is_possible:
            yield Breach(
                field=field,
                what=f"{field} is {value} and objective.method is {recipe.objective.method}",
                limit=limit,
                hint=fix,
                reads=_METHOD,
            )


def _broken_head_rules(recipe: Settings) -> Iterator[Breach]:
    """A reward or a class is of a whole row or word, by a head that is trained with the adapter."""
    method, right = recipe.objective.method, recipe.objective.head
    if recipe.model.head != right:
        yield Breach(
            field="model.head",
            what=f"model.head is {recipe.model.head} and objective.method is {method}",
            limit="a reward or a class is the output of a head of its own, and other losses predict"
            " tokens",
            hint=f"leave out `model.head`, or `model.head: {right}`",
            reads=_METHOD,
        )
    if (recipe.model.num_classes is not None) != recipe.objective.is_classification:
        is_needed = recipe.objective.is_classification
        yield Breach(
            field="model.num_classes",
            what=f"model.num_classes is {recipe.model.num_classes or 'null'} and objective.method"
            f" is {method}",
            limit="a head has an output for each class" if is_needed else "it has no classes",
            hint="`model.num_classes: 2`, or as many as there are" if is_needed else "leave it out",
            reads=_METHOD,
        )
    if right == "tokens":
        return
    coefficient = recipe.train.router_loss_coef
    rules = (
        (
            "data.too_long",
            recipe.data.too_long,
            recipe.data.too_long in ("drop", "error"),
            "what is learned is of whole rows",
            "`data.too_long: drop`, or `error`",
        ),
        (
            "train.what",
            recipe.train.what,
            not recipe.train.is_full,
            "the head is saved with an adapter, or alone",
            "`train.what: adapter`, or `head`",
        ),
        (
            "train.router_loss_coef",
            coefficient,
            not coefficient,
            "transformers' classification has no router loss",
            "leave it out",
        ),
    )
    yield from _impossible(recipe, rules)


def broken_probe_rules(recipe: Settings) -> Iterator[Breach]:
    """Yield what a probe cannot be combined with, and its rate where there is none."""
    train = recipe.train
    if train.probe_steps is None:
        if train.probe_lr is not None:
            yield Breach(
                field="train.probe_lr",
                what=f"train.probe_lr is {train.probe_lr} and {_STEPS} is null",
                limit="it is the learning rate of these steps",
                hint=f"`{_STEPS}: 200`, or leave `train.probe_lr` out",
                reads=(_STEPS,),
            )
        return
    rules = (
        (
            "objective.method",
            recipe.objective.method,
            recipe.objective.head != "tokens",
            "a probe trains a new head, of classes or rewards; the head that predicts tokens is"
            " trained already",
            "classify",
        ),
        (
            "adapter.init_from",
            recipe.adapter.init_from,
            recipe.adapter.init_from is None,
            "the head of an adapter that is trained further is no new one",
            "null",
        ),
    )
    yield from breaches(rules, setting=_STEPS, value=train.probe_steps, instead="null")


def broken_head_alone_rules(recipe: Settings) -> Iterator[Breach]:
    """Yield what a head that trains alone cannot be combined with."""
    rules = (
        (
            "objective.method",
            recipe.objective.method,
            recipe.objective.head != "tokens",
            "a new head trains alone, of classes or rewards; the head that predicts tokens is"
            " trained already",
            "classify",
        ),
        (
            "train.probe_steps",
            recipe.train.probe_steps,
            recipe.train.probe_steps is None,
            "all steps are of the head alone",
            "null",
        ),
        (
            "train.gradient_checkpointing",
            recipe.train.gradient_checkpointing,
            recipe.train.gradient_checkpointing == "auto",
            "no step goes back through the layers",
            "auto",
        ),
        (
            "offload.kept_graphs",
            recipe.offload.kept_graphs,
            recipe.offload.kept_graphs in ("auto", 0),
            "no step goes back through the layers",
            "auto",
        ),
    )
    yield from breaches(rules, setting=_OBJECTIVE_WHAT, value="head", instead="adapter")
    alone = AdapterSection(targets=(), modules_to_save=(SCORE,))
    for name in AdapterSection.model_fields:
        value = getattr(recipe.adapter, name)
        if recipe.objective.head != "tokens" and value != getattr(alone, name):
            yield Breach(
                field=f"adapter.{name}",
                what=f"adapter.{name} is {value} and train.what is head",
                limit="the head trains alone, so there is no adapter",
                hint=f"leave `adapter.{name}` out, or `train.what: adapter`",
                reads=(_OBJECTIVE_WHAT,),
            )


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
    for breach in breaches(_of_sharded(recipe), setting="train.parallel", value="fsdp2"):
        yield replace(breach, hint=f"{breach.hint}, or {streamed_instead(recipe.train)}")


def streamed_instead(train: TrainSection) -> str:
    """Return the setting that streams the model in place of sharding it, for hints."""
    return "`train.parallel: stream`" + (" with one process" if train.is_full else "")


def _of_sharded(recipe: Settings) -> Iterator[Allowed]:
    """Yield what is trained and how, where weights are, and what is written."""
    model, adapter, train, objective = recipe.model, recipe.adapter, recipe.train, recipe.objective
    offload, none = recipe.offload, OffloadSection()
    yield from (
        (
            "objective.method",
            objective.method,
            objective.is_sft,
            "a loss that compares rows needs all of a step's at once, and here each micro-batch"
            " passes through the model by itself",
            "sft",
        ),
        (
            "data.packing",
            recipe.data.packing,
            recipe.data.packing != "on",
            "packed rows are kept apart layer by layer, as they are streamed",
            "off",
        ),
        (
            "model.dtype",
            model.dtype,
            model.dtype != "float16",
            "the loss is not scaled, and gradients would vanish",
            "bfloat16",
        ),
        (
            "adapter.method",
            adapter.method,
            adapter.method == "lora",
            "only LoRA is known to give what it gives when layers are streamed",
            "lora",
        ),
        (
            "train.gradient_checkpointing",
            train.gradient_checkpointing,
            train.gradient_checkpointing is not False,
            "each layer is checkpointed: its backward gathers it again, and computes it again",
            "true",
        ),
        (
            "adapter.dora",
            adapter.dora,
            not adapter.dora,
            "only LoRA is known to give what it gives when layers are streamed",
            "false",
        ),
        (
            "adapter.experts",
            adapter.experts,
            not adapter.experts,
            "adapters of experts are computed as layers are streamed",
            "false",
        ),
        (
            "adapter.dtype",
            adapter.dtype,
            adapter.dtype == "float32",
            "each process would round its part of a tensor by itself",
            "float32",
        ),
        (
            "adapter.modules_to_save",
            ", ".join(adapter.modules_to_save),
            not adapter.modules_to_save,
            "modules that train whole have another type than adapters, and are added up apart",
            "[]",
        ),
        (
            "train.optimizer",
            train.optimizer,
            train.optimizer in OPTIMIZERS,
            "each process updates its part of a tensor, element by element: "
            + " or ".join(OPTIMIZERS),
            "adamw",
        ),
        (
            "train.shares",
            train.shares,
            isinstance(train.shares, str),
            "all processes gather each layer together, for equal numbers of micro-batches",
            "equal",
        ),
        (
            "train.reduce_dtype",
            train.reduce_dtype,
            train.reduce_dtype == "fp32",
            "gradients are added up in fp32",
            "fp32",
        ),
        (
            "train.compile",
            train.compile,
            not train.compile,
            "layers that are gathered have not been compiled",
            "false",
        ),
        (
            "train.router_loss_coef",
            train.router_loss_coef,
            not train.router_loss_coef,
            "a router loss counts the tokens of the whole step",
            "0",
        ),
        (
            "model.layer_kernels",
            model.layer_kernels,
            model.kernels != "fused",
            "layers are computed by the model's own code",
            "plain",
        ),
        (
            "model.experts_implementation",
            model.experts_implementation,
            model.experts_implementation != "triton",
            "layers are computed by the model's own code",
            "grouped_mm",
        ),
        (
            "offload.codec",
            offload.codec,
            offload.codec in ("auto", "native"),
            "parts of layers are gathered in the form that they compute in",
            "native",
        ),
        (
            "offload.tier",
            offload.tier,
            offload.tier != "disk",
            "each process holds its part of all layers, and no layer waits",
            "auto",
        ),
        (
            "output.best_checkpoint",
            recipe.output.best_checkpoint,
            recipe.output.best_checkpoint != "use",
            "the result is taken from the processes' parts as they are after the last step",
            "keep",
        ),
        (
            "report.samples",
            recipe.report.samples,
            not recipe.report.samples,
            "answers are generated by one process, and it has a part of the model only",
            "0",
        ),
    )
    for names, limit in (
        (_OF_SLOTS, "nothing is streamed: each process holds its part of all layers"),
        (_OF_CHUNKS, "each micro-batch passes through the model's own head and MLPs whole"),
    ):
        for name in names:
            value, default = getattr(offload, name), getattr(none, name)
            yield f"offload.{name}", value, value == default, limit, default


# Pairs of which at most one field may be set. One set on the command line replaces the other one
# that a recipe file sets.
RIVALS = (
    ("train.grad_accum_steps", "train.tokens_per_step"),
    ("train.steps", "train.epochs"),
    ("data.path", "data.mix"),
    ("data.eval_path", "data.eval_frac"),
    ("train.warmup_steps", "train.warmup_ratio"),
)

# What may be trained whole whatever the codec: these are on the device as published.
NEVER_ENCODED = ("norms", "router", "embed_tokens", "lm_head", "score")


def broken_rules(recipe: Settings) -> Iterator[Breach]:
    """Yield every rule between fields that the recipe breaks."""
    yield from _broken_model_rules(recipe.model)
    yield from _broken_adapter_rules(recipe)
    yield from broken_method_rules(recipe)
    yield from broken_dtype_rules(recipe)
    yield from _broken_source_rules(recipe.data)
    yield from _broken_data_rules(recipe.data)
    yield from _broken_train_rules(recipe.train)
    yield from _broken_schedule_rules(recipe.train)
    yield from _broken_eval_rules(recipe)
    yield from _broken_best_rules(recipe)
    if recipe.train.steps is not None:
        yield from broken_length_rules(recipe, num_steps=recipe.train.steps)
    yield from _broken_device_rules(recipe)
    yield from broken_embedding_rules(recipe)
    yield from broken_head_rules(recipe)
    if recipe.train.is_full:
        yield from broken_full_rules(recipe)
    else:
        yield from broken_frozen_rules(recipe.train)
    if recipe.train.is_sharded:
        yield from broken_sharded_rules(recipe)
    yield from broken_objective_rules(recipe)
    if recipe.report.currency is not None and recipe.report.price_per_kwh is None:
        yield Breach(
            field="report.currency",
            what=f"report.currency is {recipe.report.currency} and there is no price",
            limit="the currency is that of report.price_per_kwh",
            hint="`report.price_per_kwh: 0.32`, or leave `report.currency` out",
            reads=("report.price_per_kwh",),
        )
    prompts = (recipe.data.system, *(one.system for one in recipe.data.mix))
    if recipe.output.card_system and not any(prompts):
        yield Breach(
            field="output.card_system",
            what="output.card_system is true and there is no system prompt",
            limit="the prompts are those of data.system and of the sources in data.mix",
            hint="leave `output.card_system` out",
            reads=("data.system", "data.mix"),
        )
    checkpointing, kept = recipe.train.gradient_checkpointing, recipe.offload.kept_graphs
    if checkpointing != "auto" and kept != "auto":
        yield Breach(
            field="offload.kept_graphs",
            what=f"offload.kept_graphs is {kept} and train.gradient_checkpointing is"
            f" {str(checkpointing).lower()}",
            limit="one of them says which layers keep their graph",
            hint="`offload.kept_graphs: auto`, or `train.gradient_checkpointing: auto`",
            reads=("train.gradient_checkpointing",),
        )
    if recipe.data.packing == "on" and recipe.train.compile:
        yield Breach(
            field="data.packing",
            what="data.packing is on and train.compile is true",
            limit="a compiled layer cannot compute the attention of packed rows one by one",
            hint="`data.packing: auto`, or `train.compile: false`",
            reads=("train.compile",),
        )
    if recipe.train.compile and isinstance(recipe.offload.mlp_chunk, int):
        yield Breach(
            field="offload.mlp_chunk",
            what=f"offload.mlp_chunk is {recipe.offload.mlp_chunk} and train.compile is true",
            limit="compiled layers compute all tokens of a micro-batch at once",
            hint="`offload.mlp_chunk: whole`, or `train.compile: false`",
            reads=("train.compile",),
        )


def _broken_model_rules(model: ModelSection) -> Iterator[Breach]:
    """One source of the model: a path, or a config with random weights."""
    if model.path is None and model.config is None:
        yield Breach(
            field="model",
            what="neither model.path nor model.config is set",
            limit="a run needs one of them",
            hint="`model.path: Qwen/Qwen3-0.6B`",
        )
    if model.path is not None and model.config is not None:
        yield Breach(
            field="model.config",
            what=f"model.config is {model.config} and model.path is {model.path}",
            limit="only one of them may be set, for each names a model",
            hint="`model.config: null` keeps the path",
            reads=("model.path",),
        )
    if model.config is not None and model.path is None and model.init == "pretrained":
        yield Breach(
            field="model.config",
            what=f"model.config is {model.config} and model.init is pretrained",
            limit="a config has no weights, so they can only be random",
            hint="`model.init: random`, or `model.path` in place of `model.config`",
            reads=("model.init",),
        )


def _broken_adapter_rules(recipe: Settings) -> Iterator[Breach]:
    """An adapter has something to train, each part of it in one way."""
    adapter = recipe.adapter
    if not adapter.targets and not adapter.experts and not recipe.train.is_head_alone:
        yield Breach(
            field="adapter.targets",
            what="adapter.targets is empty and adapter.experts is false",
            limit="an adapter needs at least one target",
            hint="`adapter.targets: all-linear`",
            reads=("adapter.experts",),
        )
    if adapter.dora and adapter.experts:
        yield Breach(
            field="adapter.dora",
            what="adapter.dora is true and adapter.experts is true",
            limit="DoRA is for linear layers, and one adapter has it everywhere or nowhere",
            hint="`adapter.dora: false`, or `adapter.experts: false`",
            reads=("adapter.experts",),
        )
    twice = [name for name in adapter.modules_to_save if name in adapter.targets]
    if not isinstance(adapter.targets, str) and twice:
        left = [name for name in adapter.targets if name not in twice]
        yield Breach(
            field="adapter.modules_to_save",
            what=f"adapter.modules_to_save and adapter.targets both name {', '.join(twice)}",
            limit="a module is trained whole or has an adapter",
            hint=f"`adapter.targets: [{', '.join(left)}]`",
            reads=("adapter.targets",),
        )
    yield from _broken_codec_rules(recipe)


def _broken_codec_rules(recipe: Settings) -> Iterator[Breach]:
    """A codec supports the weights, and a trainable copy starts from weights as published."""
    adapter, codec = recipe.adapter, recipe.offload.codec
    if codec in ("auto", "native"):
        return
    if codec == "bf16_packed" and recipe.model.dtype != "bfloat16":
        yield Breach(
            field="offload.codec",
            what=f"offload.codec is {codec} and model.dtype is {recipe.model.dtype}",
            limit="it packs bfloat16 weights, without loss",
            hint="`model.dtype: bfloat16`, or `offload.codec: native`",
            reads=("model.dtype",),
        )
    if codec in ("bf16", "fp16") and recipe.model.dtype == "float16":
        yield Breach(
            field="offload.codec",
            what=f"offload.codec is {codec} and model.dtype is float16",
            limit="weights of 16 bits take as many bytes in it",
            hint="`offload.codec: native`, or `int8`, `fp8` or `nf4`",
            reads=("model.dtype",),
        )
    encoded = [name for name in adapter.modules_to_save if name not in NEVER_ENCODED]
    if encoded:
        yield Breach(
            field="adapter.modules_to_save",
            what=f"adapter.modules_to_save is {', '.join(encoded)} and offload.codec is {codec}",
            limit="what is trained whole starts from published weights, and these lie encoded",
            hint="`offload.codec: native`, or leave it out",
            reads=("offload.codec",),
        )


def _broken_source_rules(data: DataSection) -> Iterator[Breach]:
    """One path or a mix, columns that the format has, and settings that documents have."""
    if (data.path is None) == (not data.mix):
        is_both = data.path is not None
        yield Breach(
            field="data.mix" if is_both else "data",
            what=f"data.path is {data.path} and data.mix is set too"
            if is_both
            else "neither data.path nor data.mix is set",
            limit="exactly one of them must be",
            hint="make the path an entry of `data.mix`"
            if is_both
            else "`data.path: data/train.jsonl`, a hub id, or `data.mix` with a list of them",
            reads=("data.path",),
        )
    known = {name for columns in FORMAT_COLUMNS.get(data.format, ()) for name in columns}
    for column in data.columns:
        if data.format != "auto" and column not in known:
            yield Breach(
                field="data.columns",
                what=f"data.columns names {column} and data.format is {data.format}",
                limit=f"the columns of {data.format} are {', '.join(sorted(known))}",
                hint=f"leave {column} out of `data.columns`, or `data.format: auto`",
                reads=("data.format",),
            )
    for name in data.set_for_turns if data.format == "text" else ():
        yield Breach(
            field=f"data.{name}",
            what=f"data.{name} is {getattr(data, name)} and data.format is text",
            limit="documents have no turns, are joined and cut, and all of them is learned",
            hint=f"leave out `data.{name}`",
            reads=("data.format",),
        )


def _broken_data_rules(data: DataSection) -> Iterator[Breach]:
    """One held-out part."""
    if data.eval_path is not None and data.eval_frac is not None:
        yield Breach(
            field="data.eval_frac",
            what=f"data.eval_frac is {data.eval_frac} and data.eval_path is {data.eval_path}",
            limit="only one of them may be set",
            hint="`data.eval_frac: null`",
            reads=("data.eval_path",),
        )
    paths = [source.path for source in data.mix]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if data.eval_frac is not None and twice is not None:
        yield Breach(
            field="data.eval_frac",
            what=f"data.eval_frac is {data.eval_frac} and data.mix names {twice} twice",
            limit="a row that is held out of one source would be trained in the other",
            hint="name it once with the sum of the weights, or hold out a file by `data.eval_path`",
            reads=("data.mix",),
        )


def _broken_train_rules(train: TrainSection) -> Iterator[Breach]:
    """One size of the step, and one length of the run."""
    if (train.grad_accum_steps is None) == (train.tokens_per_step is None):
        yield _not_exactly_one(
            ("train.grad_accum_steps", train.grad_accum_steps, 8),
            ("train.tokens_per_step", train.tokens_per_step, 8 * _micro_tokens(train)),
        )
    elif train.tokens_per_step is not None:
        yield from _broken_tokens_rule(train, train.tokens_per_step)
    elif train.micro_batch_size == "auto":
        yield Breach(
            field="train.micro_batch_size",
            what="train.micro_batch_size is auto and train.grad_accum_steps is"
            f" {train.grad_accum_steps}",
            limit="how many sequences a step has must be known to cut it into micro-batches",
            hint=f"`train.tokens_per_step: {8 * train.seq_len}` in place of"
            " `train.grad_accum_steps`, or `train.micro_batch_size: 1`",
            reads=("train.grad_accum_steps",),
        )
    if (train.steps is None) == (train.epochs is None):
        yield _not_exactly_one(("train.steps", train.steps, 500), ("train.epochs", train.epochs, 1))


def _broken_schedule_rules(train: TrainSection) -> Iterator[Breach]:
    """A warm-up that ends within the run, and a schedule that has room to fall."""
    if train.warmup_ratio is not None and train.warmup_steps:
        yield Breach(
            field="train.warmup_ratio",
            what=f"train.warmup_ratio is {train.warmup_ratio} and train.warmup_steps is"
            f" {train.warmup_steps}",
            limit="only one of them may be set",
            hint="`train.warmup_ratio: null`, or leave out `train.warmup_steps`",
            reads=("train.warmup_steps",),
        )
    if (train.num_cycles is None) == (train.schedule == "cosine_with_restarts"):
        seen, hint = "not set", "`train.num_cycles: 4`, or `train.schedule: cosine`"
        if train.num_cycles is not None:
            seen = str(train.num_cycles)
            hint = "`train.schedule: cosine_with_restarts`, or `train.num_cycles: null`"
        yield Breach(
            field="train.num_cycles",
            what=f"train.num_cycles is {seen} and train.schedule is {train.schedule}",
            limit="cosine_with_restarts falls so many times, and no other schedule reads it",
            hint=hint,
            reads=("train.schedule",),
        )


def broken_length_rules(recipe: Settings, *, num_steps: int) -> Iterator[Breach]:
    """Yield the broken rules that depend on the number of steps; epochs give it from the rows."""
    yield from _broken_rate_rules(recipe.train, num_steps=num_steps)
    yield from _broken_evaluation_rules(recipe, num_steps=num_steps)
    profile = recipe.report.profile
    if profile is not None and profile > num_steps:
        yield Breach(
            field="report.profile",
            what=f"report.profile is {profile} and {_length(recipe.train, num_steps)}",
            limit=f"the recorded step must be one of 1 to {num_steps}",
            hint=f"`report.profile: {min(3, num_steps)}`",
            reads=("train.steps",),
        )


def _broken_rate_rules(train: TrainSection, *, num_steps: int) -> Iterator[Breach]:
    """The learning rate rises and falls within the run."""
    steps = _length(train, num_steps)
    num_warmup_steps = train.num_warmup_steps(num_steps)
    if num_warmup_steps >= num_steps:
        name = "warmup_steps" if train.warmup_ratio is None else "warmup_ratio"
        value, fix = str(train.warmup_steps), str(num_steps // 20)
        if train.warmup_ratio is not None:
            value, fix = str(train.warmup_ratio), "0.05" if num_steps > 1 else "null"
        yield Breach(
            field=f"train.{name}",
            what=f"train.{name} is {value} and {steps}",
            limit=f"the warm-up has to end within the run: at most {num_steps - 1} steps",
            hint=f"`train.{name}: {fix}`",
            reads=("train.steps",),
        )
    elif train.num_cycles is not None and num_steps - num_warmup_steps < 2 * train.num_cycles:
        num_falling = num_steps - num_warmup_steps
        yield Breach(
            field="train.num_cycles",
            what=f"train.num_cycles is {train.num_cycles} and {num_falling} steps follow the"
            f" warm-up, as {steps}",
            limit="each cycle needs two steps, or the learning rate never falls in it",
            hint=f"`train.num_cycles: {num_falling // 2}`"
            if num_falling >= 4
            else "`train.schedule: cosine`, without `train.num_cycles`",
            reads=("train.steps", "train.warmup_steps", "train.warmup_ratio"),
        )


def _broken_tokens_rule(train: TrainSection, tokens_per_step: int) -> Iterator[Breach]:
    """A step is a whole number of micro-batches."""
    unit = _micro_tokens(train)
    if tokens_per_step > MAX_MICRO_BATCHES * unit:
        yield Breach(
            field="train.tokens_per_step",
            what=f"train.tokens_per_step is {tokens_per_step}",
            limit=f"a step can have {MAX_MICRO_BATCHES:,} micro-batches, and one has {unit} tokens",
            hint=f"`train.tokens_per_step: {8 * unit}`",
            reads=("train.micro_batch_size", "train.seq_len"),
        )
        return
    if tokens_per_step % unit == 0:
        return
    below = tokens_per_step // unit * unit
    nearest = [str(tokens) for tokens in (below, below + unit) if tokens > 0]
    yield Breach(
        field="train.tokens_per_step",
        what=f"train.tokens_per_step is {tokens_per_step}",
        limit=(
            f"it must be a multiple of {unit} (seq_len)"
            if train.micro_batch_size == "auto"
            else f"it must be a multiple of {unit}"
            f" (micro_batch_size {train.micro_batch_size} x seq_len {train.seq_len})"
        ),
        hint=" or ".join(f"`train.tokens_per_step: {tokens}`" for tokens in nearest),
        reads=("train.micro_batch_size", "train.seq_len"),
    )


def _broken_eval_rules(recipe: Settings) -> Iterator[Breach]:
    """Settings that read held-out rows need some."""
    if recipe.data.has_eval:
        return
    readers = {
        "output.eval_every": recipe.output.eval_every,
        "report.samples": recipe.report.samples,
    }
    for field, value in readers.items():
        if value:
            yield Breach(
                field=field,
                what=f"{field} is {value} and no rows are held out",
                limit="it needs data.eval_path or data.eval_frac",
                hint="`data.eval_frac: 0.05`",
                reads=("data.eval_path", "data.eval_frac"),
            )


def _broken_best_rules(recipe: Settings) -> Iterator[Breach]:
    """Settings that compare held-out losses need them measured, and a checkpoint of the best."""
    train, output = recipe.train, recipe.output
    readers = {
        "output.best_checkpoint": output.best_checkpoint,
        "train.early_stopping_patience": train.early_stopping_patience,
    }
    for field, value in readers.items():
        if value and output.eval_every is None:
            yield Breach(
                field=field,
                what=f"{field} is {value} and output.eval_every is not set",
                limit="losses on held-out rows are compared, and none is taken",
                hint="`output.eval_every: 50`",
                reads=("output.eval_every",),
            )
    if train.early_stopping_min_delta and train.early_stopping_patience is None:
        yield Breach(
            field="train.early_stopping_min_delta",
            what=f"train.early_stopping_min_delta is {train.early_stopping_min_delta} and"
            " train.early_stopping_patience is not set",
            limit="only early stopping reads it",
            hint="`train.early_stopping_patience: 3`",
            reads=("train.early_stopping_patience",),
        )


def _broken_evaluation_rules(recipe: Settings, *, num_steps: int) -> Iterator[Breach]:
    """A run measures as many held-out losses as are compared."""
    every, patience = recipe.output.eval_every, recipe.train.early_stopping_patience
    steps = _length(recipe.train, num_steps)
    if every is None:
        return
    best = recipe.output.best_checkpoint
    if best is not None and every > num_steps:
        yield Breach(
            field="output.best_checkpoint",
            what=f"output.best_checkpoint is {best}, output.eval_every is {every} and {steps}",
            limit="there is no best step where no loss on held-out rows is taken",
            hint=f"`output.eval_every: {max(1, num_steps // 10)}`",
            reads=("output.eval_every", "train.steps"),
        )
    if patience is not None and every * (patience + 1) >= num_steps:
        fix = (num_steps - 1) // (patience + 1)
        yield Breach(
            field="train.early_stopping_patience",
            what=f"train.early_stopping_patience is {patience}, output.eval_every is {every} and"
            f" {steps}",
            limit=f"the run could stop early after step {every * (patience + 1)} at the soonest",
            hint=f"`output.eval_every: {fix}` or less"
            if fix
            else "`train.early_stopping_patience: null`",
            reads=("output.eval_every", "train.steps"),
        )


def _length(train: TrainSection, num_steps: int) -> str:
    """Describe how long a run is, by its setting if there is one."""
    if train.steps is not None:
        return f"train.steps is {num_steps}"
    return f"train.epochs: {train.epochs} are {num_steps} steps"


def _broken_fused_rules(recipe: Settings) -> Iterator[Breach]:
    """Fused operators run on CUDA, and take the place of what torch would compile."""
    if recipe.offload.device == "cpu":
        yield Breach(
            field="model.layer_kernels",
            what="model.layer_kernels is fused and offload.device is cpu",
            limit="fused operators are Triton's, which run on CUDA",
            hint="`model.layer_kernels: auto`",
            reads=("offload.device",),
        )
    if recipe.train.compile:
        yield Breach(
            field="model.layer_kernels",
            what="model.layer_kernels is fused and train.compile is true",
            limit="compiled layers have their norms, rotations and gates fused by torch",
            hint="`model.layer_kernels: auto`, or `train.compile: false`",
            reads=("train.compile",),
        )


def _broken_device_rules(recipe: Settings) -> Iterator[Breach]:
    """A file of weights is made from published ones; Triton computes on CUDA."""
    if recipe.model.experts_implementation == "triton" and recipe.offload.device == "cpu":
        yield Breach(
            field="model.experts_implementation",
            what="model.experts_implementation is triton and offload.device is cpu",
            limit="Triton's kernels run on CUDA",
            hint="`model.experts_implementation: auto`",
            reads=("offload.device",),
        )
    if recipe.model.kernels == "fused":
        yield from _broken_fused_rules(recipe)
    if recipe.train.optimizer == "paged_adamw_8bit" and recipe.offload.device == "cpu":
        yield Breach(
            field="train.optimizer",
            what="train.optimizer is paged_adamw_8bit and offload.device is cpu",
            limit="states are paged between a CUDA device and the host",
            hint="`train.optimizer: adamw_8bit`",
            reads=("offload.device",),
        )
    if recipe.offload.tier == "disk" and recipe.model.init == "random":
        yield Breach(
            field="offload.tier",
            what="offload.tier is disk and model.init is random",
            limit="the disk tier keeps published weights, and random ones are made in memory",
            hint="`offload.tier: ram`, or `model.init: pretrained`",
            reads=("model.init",),
        )


def _not_exactly_one(
    first: tuple[str, float | None, int], second: tuple[str, float | None, int]
) -> Breach:
    """Describe a pair of settings of which both or neither is set, with values to suggest."""
    (a, a_value, a_example), (b, b_value, b_example) = first, second
    if a_value is None:
        return Breach(
            field=a.partition(".")[0],
            what=f"neither {a} nor {b} is set",
            limit="exactly one of them must be",
            hint=f"`{a}: {a_example}` or `{b}: {b_example}`",
        )
    return Breach(
        field=b,
        what=f"{b} is {b_value} and {a} is {a_value}",
        limit="exactly one of them must be set",
        hint=f"`{b}: null` or `{a}: null`",
        reads=(a,),
    )


def _micro_tokens(train: TrainSection) -> int:
    """Tokens of one micro-batch of full sequences; if the size is open, of the smallest."""
    return (1 if train.micro_batch_size == "auto" else train.micro_batch_size) * train.seq_len
