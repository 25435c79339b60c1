"""The subject of `plan` and `fit`: a recipe, or a model with its own settings.

A model is a shipped shape, a config.json, a model directory or a hub id. It is planned as published
weights with the defaults of a recipe, in steps of 16,384 tokens; no shipped recipe is involved.
Its step is cut to whole sequences, and both the requested and the planned size are reported.
"""

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from finetune.errors import ConfigError
from finetune.files.atomic import expanded
from finetune.model.config import has_weights
from finetune.planning.candidates import full_requests
from finetune.planning.request import ASSUMED_IMAGE_TOKENS, facts_of
from finetune.recipe.capabilities import IMAGES, RIVALS, require_images_allowed
from finetune.recipe.draft import Draft, Place, apply_overrides
from finetune.recipe.load import (
    find_shape,
    load_recipe,
    named_shape,
    plain_name,
    published_ids,
    recipe_from,
    shape_of_id,
    shipped_shapes,
)
from finetune.recipe.recipe import Recipe, shipped_recipes, whole_units, with_settings
from finetune.recipe.sections import ModelSection
from offload.plan.facts.facts import ModelFacts
from offload.plan.facts.images import Images
from offload.plan.request import PlanRequest, with_images

TOKENS_PER_STEP = 16_384
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TRAINED_OR_FORMED = re.compile(
    r"(-(instruct|it|base|thinking|chat|\d{4}|unsloth|bnb|[48]bit|bf16|fp8|dynamic|mlx|gptq|awq|int[48]"
    r"|nvfp4|mxfp4|gguf))+$",
    re.IGNORECASE,
)
NO_ROWS = "rows.jsonl"  # a recipe names some; a plan reads none


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """What is planned."""

    name: str  # the model, as it was asked for
    recipe: Recipe  # with all of its settings
    facts: ModelFacts  # the facts of the model
    notes: tuple[str, ...] = ()  # what differs from what was asked
    num_ranks: int = 1  # processes that share a step, each with a device of its own

    def requests(self, recipe: Recipe | None = None) -> list[PlanRequest]:
        """Return what a plan may choose from; of another recipe for the same model, if given."""
        return full_requests(recipe or self.recipe, self.facts, num_ranks=self.num_ranks)


def with_image_tokens(subject: Subject) -> Subject:
    """Return the same for rows with images, whose tokens are assumed if the recipe says nothing.

    Raises:
        ConfigError: The recipe cannot have such rows.
    """
    require_images_allowed(subject.recipe)
    if subject.recipe.image.max_tokens is not None:
        return subject
    recipe = with_settings(subject.recipe, {IMAGES: ASSUMED_IMAGE_TOKENS})
    note = f"images are assumed to have {ASSUMED_IMAGE_TOKENS:,} tokens: `{IMAGES}=512`, say"
    return replace(subject, recipe=recipe, notes=(*subject.notes, note))


def with_num_images(
    requests: Sequence[PlanRequest], recipe: Recipe, num_images: int
) -> list[PlanRequest]:
    """Return requests for rows with so many distinct images, of the most tokens of the recipe."""
    most = recipe.image.max_tokens
    assert most is not None, "of `with_image_tokens`"
    images = Images(num_images=num_images, most_tokens=most)
    return [with_images(request, images) for request in requests]


