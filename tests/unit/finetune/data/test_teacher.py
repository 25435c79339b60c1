"""A teacher's likeliest tokens: read from rows, put at their tokens, and cut."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from finetune.data.compared import Comparison, require_known_tokens
from finetune.data.dataset import Rows, load_rows
from finetune.data.rows import TopTokens
from finetune.data.sources import RowError
from finetune.data.tokenize import IGNORE_INDEX
from finetune.errors import DataError
from finetune.recipe.sections import DataSection
from tests.doubles import tiny_tokenizer

NAMES = ("top_ids", "top_logprobs")
LOW, HIGH = math.log(0.2), math.log(0.7)


def load(tmp_path: Path, rows: list[dict[str, Any]], **more: Any) -> Rows:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seq_len = more.pop("seq_len", 64)
    return load_rows(
        DataSection(path=str(file), **more),
        tiny_tokenizer(),
        seq_len=seq_len,
        seed=0,
        cache_dir=tmp_path / "cache",
        formats=("distilled",),
    )


def row(answer: str, num: int, *, prompt: str = "q") -> dict[str, Any]:
    """Return a row with so many lists: of the token's number, and one list has another token."""
    ids = [[n, n + 1] for n in range(num - 1)] + [[7]]
    logprobs = [[LOW, HIGH]] * (num - 1) + [[-0.1]]
    return {"prompt": prompt, "completion": answer, "top_ids": ids, "top_logprobs": logprobs}


def num_labels(tmp_path: Path, answer: str) -> int:
    """Count the tokens of an answer, its end included, by an error that names it."""
    with pytest.raises(DataError, match=r"for an answer of (\d+) tokens, its end included") as info:
        load(tmp_path, [row(answer, 99)])
    return int(str(info.value).split("for an answer of ")[1].split()[0])


def test_lists_are_put_at_the_tokens_of_the_answer_the_likeliest_first(tmp_path: Path) -> None:
    num = num_labels(tmp_path, "abcd")
    rows = load(tmp_path, [row("abcd", num), row("ab", num_labels(tmp_path, "ab"), prompt="other")])
    for example in (rows.train[index] for index in range(2)):
        assert example.top is not None
        is_label = example.labels != IGNORE_INDEX
        assert (example.top.counts > 0).tolist() == is_label.tolist()
        ids, logprobs = example.top.table(is_label, 3)
        num = int(is_label.sum())
        assert ids.tolist() == [[n + 1, n, -1] for n in range(num - 1)] + [[7, -1, -1]]
        assert logprobs[0].tolist() == [np.float32(HIGH), np.float32(LOW), 0.0]
        assert example.top.table(is_label, 1)[0][:, 0].tolist() == [*range(1, num), 7]


def test_an_answer_that_is_cut_keeps_the_lists_of_what_is_left(tmp_path: Path) -> None:
    num = num_labels(tmp_path, "abcdefgh")
    whole = load(tmp_path, [row("abcdefgh", num)]).train[0]
    seq_len = len(whole.input_ids) - 3
    cut = load(tmp_path, [row("abcdefgh", num)], seq_len=seq_len).train[0]
    assert cut.is_truncated
    assert whole.top is not None
    assert cut.top is not None
    assert cut.top.counts.tolist() == whole.top.counts[:seq_len].tolist()
    assert cut.top.ids.tolist() == whole.top.ids[: len(cut.top.ids)].tolist()
    assert len(cut.top.ids) == cut.top.counts.sum() < len(whole.top.ids)


def test_a_step_has_a_table_of_its_label_tokens_in_their_order(tmp_path: Path) -> None:
    texts = ["abcd", "a", "abc"]
    rows = load(tmp_path, [row(t, num_labels(tmp_path, t), prompt=t) for t in texts]).train
    comparison = Comparison.of(rows, is_mismatched=False, seq_len=64)
    assert comparison is not None
    assert comparison.num_top == 2
    ids_NK, logps_NK = comparison._teacher_of([rows[2], rows[0]])
    assert ids_NK is not None
    assert logps_NK is not None
    sizes = [rows[2].num_loss_tokens, rows[0].num_loss_tokens]
    assert ids_NK.shape == logps_NK.shape == (sum(sizes), 2)
    expected = [pair for num in sizes for pair in [*([n + 1, n] for n in range(num - 1)), [7, -1]]]
    assert ids_NK.tolist() == expected
    assert ids_NK.dtype == torch.int64


