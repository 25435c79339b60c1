"""Answers from a model whose layers are streamed, with its key-value cache where it has one."""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import torch

from finetune.model.tokenizer import Choose, most_probable
from offload.errors import UnsupportedModelError

if TYPE_CHECKING:
    from offload.engine.engine import Engine

IsEnded = Callable[[int, Sequence[int]], bool]
"""Returns whether an answer has ended, given the number of its prompt and its tokens."""


def never(_row: int, _answer: Sequence[int]) -> bool:
    """Return False: answers end at their stop tokens and limits alone."""
    return False


def generate(  # noqa: PLR0913 - all that generating is
    engine: "Engine",
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    stop_ids: Collection[int],
    pad_id: int,
    batch_size: int,
    note: Callable[[str], None],
    choose: Choose = most_probable,
    is_ended: IsEnded = never,
    progress: Callable[[int], None] = lambda _num_ended: None,
) -> list[list[int]]:
    """Continue each prompt.

    Each new token is one pass over the layers for all rows of a batch. With a key-value cache it
    computes the newest token of each row; rows of one length share a cache, and none is padded. A
    model whose cache cannot be used computes whole rows for each token, and `note` reports why.

    Args:
        engine: An attached model, in `eval`.
        prompts: Token ids, of any lengths, at least one each.
        max_new_tokens: Tokens after which an answer is cut off; one number, or one per prompt.
        stop_ids: Tokens that end an answer; they are not part of it.
        pad_id: Token that pads rows where there is no cache; it is masked.
        batch_size: Prompts per pass.
        note: Reports that the model is computed without a cache.
        choose: Chooses the next tokens.
        is_ended: Ends answers in addition; the tokens that made it end are part of an answer.
        progress: Is called as answers grow, with the number of those that have ended.

    Returns:
        The new token ids of each prompt.
    """
    limits = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    answers: list[list[int]] = []
    has_cache = True
    for start in range(0, len(prompts), batch_size):
        rows = _Rows(
            prompts[start : start + batch_size],
            first=start,
            limits=limits[start : start + batch_size],
            stop_ids=frozenset(stop_ids),
            choose=choose,
            is_ended=is_ended,
            progress=progress,
        )
        if has_cache:
            try:
                _cached(engine, rows)
            except UnsupportedModelError as error:
                has_cache = False
                note(f"Generates without a key-value cache, more slowly: {error.what}")
        if not has_cache:
            _uncached(engine, rows, pad_id)
        answers += rows.shown
    return answers


class _Rows:
    """Prompts and what has been generated after each."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        first: int,
        limits: Sequence[int],
        stop_ids: frozenset[int],
        choose: Choose,
        is_ended: IsEnded,
        progress: Callable[[int], None],
    ) -> None:
        self._first, self._choose, self._is_ended = first, choose, is_ended
        self._progress = progress
        self.prompts = [list(prompt) for prompt in prompts]
        self.answers: list[list[int]] = [[] for _ in prompts]
        self._limits, self._stop_ids = list(limits), stop_ids
        self._has_ended = [limit < 1 for limit in limits]

    @property
    def open(self) -> list[int]:
        """The rows that go on."""
        return [i for i in range(len(self.prompts)) if self.is_open(i)]

    def is_open(self, row: int) -> bool:
        """Return whether a row goes on."""
        return not self._has_ended[row]

    def add(self, rows: Sequence[int], logits_BV: torch.Tensor) -> None:
        """Continue rows by a token each, those of them that go on."""
        numbers = [self._first + row for row in rows]
        for row, number, token in zip(rows, numbers, self._choose(numbers, logits_BV), strict=True):
            answer = self.answers[row]
            if self.is_open(row):
                answer.append(token)
                self._has_ended[row] = (
                    len(answer) >= self._limits[row]
                    or self._is_stopped(answer)
                    or self._is_ended(number, answer)
                )
        self._progress(self._first + sum(self._has_ended))

    @property
    def shown(self) -> list[list[int]]:
        """The answers without what ended them."""
        return [answer[:-1] if self._is_stopped(answer) else answer for answer in self.answers]

    def _is_stopped(self, answer: Sequence[int]) -> bool:
        return bool(answer) and answer[-1] in self._stop_ids


def _cached(engine: "Engine", rows: _Rows) -> None:
    """Generate with a cache for each group of prompts of one length."""
    groups: dict[int, list[int]] = {}
    for row in rows.open:
        groups.setdefault(len(rows.prompts[row]), []).append(row)
    given = {
        length: torch.tensor([rows.prompts[row] for row in group])
        for length, group in groups.items()
    }
    with engine.generation() as generation:
        while given:
            logits = generation.next_logits(given)
            given = {}
            for length, logits_BV in logits.items():
                group = groups[length]
                rows.add(group, logits_BV)
                if any(rows.is_open(row) for row in group):
                    given[length] = torch.tensor([[rows.answers[row][-1]] for row in group])
                else:
                    generation.drop(length)


def _uncached(engine: "Engine", rows: _Rows, pad_id: int) -> None:
    """Generate by passes over all tokens, padded on the right."""
    while going := rows.open:
        tokens = [rows.prompts[row] + rows.answers[row] for row in going]
        longest = max(map(len, tokens))
        input_ids = torch.tensor([[*row, *[pad_id] * (longest - len(row))] for row in tokens])
        lengths = torch.tensor([len(row) for row in tokens])
        attention_mask = (torch.arange(longest) < lengths.unsqueeze(1)).long()
        result = engine.forward(
            {"input_ids": input_ids, "attention_mask": attention_mask}, positions=lengths - 1
        )
        assert result.logits is not None
        rows.add(going, result.logits[:, 0])
