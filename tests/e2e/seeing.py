"""A tiny model of images and text on disk with its processor, pictures, rows, and a recipe."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from PIL import Image
from transformers import CONFIG_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from tests.image_processors import Family, family_of

SIZES = ((32, 32), (48, 32), (32, 64), (40, 40))
TEMPLATE = (
    "{%% for m in messages %%}{{ m.role }}: {%% if m.content is string %%}{{ m.content }}"
    "{%% else %%}{%% for p in m.content %%}{%% if p.type == 'image' %%}%s{%% else %%}{{ p.text }}"
    "{%% endif %%}{%% endfor %%}{%% endif %%}{{ eos_token }}{%% endfor %%}"
    "{%% if add_generation_prompt %%}assistant: {%% endif %%}"
)
_TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
_VISION = {"hidden_size": 32, "intermediate_size": 64, "patch_size": 8}


def small_family(model_type: str) -> Family:
    """Return a family whose images have a few tokens."""
    family = family_of(model_type)
    if model_type == "gemma3":
        square = {"size": {"height": 32, "width": 32}}
        return replace(family, settings=square, own={"image_seq_length": 4})
    few = {"patch_size": 8, "size": {"shortest_edge": 256, "longest_edge": 2048}}
    return replace(family, settings={**family.settings, **few})


def _config(model_type: str, family: Family) -> dict[str, Any]:
    tokenizer = family.tokenizer()
    ids = {name: tokenizer.convert_tokens_to_ids(one) for name, one in family.config.items()}
    text = {**_TEXT, "vocab_size": len(tokenizer) + 3, "pad_token_id": tokenizer.pad_token_id}
    image_id = tokenizer.convert_tokens_to_ids(family.tokens[0])
    if model_type == "gemma3":
        own = {"num_hidden_layers": 2, "num_attention_heads": 2, "vision_use_head": False}
        boundaries = zip(("boi_token_index", "eoi_token_index"), family.tokens[1:], strict=True)
        return {
            "text_config": {"sliding_window": 8, **text},
            "vision_config": {**_VISION, **own, "image_size": 32},
            "mm_tokens_per_image": 4,
            "image_token_index": image_id,
            **{name: tokenizer.convert_tokens_to_ids(one) for name, one in boundaries},
        }
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    own = {"depth": 2, "num_heads": 2, "out_hidden_size": 64, "num_position_embeddings": 64}
    return {
        "text_config": {"rope_parameters": rope, **text},
        "vision_config": {**_VISION, **own, "deepstack_visual_indexes": [0, 1]},
        "image_token_id": image_id,
        "video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>"),
        "tie_word_embeddings": False,
        **ids,
    }


def save_seeing_model(folder: Path, model_type: str) -> Path:
    """Write a tiny model with random weights, its tokenizer and its processor."""
    family = small_family(model_type)
    folder.mkdir(parents=True)
    family.written(folder)
    config_class = CONFIG_MAPPING[model_type]
    model_class: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[config_class]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = model_class._from_config(config_class(**_config(model_type, family)))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    placeholder = family.tokens[1] if model_type == "gemma3" else family.tokens[0]
    (folder / "chat_template.jinja").write_text(TEMPLATE % family.around.format(placeholder))
    return folder


def draw(folder: Path, *, num: int = 6) -> list[Path]:
    """Write pictures of noise, of several sizes."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    files = [folder / f"{i}.png" for i in range(num)]
    for i, file in enumerate(files):
        width, height = SIZES[i % len(SIZES)]
        values = random.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(values).save(file)
    return files


def rows_about(pictures: list[Path], *, num: int = 24) -> list[dict[str, Any]]:
    """Return rows with one image, two, or none, in OpenAI's form."""

    def part(number: int) -> dict[str, Any]:
        url = f"{pictures[0].parent.name}/{pictures[number % len(pictures)].name}"
        return {"type": "image_url", "image_url": {"url": url}}

    def row(number: int) -> dict[str, Any]:
        asked: Any = [part(number), {"type": "text", "text": f"what {number}"}]
        if number % 5 == 4:
            asked = f"no picture {number}"
        elif number % 5 == 3:
            asked = [part(number), {"type": "text", "text": "or"}, part(number + 1)]
        turns = (("user", asked), ("assistant", f"noise {number % 6}"))
        return {"messages": [{"role": role, "content": content} for role, content in turns]}

    return [row(number) for number in range(num)]


def seeing_recipe(folder: Path, model_type: str, **sections: dict[str, Any]) -> Path:
    """Write model, pictures, rows and a recipe into a folder; return the recipe."""
    save_seeing_model(folder / "model", model_type)
    rows = rows_about(draw(folder / "pictures"))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "adapter": {"rank": 4, "targets": "all-linear"},
        "data": {"path": str(folder / "rows.jsonl"), "num_workers": 0},
        "train": {"seq_len": 160, "micro_batch_size": 6, "grad_accum_steps": 4, "steps": 2},
        "offload": {"num_slots": 2, "device": "cpu"},
        "output": {"name": "run", "dir": str(folder / "run")},
        "report": {"samples": 0, "log_to": []},
    }
    for name, section in sections.items():
        recipe[name] = {**recipe.get(name, {}), **section}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return file
