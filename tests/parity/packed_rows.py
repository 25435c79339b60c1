"""Rows of random tokens, packed, and what plain transformers computes for each of them alone."""

import copy

import torch
from peft import PeftModel

from tests.parity.steps import gradients

LENS = ((12, 5, 17), (3, 12, 12))


def rows_of(*lens: int, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, (1, n), generator=generator) for n in lens]


def packed(*rows: torch.Tensor) -> dict[str, torch.Tensor]:
    ids, lens = torch.cat(rows, dim=1), torch.tensor([row.shape[1] for row in rows])
    return {"input_ids": ids, "labels": ids.clone(), "row_lens": lens}


def plain_alone(model: PeftModel) -> tuple[float, dict[str, torch.Tensor]]:
    """Compute each row by itself, by transformers, and its loss as its text defines it."""
    model, loss = copy.deepcopy(model), 0.0
    rows = [row for m, lens in enumerate(LENS) for row in rows_of(*lens, seed=m)]
    num = sum(row.shape[1] - 1 for row in rows)
    for row in rows:
        logits_BTV = model(input_ids=row, use_cache=False).logits.float()
        log_BTV = logits_BTV[:, :-1].log_softmax(-1)
        part = -log_BTV.gather(-1, row[:, 1:, None]).sum() / num
        part.backward()
        loss += part.item()
    return loss, gradients(model)
