"""Rules of the objective: settings that its method reads, and what it cannot be combined with."""

from collections.abc import Iterable, Iterator
from typing import get_args

from finetune.recipe.breach import Allowed, Breach, breaches
from finetune.recipe.objective_section import (
    LOSSES,
    Method,
    ObjectiveSection,
    formats_of,
    read_settings,
)
from finetune.recipe.sections import AdapterSection, Settings
from offload.plan.facts.trainable import SCORE

_METHOD = ("objective.method",)
_STEPS = "train.probe_steps"
_WHAT = "train.what"


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
    yield from breaches(_possible(recipe), setting=_STEPS, value=train.probe_steps, instead="null")


def _possible(recipe: Settings) -> Iterator[Allowed]:
    """Yield field, value, whether a probe is possible with it, the limit, and the fix."""
    yield (
        "objective.method",
        recipe.objective.method,
        recipe.objective.head != "tokens",
        "a probe trains a new head, of classes or rewards; the head that predicts tokens is trained"
        " already",
        "classify",
    )
    yield (
        "adapter.init_from",
        recipe.adapter.init_from,
        recipe.adapter.init_from is None,
        "the head of an adapter that is trained further is no new one",
        "null",
    )


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
    yield from breaches(rules, setting=_WHAT, value="head", instead="adapter")
    alone = AdapterSection(targets=(), modules_to_save=(SCORE,))
    for name in AdapterSection.model_fields:
        value = getattr(recipe.adapter, name)
        if recipe.objective.head != "tokens" and value != getattr(alone, name):
            yield Breach(
                field=f"adapter.{name}",
                what=f"adapter.{name} is {value} and train.what is head",
                limit="the head trains alone, so there is no adapter",
                hint=f"leave `adapter.{name}` out, or `train.what: adapter`",
                reads=(_WHAT,),
            )