def test_the_data_hash_and_duplicates_cover_what_the_teacher_says(tmp_path: Path) -> None:
    one = row("ab", num_labels(tmp_path, "ab"))
    other = {**one, "top_logprobs": [[x - 0.01 for x in xs] for xs in one["top_logprobs"]]}
    assert load(tmp_path, [one]).data_hash != load(tmp_path, [other]).data_hash
    kept = load(tmp_path, [one, other, one], drop_duplicates=True).train
    assert len(kept) == 2
    assert kept[1].top is not None
    assert kept[1].top.logprobs[0] == np.float32(HIGH - 0.01)


@pytest.mark.parametrize(
    ("ids", "logprobs", "problem"),
    [
        ([[1]], [[-1.0], [-1.0]], r"'top_ids' has 1 lists, 'top_logprobs' 2"),
        ([[1], [2, 3]], [[-1.0], [-1.0]], r"top_ids\[1\] has 2 tokens, top_logprobs\[1\] 1 "),
        ([[1], []], [[-1.0], []], r"top_ids\[1\] has 0 tokens, top_logprobs\[1\] 0 numbers"),
        ([[1], [2, 5, 2]], [[-1.0], [-2.0] * 3], r"top_ids\[1\] has a token twice"),
        ([[1], [-2]], [[-1.0], [-1.0]], r"top_ids\[1\] has a number that is no token"),
        ([[1, 2]], [[0.3, 0.4]], r"adds up to a probability of 2\.\d+: it needs natural log"),
        ([[1]], [[float("nan")]], r"top_logprobs\[0\] has a number that is not finite"),
        ([[1.5]], [[-1.0]], r"'top_ids' must be lists of tokens"),
        ([["a"]], [[-1.0]], r"'top_ids' must be lists of tokens"),
        ([[1]], [[None]], r"'top_logprobs' must be lists of numbers"),
        ([1], [[-1.0]], r"top_ids\[0\] must be a list, this is int"),
    ],
)
def test_lists_that_are_no_distributions_are_named(
    ids: list[Any], logprobs: list[Any], problem: str
) -> None:
    with pytest.raises(RowError, match=problem):
        TopTokens.read(ids, logprobs, NAMES)


def test_a_teacher_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    rows = load(tmp_path, [row("ab", num_labels(tmp_path, "ab"))])
    require_known_tokens(rows, 8)
    with pytest.raises(DataError, match=r"has the token 7, and the model has 7, from 0"):
        require_known_tokens(rows, 7)


def test_the_guide_makes_rows_whose_lists_fit_their_answers(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[4] / "docs" / "guides" / "distillation.md").read_text()
    code = guide.split("```python\n")[1].split("```")[0]
    tokenizer, num = tiny_tokenizer(), []
    names: dict[str, Any] = {"torch": torch}
    exec(code, names)  # what a reader would paste

    class Uniform(torch.nn.Module):
        device = torch.device("cpu")

        def forward(self, ids: torch.Tensor) -> Any:
            num.append(ids.shape[1])
            logits = torch.nn.functional.one_hot(ids.roll(-1), len(tokenizer)) * 9.0
            return type("Output", (), {"logits": logits})

    plain = [{"prompt": "q", "completion": text} for text in ("a", "abcd", "two words")]
    made = [names["taught"](one, Uniform(), tokenizer, k=3) for one in plain]
    rows = load(tmp_path, made).train
    assert len(rows) == len(num) == 3
    for example in (rows[index] for index in range(3)):
        assert example.top is not None
        is_label = example.labels != IGNORE_INDEX
        likeliest = example.top.table(is_label, 1)[0][:, 0]
        assert likeliest.tolist() == example.input_ids[is_label].tolist()
