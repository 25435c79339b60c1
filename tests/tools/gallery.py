"""Writes the gallery of models by cards, and the shipped recipes that the planner suggests.

    python -m tests.tools.gallery            write them
    python -m tests.tools.gallery --check    list files that are not current, exit code 1 if any

Both are what `sluice recipes for` answers: the gallery its tokens per second, the recipes its text.
"""

import argparse
import gc
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from finetune.commands.recipes import Asked, target_of
from finetune.planning.candidates import DEFAULT_GOAL, goal_named
from finetune.planning.recipe_text import recipe_text
from finetune.planning.subject import wanted_model
from finetune.planning.suggestion import Suggestion, first_settings, suggest
from finetune.recipe.recipe import recipes_dir
from offload.errors import DoesNotFitError
from tests.tools.reference import ROOT, table, with_part

PAGE = ROOT / "docs" / "guides" / "recipes.md"
MODELS = (
    *("qwen3.6-35b-a3b", "qwen3.6-27b", "qwen3.5-9b"),
    *("gemma-4-26b-a4b", "gemma-4-31b", "gemma-4-e4b"),
    *("ministral-3-8b", "ministral-3-14b", "mistral-small-4"),
    *("glm-4.7-flash", "nemotron-3-nano-30b-a3b", "lfm2-8b-a1b"),
    *("gpt-oss-20b", "gpt-oss-120b"),
    *("qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b"),
    *("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b", "gemma-3-4b-text"),
)
VRAM_GIB, RAM_GIB = (8, 12, 16, 24, 32), (32, 64, 128)
Asking = tuple[str, int, int] | tuple[str, int, int, str, str]
_ROWS = "data.path=my/images.jsonl"
SHIPPED: Mapping[str, Asking] = {
    # recipe: model, GiB of VRAM, GiB of RAM, settings over what is suggested
    "gemma3_4b_8gb": ("gemma-3-4b-text", 8, 32),
    "gemma4_26b_16gb": ("gemma-4-26b-a4b", 16, 64),
    "gemma4_e4b_8gb": ("gemma-4-e4b", 8, 32),
    "glm47_flash_16gb": ("glm-4.7-flash", 16, 64),
    "gptoss_20b_16gb": ("gpt-oss-20b", 16, 64),
    "gptoss_120b_24gb": ("gpt-oss-120b", 24, 64),
    "llama31_70b_24gb": ("llama-3.1-70b", 24, 64),
    "ministral3_8b_12gb": ("ministral-3-8b", 12, 32),
    "nemotron3_nano_24gb": ("nemotron-3-nano-30b-a3b", 24, 64),
    "qwen3_4b_8gb": ("qwen3-4b", 8, 32),
    "qwen3_32b_24gb": ("qwen3-32b", 24, 64),
    "qwen30b_nvfp4_24gb": ("qwen3-30b-a3b-nvfp4", 24, 32),
    "qwen36_27b_24gb": ("qwen3.6-27b", 24, 64),
    "qwen36_35b_24gb": ("qwen3.6-35b-a3b", 24, 64),
    "gemma4_26b_images_24gb": ("gemma-4-26b-a4b", 24, 64, "image.max_tokens=280", _ROWS),
    "gemma4_26b_images_32gb": ("gemma-4-26b-a4b", 32, 64, "image.max_tokens=280", _ROWS),
    "ministral3_8b_images_16gb": ("ministral-3-8b", 16, 32, "image.max_tokens=1024", _ROWS),
    "qwen3_vl_8b_12gb": ("qwen3-vl-8b", 12, 32, "image.max_tokens=1024", _ROWS),
    "qwen3_vl_8b_24gb": ("qwen3-vl-8b", 24, 32, "image.max_tokens=1024", _ROWS),
    "qwen3_vl_30b_24gb": ("qwen3-vl-30b-a3b", 24, 64, "image.max_tokens=1024", _ROWS),
    "qwen3_vl_30b_32gb": ("qwen3-vl-30b-a3b", 32, 64, "image.max_tokens=1024", _ROWS),
}


def suggested(model: str, vram_gib: int, ram_gib: int, *overrides: str, name: str) -> Suggestion:
    """Return what `sluice recipes for` answers, with settings over it.

    Raises:
        DoesNotFitError: Nothing fits.
    """
    asked = Asked(machine=None, vram_gib=vram_gib, ram_gib=ram_gib, goal=DEFAULT_GOAL)
    target, _ = target_of(asked, dtype="bfloat16")
    wanted = wanted_model(model)
    settings = first_settings(wanted, name=name.replace("_", "-"), dtype="bfloat16")
    goal = goal_named(asked.goal)
    return suggest(wanted, target, goal, settings=settings, overrides=overrides)


def recipe(name: str) -> str:
    """Return the text of a shipped recipe."""
    return recipe_text(suggested(*SHIPPED[name], name=name), name=name)


def cell(model: str, vram_gib: int, ram_gib: int) -> str:
    """Return the tokens per second of a model, and its form where that is not exact and in RAM."""
    gc.disable()  # plans make no cycles
    try:
        chosen = suggested(model, vram_gib, ram_gib, name="a-run").chosen
    except DoesNotFitError:
        return "-"
    request = chosen.plan.request
    marks: list[str] = [request.typical.codec] if chosen.rounding else []
    marks += ["disk"] if request.is_on_disk else []
    return f"{chosen.tokens_per_s:,.0f} {', '.join(marks)}".strip()


def _asked(place: tuple[str, int, int]) -> str:
    return cell(*place)


def gallery() -> str:
    """Return a table for each size of RAM: models by cards."""
    places = [(model, vram, ram) for ram in RAM_GIB for model in MODELS for vram in VRAM_GIB]
    with ProcessPoolExecutor() as workers:
        cells = dict(zip(places, workers.map(_asked, places, chunksize=5), strict=True))
    head = ("model", *(f"{vram} GiB" for vram in VRAM_GIB))
    parts = []
    for ram in RAM_GIB:
        rows = [[model, *(cells[model, vram, ram] for vram in VRAM_GIB)] for model in MODELS]
        parts.append(f"### {ram} GiB of RAM\n\n{table(head, rows)}")
    return "\n".join(parts)


def files() -> Iterator[tuple[Path, str]]:
    """Yield each file with the text that it should have."""
    for name in SHIPPED:
        yield recipes_dir() / f"{name}.yaml", recipe(name)
    yield PAGE, with_part(PAGE.read_text(), "gallery", gallery())


def main() -> int:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    is_check = parser.parse_args().check
    stale = [
        (path, text) for path, text in files() if not path.exists() or path.read_text() != text
    ]
    for path, text in stale:
        if not is_check:
            path.write_text(text)
        verb = "is not current: `make generate`" if is_check else "written"
        sys.stdout.write(f"{path.relative_to(ROOT)} {verb}\n")
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
