"""What a generation gives for two groups of rows, next to transformers' own with its own cache."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import offload
from offload.engine.engine import Engine
from offload.engine.generation import Generation

NUM_TOKENS = 6


def prompts() -> dict[int, torch.Tensor]:
    """Return two groups of rows; the second goes on past a window of 8."""
    generator = torch.Generator().manual_seed(3)
    shapes = {0: (2, 5), 1: (1, 11)}
    return {group: torch.randint(3, 64, shapes[group], generator=generator) for group in shapes}


@contextmanager
def attached(model: nn.Module, *, num_slots: int = 2, **options: Any) -> Iterator[Engine]:
    engine = offload.attach(model, num_slots=num_slots, device="cpu", **options)
    try:
        yield engine
    finally:
        engine.detach()


Answers = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By group, the logits (B, T, V) and the tokens (B, T) that were generated."""


def generated(generation: Generation, given: Mapping[int, torch.Tensor]) -> Answers:
    logits: dict[int, list[torch.Tensor]] = {group: [] for group in given}
    for _ in range(NUM_TOKENS):
        found = generation.next_logits(given)
        given = {group: logits_BV.argmax(-1, keepdim=True) for group, logits_BV in found.items()}
        for group, logits_BV in found.items():
            logits[group].append(logits_BV)
    stacked = {group: torch.stack(steps, 1) for group, steps in logits.items()}
    return {group: (logits_BTV, logits_BTV.argmax(-1)) for group, logits_BTV in stacked.items()}


def plain(model: Any) -> Answers:
    """Return what transformers' own `generate` gives, a group at a time."""
    answers = {}
    for group, input_ids in prompts().items():
        output = model.generate(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=NUM_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        tokens = output.sequences[:, input_ids.shape[1] :]
        answers[group] = torch.stack(output.logits, 1), tokens
    return answers
