"""All weights trained by two processes, and what they are compared with."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from tests.e2e.forked import Forked
from tests.e2e.full_runs import weights
from tests.e2e.runs import rows_of

REORDER = 1e-5  # sums are made in another order
TEXTS = [(f"what follows {n}{'!' * (n % 5)}", f"{n + 1}" * (1 + n % 3)) for n in range(6)]


def assert_as_one(two: Path, one: Path, *, apart: float = REORDER) -> None:
    """Compare losses, norms and weights of two runs whose gradients are summed in other orders."""
    for mine, other in zip(rows_of(two), rows_of(one), strict=True):
        for name in ("loss", "grad_norm", "eval_loss"):
            if name in other:
                assert mine[name] == pytest.approx(other[name], rel=apart), name
        assert mine["num_label_tokens"] == other["num_label_tokens"]
    found, expected = weights(two), weights(one)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = (found[name].double() - tensor.double()).norm() / tensor.double().norm()
        assert error <= apart, name


def start_two(forked: Forked, *words: object, **how: Any) -> None:
    ranks = forked.start_ranks(*words, **how)
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]


def plain_run(
    model: nn.Module, rows: Sequence[tuple[list[int], int]], optimizer: torch.optim.Optimizer
) -> tuple[list[float], list[float]]:
    """Train on all rows in each step, one by one; return losses and norms before clipping."""
    losses, norms = [], []
    total = sum(len(ids) - num_prompt for ids, num_prompt in rows)
    for _ in range(6):
        loss = 0.0
        for ids, num_prompt in rows:
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
            own = nn.functional.cross_entropy(
                logits[num_prompt - 1 : -1], torch.tensor(ids[num_prompt:]), reduction="sum"
            )
            (own / total).backward()
            loss += own.item() / total
        losses.append(loss)
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms


def six_rows(folder: Path) -> Path:
    """Write six rows: those of a whole step."""
    file = folder / "six.jsonl"
    file.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in TEXTS))
    return file


def six_rows_as_tokens(model_dir: Path) -> list[tuple[list[int], int]]:
    """Return the tokens of each of them, and how many of these are its prompt's."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    rows = []
    for question, answer in TEXTS:
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        prompt += "<think>\n\n</think>\n\n"
        ids = [tokenizer.encode(text) for text in (prompt, f"{answer}<|im_end|>")]
        rows.append((ids[0] + ids[1], len(ids[0])))
    return rows
