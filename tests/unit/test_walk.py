"""How much of the house a plain run walks through; `python -m tests.tools.walk` lists it."""

import json
from pathlib import Path

import pytest

from finetune.data.rows import RowForm
from finetune.data.tokenize import Encoder, Fate
from finetune.recipe.extensions import repeated_formats
from tests.doubles import tiny_tokenizer
from tests.tools.walk import PACKAGES, ROOT, Walk, core, num_statements, walks

MOST_CORE_STATEMENTS = 27_400
MOST_FILES_OF_A_STEP = 34
MOST_FILES_OF_A_ROW = 10
MOST_FILES_THAT_NAME_RANKS = 25


@pytest.mark.thorough
def test_the_core_is_what_a_plain_run_imports(tmp_path: Path) -> None:
    files = core(tmp_path)
    assert ROOT / "finetune/train.py" in files
    assert ROOT / "offload/engine/executor.py" in files
    names = {str(file.relative_to(ROOT)) for file in files}
    for folder in ("finetune/sweep", "finetune/full", "finetune/training/sharded"):
        assert [name for name in names if name.startswith(folder)] == []
    assert sum(map(num_statements, files)) <= MOST_CORE_STATEMENTS


@pytest.mark.thorough
def test_a_step_is_found_in_few_files(tmp_path: Path) -> None:
    start, warm = walks(tmp_path / "run")
    assert "finetune/train.py" in start.files
    assert len(warm.files) <= MOST_FILES_OF_A_STEP, warm.files


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]},
        {"prompt": "1", "completion": "2"},
        {"text": "1, 2"},
        {"prompt": "1", "chosen": "2", "rejected": "3"},
    ],
)
def test_a_row_becomes_an_example_in_few_files(row: dict[str, object]) -> None:
    encoder = Encoder(
        tokenizer=tiny_tokenizer(),
        seq_len=64,
        loss_on="assistant",
        too_long="truncate",
        empty_think="prompt",
    )
    form = RowForm(
        path="rows",
        data_format="auto",
        columns={},
        system=None,
        ignored=(),
        loss_on="assistant",
        formats=("preference",) if "chosen" in row else repeated_formats(),
    ).detected([("rows:1", row)])
    walk = Walk()
    walk.begin()
    try:
        fate, examples = form.read("rows:1", json.dumps(row).encode()).encode(encoder)
    finally:
        walk.end()
    assert fate is Fate.WHOLE
    assert examples
    assert len(walk.files) <= MOST_FILES_OF_A_ROW, walk.files


def test_the_number_of_ranks_is_known_in_few_files() -> None:
    sources = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    found = [file for file in sources if "num_ranks" in file.read_text()]
    assert len(found) <= MOST_FILES_THAT_NAME_RANKS
