"""`sluice chat` by typed lines, and a conversation with plain transformers and peft."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import run

NEW_TOKENS = 6


class Plain:
    """A conversation without anything of ours."""

    def __init__(self, model_dir: Path, adapter: Path | None) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._model = (PeftModel.from_pretrained(model, str(adapter)) if adapter else model).eval()

    def answer(self, turns: Sequence[dict[str, str]]) -> str:
        ids = self._tokenizer.apply_chat_template(
            list(turns),
            add_generation_prompt=True,
            enable_thinking=False,  # as trained: the rows have no reasoning
            return_dict=False,
        )
        end = self._tokenizer.convert_tokens_to_ids("<|im_end|>")
        new: list[int] = []
        # not by `generate`, which leaves virtual tokens out (peft 0.21.2 on transformers 5.24)
        while len(new) < NEW_TOKENS and end not in new:
            logits = self._model(input_ids=torch.tensor([ids + new])).logits
            new.append(int(logits[0, -1].argmax()))
        return str(self._tokenizer.decode(new, skip_special_tokens=True))


def talk(
    lines: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    *words: object,
    num_new: int = NEW_TOKENS,
) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return run("chat", *words, "--max-new-tokens", str(num_new))
