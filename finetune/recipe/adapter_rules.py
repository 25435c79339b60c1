"""Rules for adapters in bf16, of other methods than LoRA, and where embedding and head may wait."""

from collections.abc import Iterator

from finetune.recipe.breach import Breach, breaches
from finetune.recipe.sections import AdapterSection, Settings
from offload.plan.facts.trainable import EMBEDDING, HEAD

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
