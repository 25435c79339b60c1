"""What a reader sees of a page, and the directory of a run that has begun."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from finetune.recipe.recipe import Recipe
from finetune.run.run_dir import RunDir
from tests.builders import recipe_values

CHART = re.compile(r"CHARTS = (\{.*\});\n")


class Seen(HTMLParser):
    """Collects the tags of a page, its text, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loaded: list[str] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [str(value) for name, value in attrs if name in ("src", "href", "action")]
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def specs(text: str) -> dict[str, Any]:
    """Return the charts of a page, by name."""
    found = CHART.search(text)
    assert found is not None
    values: dict[str, Any] = json.loads(found[1])
    return values


def begun(folder: Path, **changes: Any) -> Path:
    """Begin a run in a folder, without a step."""
    recipe = Recipe.model_validate(recipe_values(**changes))
    RunDir(folder).start(recipe, experts_implementation=None)
    return folder
