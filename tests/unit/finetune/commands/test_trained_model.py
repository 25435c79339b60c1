"""Whether an answer has room, before a model is loaded."""

from pathlib import Path
from typing import Any, cast

import pytest

from finetune.commands.trained_model import Prepared
from finetune.errors import ConfigError
from finetune.recipe.recipe import Recipe
from finetune.run.run_dir import RunDir
from offload.errors import DoesNotFitError
from offload.plan.machine.machine import GIB, named_machine
from offload.plan.plan import plan
from tests.builders import qwen3_8b, recipe_values, request

POSITIONS = 2048
PREFIX = {"method": "prefix", "num_virtual_tokens": 20}


def prepared(**adapter: Any) -> Prepared:
    facts = qwen3_8b(max_position_embeddings=POSITIONS)
    machine = named_machine("rtx4090", ram_bytes=64 * GIB)
    values = recipe_values(**{f"adapter__{name}": value for name, value in adapter.items()})
    return Prepared(
        run=RunDir(Path("run")),
        recipe=Recipe.model_validate(values),
        tokenizer=cast("Any", None),
        facts=facts,
        machine=machine,
        plan=plan(facts, machine, request()),
    )


def test_an_answer_may_take_the_last_position() -> None:
    prepared().require_room(2000, 49)
    prepared(**PREFIX).require_room(1980, 49)


@pytest.mark.parametrize(
    ("adapter", "num_prompt", "num_new", "message"),
    [
        (
            {},
            2000,
            50,
            r"a prompt of 2,000 tokens and an answer of up to 50 take 2,049 positions; the model"
            r" was made for at most 2,048\n\nhint: `--max-new-tokens 49`",
        ),
        (
            PREFIX,
            2000,
            50,
            r"20 virtual tokens, a prompt of 2,000 tokens and an answer of up to 50 take 2,069"
            r" positions; .*\n\nhint: `--max-new-tokens 29`",
        ),
        (PREFIX, 2029, 1, r"20 virtual tokens, .* take 2,049 positions; .*\n\nhint: a shorter"),
    ],
)
def test_an_answer_past_the_model_s_positions_is_refused(
    adapter, num_prompt, num_new, message
) -> None:
    with pytest.raises(ConfigError, match=message):
        prepared(**adapter).require_room(num_prompt, num_new)


def test_a_cache_without_room_is_refused_with_the_tokens_in_front() -> None:
    facts = qwen3_8b(max_position_embeddings=10**9)
    one = prepared(**PREFIX)
    long = Prepared(
        run=one.run,
        recipe=one.recipe,
        tokenizer=one.tokenizer,
        facts=facts,
        machine=one.machine,
        plan=one.plan,
    )
    with pytest.raises(DoesNotFitError):
        long.require_room(10**8, 1)
