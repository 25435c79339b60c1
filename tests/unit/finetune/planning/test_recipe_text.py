import pytest
import yaml

from finetune.planning.recipe_text import _scalar
from finetune.recipe.load import CoreLoader


@pytest.mark.parametrize(
    "value",
    [
        "qwen3-8b",
        "/home/me/" + "a long folder/" * 20 + "rows.jsonl",  # longer than what tables show
        "C: #1 - {x}",
        "été 🙂.jsonl",
        "two\nlines\x7f",
        *("true", "Null", "FALSE", "yes", "on", "~", "0x1f", "1e3", ".inf", "", " "),
        *(None, True, 0.0002, 49_152, ["q_proj", "v_proj"]),
    ],
)
def test_a_setting_is_read_as_it_was_meant(value: object) -> None:
    assert yaml.load(f"key: {_scalar(value)}  # why\n", Loader=CoreLoader) == {"key": value}