def subject_of(
    name: str, overrides: Sequence[str], *, note: Callable[[str], object] = lambda _text: None
) -> Subject:
    """Return what a name means: a recipe, or a model.

    Args:
        name: A recipe, a shipped shape, a config.json, a model directory or a hub id.
        overrides: Settings over the recipe's, or over those of a model.
        note: Reports what takes time.

    Raises:
        ConfigError: It is none of these, or a setting is wrong.
    """
    if is_model(name):
        return model_subject(name, overrides, note=note)
    known = [*shipped_shapes(), *shipped_recipes()]
    near = [one for one in known if plain_name(one).startswith(plain_name(name))]
    near = near or difflib.get_close_matches(name.lower(), known, n=3)
    is_file = expanded(name).exists() or expanded(name).suffix in (".yaml", ".yml")
    if near and name not in shipped_recipes() and not is_file:
        raise ConfigError(
            f"there is no model and no recipe {name}",
            limit="a model is a shipped shape, a config.json, a directory or a hub id, and a recipe"
            " a file or a shipped one",
            hint=f"`{near[0]}`" if len(near) == 1 else f"one of {', '.join(near)}",
        )
    recipe = load_recipe(name, overrides, check_files=False)
    return Subject(name=name, recipe=recipe, facts=facts_of(recipe.model, note=note))


def is_model(name: str) -> bool:
    """Return whether a name means a model and not a recipe."""
    path = expanded(name)
    if name in shipped_shapes() or path.suffix == ".json" or (path / "config.json").is_file():
        return True
    if path.exists() or path.suffix in (".yaml", ".yml") or name in shipped_recipes():
        return False
    return HUB_ID.fullmatch(name) is not None or _is_cached(name)


def model_subject(
    name: str, overrides: Sequence[str], *, note: Callable[[str], object] = lambda _text: None
) -> Subject:
    """Return a model with the defaults of a recipe, in sequences that it was made for.

    Raises:
        ConfigError: There is no such model, or a setting is wrong.
    """
    path, source_notes = _source(name)
    recipe, notes = _recipe(path, overrides, name=name)
    facts = facts_of(recipe.model, note=note)
    is_asked = any(text.startswith("train.seq_len=") for text in overrides)
    if not is_asked and facts.max_position_embeddings < recipe.train.seq_len:
        shorter = f"train.seq_len={facts.max_position_embeddings}"
        recipe, notes = _recipe(path, [shorter, *overrides], name=name)
    return Subject(name=name, recipe=recipe, facts=facts, notes=(*source_notes, *notes))


def model_facts(name: str) -> ModelFacts:
    """Return the facts of a model: a shipped shape, a config.json, a directory or a hub id.

    Facts of a shipped shape need no torch; any other model is built, without its weights.

    Raises:
        ConfigError: There is no such model.
        ModelError: transformers builds no causal language model from its config.
        UnsupportedModelError: It cannot be trained layer by layer.
    """
    return model_subject(name, ()).facts


def _is_cached(name: str) -> bool:
    """Return whether the hub's cache has the config of a model."""
    from finetune.hub.repository import cached_file

    return cached_file(name, "config.json") is not None


def _can_ask_hub() -> bool:
    """Return whether the hub can be reached."""
    from finetune.hub.repository import is_hub_reachable

    return is_hub_reachable()


