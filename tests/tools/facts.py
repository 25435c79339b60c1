"""Writes the facts of shipped shapes, read off the models that transformers builds of them.

    python -m tests.tools.facts

A plan of a shipped shape then needs no torch; `tests/unit/finetune/model/test_facts.py` compares
what is written with the models.
"""

import json

from finetune.model.facts import facts_from
from finetune.recipe.load import SHIPPED_FACTS, load_shape, shipped_shapes
from finetune.recipe.recipe import recipes_dir


def main() -> None:
    """Write the file, a line for each shape."""
    lines = (
        f"{json.dumps(name)}: {json.dumps(facts_from(load_shape(name)).to_json())}"
        for name in shipped_shapes()
    )
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (recipes_dir() / SHIPPED_FACTS).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
