"""Answers from a streamed model: their limits and stops, with and without a cache."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import offload
from finetune.training.generate import generate
from offload.engine.engine import Engine
from tests.parity.steps import tiny
from tests.parity.tiny_models import tiny_model
from tests.tiers import mostly_slow

PROMPTS = [[5, 9, 11], [7, 3, 8, 20, 4], [30, 31, 32], [12]]
LIMIT = 5


@pytest.fixture
def engine() -> Iterator[Engine]:
    attached = offload.attach(tiny("qwen3").eval(), num_slots=2, device="cpu")
    yield attached
    attached.close()


def answers(engine: Engine, **changes: Any) -> list[list[int]]:
    notes: list[str] = []
    asked: dict[str, Any] = {"max_new_tokens": LIMIT, "stop_ids": (), "pad_id": 0, "batch_size": 4}
    found = generate(engine, PROMPTS, **asked | changes, note=notes.append)
    assert not notes
    return found


def alone(stop_ids: tuple[int, ...] = ()) -> list[list[int]]:
    """Return what plain transformers answers, a prompt at a time."""
    model: Any = tiny("qwen3").eval()
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        stops = list(stop_ids) or None
        output = model.generate(
            **given, max_new_tokens=LIMIT, do_sample=False, eos_token_id=stops, pad_token_id=0
        )
        answer = output[0, len(prompt) :].tolist()
        found.append(answer[:-1] if answer[-1] in stop_ids else answer)
    return found


@pytest.mark.parametrize("batch_size", mostly_slow([4, 3, 1], 3))
def test_answers_are_those_of_plain_transformers(engine: Engine, batch_size: int) -> None:
    assert answers(engine, batch_size=batch_size) == alone()


def test_each_answer_ends_at_its_own_limit(engine: Engine) -> None:
    limits = [2, 5, 1, 0]
    expected = [answer[:limit] for answer, limit in zip(alone(), limits, strict=True)]
    assert answers(engine, max_new_tokens=limits) == expected


def test_an_answer_ends_before_a_stop_token_and_the_others_go_on(engine: Engine) -> None:
    stop = alone()[0][2]
    found = answers(engine, stop_ids=(stop,))
    assert found == alone((stop,))
    assert len(found[0]) < LIMIT == max(map(len, found))


def test_a_model_without_a_cache_answers_the_same_and_says_why() -> None:
    model = tiny_model("openai-gpt").eval()
    reference: Any = copy.deepcopy(model)
    notes: list[str] = []
    engine = offload.attach(model, num_slots=2, device="cpu")
    try:
        found = generate(
            engine,
            PROMPTS,
            max_new_tokens=LIMIT,
            stop_ids=(),
            pad_id=0,
            batch_size=2,
            note=notes.append,
        )
    finally:
        engine.close()
    for prompt, answer in zip(PROMPTS, found, strict=True):
        tokens = list(prompt)
        for token in answer:
            with torch.no_grad():
                assert int(reference(torch.tensor([tokens])).logits[0, -1].argmax()) == token
            tokens.append(token)
    assert notes == [
        "Generates without a key-value cache, more slowly: OpenAIGPTLMHeadModel takes no key-value"
        " cache of transformers"
    ]


def test_an_answer_ends_where_its_own_rule_says(engine: Engine) -> None:
    found = answers(engine, is_ended=lambda row, ids: row == 1 and len(ids) == 2, batch_size=3)
    expected = alone()
    assert found == [expected[0], expected[1][:2], *expected[2:]]