def _source(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the path or hub id of a model, and notes about it."""
    if name in shipped_shapes() or expanded(name).exists():
        return str(find_shape(name).absolute()), ()
    if _is_cached(name):
        return name, ()
    if HUB_ID.fullmatch(name) is None:
        return str(find_shape(name)), ()  # which refuses it, and names the nearest
    shape = shape_of_id(name)
    if shape is not None:
        note = f"{name} is not in the hub's cache: planned from the shipped shape {shape}"
        return str(find_shape(shape)), (note,)
    if _can_ask_hub():
        return name, ()
    shape = near_shape(name)
    if shape is not None:
        note = (
            f"{name} is not in the hub's cache, and the hub cannot be reached: planned from the"
            f" shipped shape {shape}, from which its config may differ"
        )
        return str(find_shape(shape)), (note,)
    last = name.rpartition("/")[2].lower()
    near = difflib.get_close_matches(last, shipped_shapes(), n=3) or list(shipped_shapes())[:3]
    raise ConfigError(
        f"{name} is no recipe, shape or directory, and is not in the hub's cache",
        limit="a plan needs the model's config.json, and the Hugging Face hub cannot be reached",
        hint=f"`hf download {name} config.json --local-dir DIR` where there is a network, then"
        f" `sluice plan DIR`; near shapes are {', '.join(near)}",
    )


def near_shape(hub_id: str) -> str | None:
    """Return the shipped shape that a hub id names, but for words of its training or its form.

    Such as Qwen3-8B of unsloth/Qwen3-8B-bnb-4bit, and of Qwen3-30B-A3B-Instruct-2507 its base.
    """
    return shape_of_id(_TRAINED_OR_FORMED.sub("", hub_id))


def _recipe(path: str, overrides: Sequence[str], *, name: str) -> tuple[Recipe, tuple[str, ...]]:
    place = Place(text=f"the defaults for {name}", line=1)
    draft = Draft(name=name)
    draft.values.update(
        model={"path": path},
        data={"path": NO_ROWS},
        train={"tokens_per_step": TOKENS_PER_STEP, "epochs": 1},
        output={"name": "plan"},
    )
    draft.places.update(dict.fromkeys(draft.values, place))
    apply_overrides(draft, overrides, rivals=RIVALS)
    notes = _cut_to_sequences(draft)
    return recipe_from(draft, Path.cwd(), check_files=False), notes


def _cut_to_sequences(draft: Draft) -> tuple[str, ...]:
    """Cut the tokens of a step to whole micro-batches, and say so."""
    train = draft.values["train"]
    if not isinstance(train, dict):
        return ()
    tokens, seq_len = train.get("tokens_per_step"), train.get("seq_len", 2048)
    size = train.get("micro_batch_size", 1)
    size = 1 if size == "auto" else size
    for number in (tokens, seq_len, size):
        if type(number) is not int or number < 1:
            return ()  # which the check refuses
    assert isinstance(tokens, int)
    whole = whole_units(tokens, seq_len * size)
    if whole == tokens:
        return ()
    train["tokens_per_step"] = whole
    return (
        f"planned are {whole:,} tokens per step, {whole // seq_len} sequences of {seq_len:,}:"
        f" {tokens:,} are no whole number of them",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedModel:
    """A model to write a recipe for."""

    name: str  # short, for titles and names of files
    settings: Mapping[str, Any]  # the section `model` of its recipe
    note: str = ""  # what to know of these; empty if there is nothing


def wanted_model(text: str) -> WantedModel:
    """Return the model that a text means.

    Args:
        text: A folder with a config.json, such a file, a hub id, or the name of a shipped shape,
            which need not be exact.

    Raises:
        ConfigError: It is none of these; the error names the nearest shapes.
    """
    path = expanded(text)
    if path.is_file() or (path / "config.json").is_file():
        return _on_disk(text)
    is_id = HUB_ID.fullmatch(text) is not None
    if is_id and (_is_cached(text) or shape_of_id(text) is not None or _can_ask_hub()):
        return WantedModel(name=text.rpartition("/")[2].lower(), settings={"path": text})
    ids = published_ids()
    if text in shipped_shapes() and text not in ids:
        note = "a shape to try the program with: its weights are random"
        return WantedModel(name=text, settings={"config": text, "init": "random"}, note=note)
    try:
        name = named_shape(text)
    except ConfigError:
        if is_id:
            _source(text)  # which says why it is not asked for
        raise
    note = "planned as the text model of it alone" if name.endswith("-text") else ""
    return WantedModel(name=name.removesuffix("-text"), settings={"path": ids[name]}, note=note)


def _on_disk(text: str) -> WantedModel:
    file = find_shape(text).absolute()
    folder = file.parent
    if file.name == "config.json" and has_weights(ModelSection(path=str(folder))):
        return WantedModel(name=folder.name.lower(), settings={"path": str(folder)})
    name = folder.name if file.name == "config.json" else file.stem
    note = "a config alone, which a plan reads; to train, name the folder with the weights"
    return WantedModel(name=name.lower(), settings={"path": str(file)}, note=note)
