"""Rules for recipes that train the model's own weights: what cannot be combined with it."""

from collections.abc import Iterator

from finetune.recipe.breach import Breach, breaches
from finetune.recipe.sections import AdapterSection, Settings, TrainSection
from offload.plan.facts.optimizer import HOST_ONLY

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
