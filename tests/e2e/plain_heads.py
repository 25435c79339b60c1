"""Classes of texts by plain transformers, and a head or an adapter trained by plain torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.e2e.classifying import NUM_CLASSES


def cosine(step: int, num_steps: int) -> float:
    return 0.5 * (1 + math.cos(math.pi * step / num_steps))


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Rows and a model, by transformers alone."""

    model: Any
    ids: list[torch.Tensor]
    labels: torch.Tensor

    @classmethod
    def of(cls, model_dir: Path, rows: list[dict[str, Any]], *, seed: int) -> "Plain":
        tokenizer = AutoTokenizer.from_pretrained(model_dir)
        model: Any = AutoModelForSequenceClassification.from_pretrained(
            model_dir, num_labels=NUM_CLASSES, dtype=torch.float32
        )
        torch.manual_seed(seed)  # as transformers draws a head
        torch.nn.init.normal_(model.score.weight, std=model.config.initializer_range)
        texts = [tokenizer(row["text"])["input_ids"] for row in rows]
        ids = [torch.tensor([[*text, tokenizer.eos_token_id]]) for text in texts]
        return cls(model=model, ids=ids, labels=torch.tensor([row["label"] for row in rows]))

    def features(self) -> torch.Tensor:
        with torch.no_grad():
            outputs = [self.model.model(input_ids=one).last_hidden_state for one in self.ids]
        return torch.cat([output[:, -1] for output in outputs])

    def logits(self, model: Any) -> torch.Tensor:
        return torch.cat([model(input_ids=one).logits for one in self.ids])


def steps_of(
    parameters: list[Any],
    outputs: Callable[[], torch.Tensor],
    labels: torch.Tensor,
    lr: float,
    num: int,
) -> list[tuple[float, float]]:
    """Train with torch's AdamW; return loss and accuracy of each step."""
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.0)
    found = []
    for step in range(num):
        logits = outputs()
        loss = functional.cross_entropy(logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.param_groups[0]["lr"] = lr * cosine(step, num)
        optimizer.step()
        optimizer.zero_grad()
        found.append((loss.item(), (logits.argmax(1) == labels).float().mean().item()))
    return found
