import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedTokenizerBase

from finetune.data.chat_template import (
    Stops,
    eos_ids,
    merge_generation_config,
    read_generation_config,
)
from finetune.data.dataset import ExampleSet
from finetune.data.rows import Conversation
from finetune.data.turns import Message
from finetune.errors import ModelError
from tests.conversations import tokenised
from tests.doubles import tiny_tokenizer

RENAMES_THE_LAST_END = (
    "{% for m in messages %}{{ '<|start|>' + m.role + '\n' + m.content }}"
    "{{ '<|done|>' if loop.last and m.role == 'assistant' else '<|next|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def renaming_tokenizer() -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer(chat_template=RENAMES_THE_LAST_END)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|start|>", "<|done|>", "<|next|>"]}
    )
    return tokenizer


def rows(*talks: tuple[str, ...]) -> list[Conversation]:
    return [
        Conversation(
            messages=tuple(
                Message(role=("user", "assistant")[n % 2], content=text)
                for n, text in enumerate(talk)
            ),
            source=f"rows.jsonl:{number}",
        )
        for number, talk in enumerate(talks, start=1)
    ]


def load(
    tmp_path: Path,
    tokenizer: PreTrainedTokenizerBase,
    *talks: tuple[str, ...],
    seq_len: int = 512,
) -> ExampleSet:
    return tokenised(rows(*talks), tmp_path, seq_len=seq_len, tokenizer=tokenizer)


def ends(examples: ExampleSet, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [str(tokenizer.convert_ids_to_tokens(token)) for token in examples.answer_ends]


def test_the_end_of_answers_is_read_from_the_rows_also_from_the_cache(tmp_path: Path) -> None:
    for template, end in ((None, "<|endoftext|>"), (tiny_tokenizer().chat_template, "<|im_end|>")):
        tokenizer = tiny_tokenizer(chat_template=template)
        for is_from_cache in (False, True):
            examples = load(tmp_path, tokenizer, ("q", "<|endoftext|> ends"), ("q", "b"))
            assert examples.is_from_cache == is_from_cache
            assert ends(examples, tokenizer) == [end]
            assert examples[0].end_ids == examples.answer_ends


def test_the_end_of_last_answers_comes_before_the_more_frequent_one_of_earlier_ones(
    tmp_path: Path,
) -> None:
    tokenizer = renaming_tokenizer()
    examples = load(tmp_path, tokenizer, ("q", "a"), ("q", "a", "q", "b", "q", "c", "q", "d"))
    assert ends(examples, tokenizer) == ["<|done|>", "<|next|>"]
    assert Stops(trained=examples.answer_ends, base=(0,)).shown(tokenizer) == (
        "Answers end with different tokens: <|done|> (105), <|next|> (106);"
        " generation stops at <unk> (0) too"
    )


def test_an_end_that_was_cut_off_is_not_learned_and_not_reported(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    examples = load(tmp_path, tokenizer, ("q", "a" * 90), ("q", "b" * 90), seq_len=80)
    assert examples.answer_ends == ()
    assert "no end is learned" in Stops(trained=(), base=(7,)).shown(tokenizer)


def test_trained_ends_come_first_and_none_is_named_twice() -> None:
    stops = Stops(trained=(9, 4), base=(2, 9))
    assert stops.ids == (9, 4, 2)


def write(folder: Path, name: str, content: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("base", "trained", "merged"),
    [
        ({"eos_token_id": 1, "temperature": 0.6}, 5, {"eos_token_id": [5, 1], "temperature": 0.6}),
        ({"eos_token_id": [1, 5]}, [5], {"eos_token_id": [5, 1]}),
        ({"eos_token_id": 5}, 5, None),
        ({"do_sample": True}, [5, 6], {"do_sample": True, "eos_token_id": [5, 6]}),
        (None, 5, {"bos_token_id": 3, "eos_token_id": [5, 1]}),
    ],
)
def test_a_merged_model_stops_where_it_was_trained_to_and_where_its_base_does(
    tmp_path: Path, base: dict[str, Any] | None, trained: object, merged: dict[str, Any] | None
) -> None:
    folder = write(tmp_path / "base", "config.json", {"bos_token_id": 3, "eos_token_id": 1})
    if base is not None:
        write(folder, "generation_config.json", base)
    adapter = write(tmp_path / "adapter", "generation_config.json", {"eos_token_id": trained})
    out = tmp_path / "out"
    out.mkdir()
    merge_generation_config(folder, adapter, out)
    assert read_generation_config(out) == merged
    if merged is not None:
        assert GenerationConfig.from_pretrained(out).eos_token_id == merged["eos_token_id"]


@pytest.mark.parametrize("text", ["{", "[1]", "\xff", '{"eos_token_id": "<|im_end|>"}'])
def test_a_damaged_generation_config_is_named(tmp_path: Path, text: str) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "generation_config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelError, match=r"adapter/generation_config\.json"):
        eos_ids(read_generation_config(adapter) or {}, source=adapter / "generation_config.json")
