"""Greedy answers from a model whose layers are streamed."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from offload.engine.engine import Engine


def generate(
    engine: "Engine",
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    pad_id: int,
    batch_size: int,
) -> list[list[int]]:
    """Continue each prompt with the most probable tokens, without a cache of keys and values.

    Every new token is one pass over all rows of a batch and all layers, so the weights cross the
    link once per token and batch: meant for samples and short answers, not for serving.

    Args:
        engine: An attached model.
        prompts: Token ids, of any lengths.
        max_new_tokens: Tokens after which an answer is cut off.
        stop_ids: Tokens that end an answer; they are not part of it.
        pad_id: Token that pads rows; it is masked.
        batch_size: Prompts per pass.

    Returns:
        The new token ids of each prompt.
    """
    answers: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        batch = [list(prompt) for prompt in prompts[start : start + batch_size]]
        answers += _generate_batch(engine, batch, max_new_tokens, stop_ids, pad_id)
    return answers


def _generate_batch(
    engine: "Engine",
    rows: list[list[int]],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    pad_id: int,
) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in rows]
    open_rows = list(range(len(rows)))
    for _ in range(max_new_tokens):
        tokens = [rows[i] + answers[i] for i in open_rows]
        for i, token in zip(open_rows, _next_tokens(engine, tokens, pad_id), strict=True):
            answers[i].append(token)
        open_rows = [i for i in open_rows if answers[i][-1] not in stop_ids]
        if not open_rows:
            break
    return [answer[:-1] if answer and answer[-1] in stop_ids else answer for answer in answers]


def _next_tokens(engine: "Engine", rows: Sequence[Sequence[int]], pad_id: int) -> list[int]:
    longest = max(map(len, rows))
    input_ids = torch.tensor([[*row, *[pad_id] * (longest - len(row))] for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    attention_mask = (torch.arange(longest) < lengths.unsqueeze(1)).long()
    result = engine.forward(
        {"input_ids": input_ids, "attention_mask": attention_mask}, positions=lengths - 1
    )
    assert result.logits is not None
    next_ids: list[int] = result.logits[:, 0].argmax(-1).tolist()
    return next_ids
