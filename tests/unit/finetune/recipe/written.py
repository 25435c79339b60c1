"""A recipe as tests write it, and what is said of one that is refused."""

from pathlib import Path
from textwrap import dedent

import pytest

from finetune.errors import ConfigError
from finetune.recipe.load import load_recipe

VALID = """\
model:
  path: Qwen/Qwen3-0.6B
adapter:
  rank: 8
data:
  path: openai/gsm8k
train:
  seq_len: 512
  grad_accum_steps: 4
  steps: 10
output:
  name: small
"""


def write(text: str, name: str = "r.yaml") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(dedent(text), encoding="utf-8")
    return name


def replaced(old: str, new: str) -> str:
    """Write the valid recipe with one piece of its text changed."""
    assert old in VALID
    return write(VALID.replace(old, new))


def refusal(source: str, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_recipe(source, overrides)
    return caught.value


def assert_refused(source: str, *overrides: str, what: str, limit: str, hint: str) -> None:
    """Check the three parts of an error with exactly one problem."""
    error = refusal(source, *overrides)
    assert (error.what, error.limit) == (what, limit)
    assert error.hint == hint
