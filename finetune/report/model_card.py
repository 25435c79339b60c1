"""The model card of what was trained: from what, on what, how, and what was measured.

A card is copied with the weights to other machines and to the hub. So a file or directory that a
setting names is written by its last name alone, whichever setting it is, and the data's system
prompts are left out unless the recipe asks for them. peft would leave a form to be filled in.
"""

import json
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel

from finetune.recipe.recipe import Recipe, recipe_hash, resolved_yaml, with_settings
from finetune.report.explain import METRICS, REPORT, ROUNDS, learned_rows, probe_learned
from finetune.report.rows import Row, as_markdown, tables
from finetune.run.run_files import EVAL_PREFIX, read_rows

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MODEL_CARD = "README.md"
_PROMPT, _LEFT_OUT = "system", "(left out of this card)"


def model_card(
    recipe: Recipe,
    run_dir: Path,
    config: "PretrainedConfig",
    *,
    loader: str,
    data_hash: str,
    prompt: str,
    form: str,
    images: str = "",
) -> str:
    """Return a finished run's card, in Markdown with the header that the hub reads.

    Args:
        recipe: The run's recipe.
        run_dir: Its directory, with its metrics and its report.
        config: Of the model.
        loader: Name of transformers' class that loads the model.
        data_hash: Of the training rows, as tokens and labels.
        prompt: What there is to say of the prompts that answers were trained after.
        form: The `quant_method` of the base's published weights; empty if they are plain.
        images: Text about the images of its rows, as `images_section` writes it;
            empty if they had none.
    """
    public = public_recipe(recipe)
    base = public.model.path or public.model.config
    is_on_hub = recipe.model.path is not None and recipe.model.path == public.model.path
    header: dict[str, Any] = {
        "library_name": "transformers" if recipe.train.is_full else "peft",
        "pipeline_tag": _SEEING if images else _PIPELINES[recipe.model.head],
        "tags": ["sluice"] if recipe.train.what != "adapter" else [recipe.adapter.method, "sluice"],
    }
    unpublished = _UNLINKED if recipe.train.is_full else _UNPUBLISHED
    if is_on_hub:
        header = {"base_model": base, **header}
    sources = ", ".join(source.path for source in public.data.sources)
    (figures,) = tables("", _figures(run_dir))
    options = f", num_labels={recipe.model.num_outputs}" if recipe.model.num_outputs else ""
    if is_on_hub and recipe.model.revision is not None and not recipe.train.is_full:
        options = f', revision="{recipe.model.revision}"{options}'
    call = (_MODEL_CALL if recipe.train.is_full else _ADAPTER_CALL).format(
        loader=loader, base=base, options=options
    )
    published = "" if recipe.train.is_full or not form else _PUBLISHED.format(form=form)
    prompted = f"## Prompt\n\n{prompt}\n\n" if prompt else ""
    seen = f"## Images\n\n{images}\n\n" if images else ""
    is_by_reward = recipe.objective.samples_answers
    rewards = import_module(ROUNDS).learned_by(recipe, run_dir) if is_by_reward else ""
    return f"""---
{yaml.safe_dump(header, sort_keys=False).strip()}
---

# {recipe.output.name}

{_what(recipe).format(base=f"{base} ({config.model_type})")}
{rewards}{published}{"" if is_on_hub else unpublished.format(base=base)}
## Load

```python
{call}
```

{prompted}{seen}## Measured

{as_markdown([figures])}

"Held-out" rows were not trained on. Nothing else was evaluated.

## Trained on

{sources}, SHA-256 of its tokens and labels `{data_hash}`.

## Recipe

SHA-256 `{recipe_hash(recipe)}`, every setting with its value:

```yaml
{resolved_yaml(public).strip()}
```
"""


def merged_card(recipe: Recipe, card: str, *, form: str) -> str:
    """Return the card of a model that a run's adapter was merged into, with the adapter's in it.

    Args:
        recipe: The run's recipe.
        card: The adapter's.
        form: The `quant_method` of its weights; empty if they are plain.
    """
    path, public = recipe.model.path, public_recipe(recipe).model.path
    header: dict[str, Any] = {"base_model": path} if path == public else {}
    tag = re.search(r"(?m)^pipeline_tag: (\S+)$", card)
    header |= {"library_name": "transformers"}
    header |= {"pipeline_tag": tag[1] if tag else _PIPELINES["tokens"]}
    header |= {"tags": ["sluice"]}
    weights = f"weights in {form} again" if form else "plain weights"
    about = card.split("---\n", 2)[2] if card.startswith("---\n") else card
    loader = re.search(r"AutoModel\w+", about)
    call = _MODEL_CALL.format(loader=loader[0] if loader else "AutoModelForCausalLM", options="")
    about = re.sub(r"(?ms)^## Load\n.*?(?=^## )", "", about)
    return f"""---
{yaml.safe_dump(header, sort_keys=False).strip()}
---

# {recipe.output.name}, merged

{public} with an adapter that was merged into it by Sluice: {weights}.

## Load

```python
{call}
```

## The adapter

{about.strip().replace(chr(10) + "#", chr(10) + "##").replace("# ", "### ", 1)}
"""


