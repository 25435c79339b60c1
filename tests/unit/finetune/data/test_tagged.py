"""Words with a class each: the class is the label of the word's first token, and of no other."""

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from finetune.data.rows import Tagged
from finetune.data.sources import RowError
from finetune.data.tokenize import Encoder, Fate
from tests.doubles import tiny_tokenizer

WORDS = ("streams", "of", "New", "York's", "layers", "inside", "all")
LABELS = (1, -100, 2, 3, 0, 0, -100)


def byte_level() -> PreTrainedTokenizerFast:
    """Return a byte-level BPE as GPT-2's, which puts a space before a text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(["streams of layers in New York all"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def encoder(tokenizer: Any, *, seq_len: int = 64) -> Encoder:
    return Encoder(
        tokenizer=tokenizer,
        seq_len=seq_len,
        loss_on="last",
        too_long="drop",
        empty_think="prompt",
    )


def tagged(words: tuple[str, ...] = WORDS, labels: tuple[int, ...] = LABELS) -> Tagged:
    return Tagged(words=words, labels=labels, source="here:1")


def test_the_first_token_of_a_word_has_its_class_as_in_transformers() -> None:
    tokenizer = byte_level()
    fate, (one,) = encoder(tokenizer).tagged(tagged())
    split = tokenizer(list(WORDS), is_split_into_words=True)
    expected, before = [-100], None
    for word in split.word_ids():
        expected.append(-100 if word is None or word == before else LABELS[word])
        before = word
    end = max(place for place, label in enumerate(expected) if label != -100) + 1
    assert len(split.word_ids()) > len(WORDS)  # some words are several tokens
    assert fate is Fate.WHOLE
    assert one.input_ids.tolist() == [tokenizer.eos_token_id, *split["input_ids"]][:end]
    assert one.labels.tolist() == expected[:end]


def test_the_class_is_at_the_first_letter_where_a_space_is_a_token_of_its_own() -> None:
    tokenizer = byte_level()
    _, (one,) = encoder(tokenizer).tagged(tagged(("all", "\u00fcber"), (0, 1)))
    tokens = tokenizer.convert_ids_to_tokens(one.input_ids.tolist())
    assert one.labels[-1] == 1
    assert tokens[-2:] == ["\u0120", "\u00c3"]  # a space, and the first byte of the letter


def test_a_space_may_be_part_of_the_first_token() -> None:
    tokenizer = tiny_tokenizer(merges=((" ", "b"),))
    _, (one,) = encoder(tokenizer).tagged(tagged(("a", "b", "cd"), (0, 1, 2)))
    assert tokenizer.convert_ids_to_tokens(one.input_ids.tolist()[1:]) == ["a", " b", " ", "c"]
    assert one.labels.tolist() == [-100, 0, 1, -100, 2]


def test_words_that_begin_in_one_token_are_refused() -> None:
    tokenizer = tiny_tokenizer(merges=(("a", " "), ("a ", "b")))
    with pytest.raises(RowError, match=r"'b' begins with no token of its own"):
        encoder(tokenizer).tagged(tagged(("a", "b"), (0, 1)))


def test_a_row_that_is_too_long_is_dropped() -> None:
    row = tagged(("abc", "de"), (0, 1))
    assert encoder(tiny_tokenizer(), seq_len=6).tagged(row)[0] is Fate.WHOLE  # of 7 tokens, 6
    assert encoder(tiny_tokenizer(), seq_len=5).tagged(row) == (Fate.TOO_LONG, [])


def test_what_comes_after_the_last_class_is_left_out() -> None:
    _, (one,) = encoder(tiny_tokenizer()).tagged(tagged(("ab", "cd"), (1, -100)))
    assert one.labels.tolist() == [-100, 1]
    assert torch.tensor(one.input_ids).shape == (2,)