def _what(recipe: Recipe) -> str:
    """Return what was trained, in a sentence."""
    trained = (
        "a head alone, on frozen layers" if recipe.train.is_head_alone else "an adapter and a head"
    )
    if recipe.objective.card:
        return recipe.objective.card.format(
            base="{base}", trained=trained, num_classes=recipe.model.num_classes
        )
    if recipe.train.what == "adapter":
        name = recipe.adapter.stated.title
        return f"A {name} adapter of {{base}}, in peft's format, trained with Sluice."
    which = "all weights" if recipe.train.what == "all" else "some of its weights"
    return f"{{base}} with {which} trained by Sluice: plain weights, without an adapter."


_SEEING = "image-text-to-text"
_PIPELINES = {
    "tokens": "text-generation",
    "reward": "text-classification",
    "classes": "text-classification",
    "token_classes": "token-classification",
}

_ADAPTER_CALL = """from peft import PeftModel
from transformers import {loader}

base = {loader}.from_pretrained("{base}"{options})
model = PeftModel.from_pretrained(base, "ADAPTER")"""

_MODEL_CALL = """from transformers import {loader}

model = {loader}.from_pretrained("MODEL"{options})"""

_PUBLISHED = """
The base is published in {form}. The adapter was trained on the values that its weights decode to:
over weights that were rounded in another way it gives other answers.
"""

_UNLINKED = """
{base} was a directory on the machine that trained it, so this card cannot link it.
"""

_UNPUBLISHED = """
{base} was a directory on the machine that trained it, so this card cannot link it:
`base_model_name_or_path` in adapter_config.json is where it was.
"""


def card_at(card: str, repo: str) -> str:
    """Return a card whose example loads what it is of from a repository of the hub."""
    return card.replace('"ADAPTER"', f'"{repo}"').replace('"MODEL"', f'"{repo}"')


def public_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe without paths of this machine, and without system prompts unless asked."""
    return without_paths(recipe if recipe.output.card_system else _without_prompts(recipe))


def without_paths(recipe: Recipe) -> Recipe:
    """Return the recipe with files named by their last name alone, and without `report.notify`."""
    shown: Recipe = _public(with_settings(recipe, {"report.notify": None}))
    if recipe.output.dir is not None:
        output = shown.output.model_copy(update={"dir": recipe.output.run_dir.name})
        shown = shown.model_copy(update={"output": output})
    return shown


def _public(value: Any) -> Any:
    """Return a value of a recipe with absolute paths by their last name alone."""
    if isinstance(value, BaseModel):
        names = [name for name in type(value).model_fields if name != _PROMPT]
        return value.model_copy(update={name: _public(getattr(value, name)) for name in names})
    if isinstance(value, tuple):
        return tuple(map(_public, value))
    if isinstance(value, dict):
        return {name: _public(one) for name, one in value.items()}
    is_path = isinstance(value, str) and value.startswith(("/", "~"))
    return Path(value).name if is_path else value


def _without_prompts(recipe: Recipe) -> Recipe:
    def hidden(part: Any) -> Any:
        return part if part.system is None else part.model_copy(update={_PROMPT: _LEFT_OUT})

    data = hidden(recipe.data).model_copy(update={"mix": tuple(map(hidden, recipe.data.mix))})
    return recipe.model_copy(update={"data": data})


def _figures(run_dir: Path) -> list[Row]:
    """Return what was measured."""
    report = json.loads((run_dir / REPORT).read_text())
    rows = []
    if "probe" in report:
        steps = report["probe"]["num_steps"]
        rows = [
            Row("", "steps of the head alone, before", steps),
            Row("", "what it learned in them", probe_learned(report["probe"])),
        ]
    rows += learned_rows(read_rows(run_dir / METRICS), step=report["adapter_step"])
    for when, figures in report["held_out"].items():
        names = ("rewards/accuracies", "rewards/margins", "logps/accuracies", "logps/margins")
        rows += [
            Row("", f"held-out {name}, {when} training", figures[EVAL_PREFIX + name], "loss")
            for name in names
            if EVAL_PREFIX + name in figures
        ]
    return rows + [
        Row("", f"held-out answers right to the letter, {when} training", share, "share")
        for when, share in report["exact_match"].items()
    ]
