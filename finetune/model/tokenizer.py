"""The tokenizer of a model."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune.errors import ConfigError, ModelError, read_by_library
from finetune.model.config import VOCABULARY_FILES, tokenizer_folder
from finetune.recipe.sections import ModelSection

if TYPE_CHECKING:
    from transformers import LogitsProcessor, PreTrainedTokenizerBase


def load_tokenizer(section: ModelSection) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model and make sure that it can pad.

    Raises:
        ConfigError: No source was given.
        ModelError: There is no tokenizer at the source, or it is code of its own.
    """
    from transformers import AutoTokenizer

    source = section.tokenizer_source
    if source is None:
        raise ConfigError(
            "model.tokenizer: null, and `model.config` names no tokenizer",
            limit="rows must become tokens",
            hint="`model.tokenizer: DIR` or a hub id with the same vocabulary",
        )
    folder = tokenizer_folder(section)
    # for one without a vocabulary transformers would make up an empty one
    if not any((folder / name).exists() for name in VOCABULARY_FILES):
        raise ModelError(
            f"no tokenizer in {source}",
            limit=f"it must hold one of {', '.join(VOCABULARY_FILES)}",
            hint="`model.tokenizer: DIR` or a hub id",
        )
    what, limit = "cannot be read", "it must hold tokenizer.json, or the files that its class needs"
    hint = "download it again, or `model.tokenizer: DIR` or a hub id"
    if is_code(folder):
        what = "asks for code of its own repository"
        limit = "no code of a repository is run (trust_remote_code)"
        hint = "`model.tokenizer` of a model with the same vocabulary and a tokenizer.json"
    with read_by_library(
        f"the tokenizer in {source} {what}", error=ModelError, limit=limit, hint=hint
    ):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder),
            trust_remote_code=False,  # unasked, it would ask on the terminal
        )
        tokenizer.name_or_path = source
        if tokenizer.chat_template is None:
            tokenizer.chat_template = _processor_template(folder)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def is_code(folder: Path) -> bool:
    """Return whether a tokenizer names code of its own repository, which it may need."""
    with contextlib.suppress(OSError, ValueError):
        return "auto_map" in json.loads((folder / "tokenizer_config.json").read_bytes())
    return False


def _processor_template(folder: Path) -> str | None:
    """Return the template that older repositories of models for images keep for the processor."""
    with contextlib.suppress(FileNotFoundError):
        template: str = json.loads((folder / "chat_template.json").read_bytes())["chat_template"]
        return template
    return None


Choose = Callable[[Sequence[int], torch.Tensor], list[int]]
"""Returns a token for each of some rows, given their numbers and their logits (B, V)."""


def most_probable(rows: Sequence[int], logits_BV: torch.Tensor) -> list[int]:
    """Return the most probable token of each row."""
    del rows
    tokens: list[int] = logits_BV.argmax(-1).tolist()
    return tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Random choice of tokens, by transformers' own processors of logits."""

    temperature: float  # divisor of the logits
    top_k: int | None  # how many of the most probable tokens are kept; None for all
    # The most probable tokens are kept until their probabilities add up to this; None for all.
    top_p: float | None
    seed: int  # the seed of the random numbers

    def sampler(self) -> "Sampler":
        """Return what draws tokens, from the beginning of its random numbers."""
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        processors: list[LogitsProcessor] = [TemperatureLogitsWarper(self.temperature)]
        if self.top_k is not None:
            processors.append(TopKLogitsWarper(top_k=self.top_k))
        if self.top_p is not None:
            processors.append(TopPLogitsWarper(top_p=self.top_p))
        return Sampler(processors, seed=self.seed)


class Sampler:
    """Draws tokens on the host: each row from random numbers of its own, whatever is its batch.

    Row 0 draws what transformers' `generate` draws for it alone after `torch.manual_seed(seed)`.
    """

    def __init__(self, processors: Sequence["LogitsProcessor"], *, seed: int) -> None:
        """Keep the parts; nothing is drawn."""
        self._processors, self._seed = processors, seed
        self._generators: dict[int, torch.Generator] = {}

    def __call__(self, rows: Sequence[int], logits_BV: torch.Tensor) -> list[int]:
        """Draw a token for each row."""
        scores_BV = logits_BV.float().cpu()
        no_ids = torch.zeros((len(rows), 0), dtype=torch.long)  # these processors read none
        for process in self._processors:
            scores_BV = process(no_ids, scores_BV)
        probabilities_BV = scores_BV.softmax(-1)
        return [
            int(torch.multinomial(probabilities_BV[i], 1, generator=self._generator(row)))
            for i, row in enumerate(rows)
        ]

    def _generator(self, row: int) -> torch.Generator:
        if row not in self._generators:
            self._generators[row] = torch.Generator().manual_seed(self._seed + row)
        return self._generators[row]


def chosen_by(
    *, temperature: float, top_k: int | None, top_p: float | None, seed: int | None
) -> Choose:
    """Return how tokens are chosen; at temperature 0 the most probable one.

    Raises:
        ConfigError: A setting would have no effect.
    """
    if temperature:
        return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed or 0).sampler()
    given = {"--top-k": top_k, "--top-p": top_p, "--seed": seed}
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name} {value} at --temperature 0",
                limit="nothing is drawn there: each token is the most probable one",
                hint=f"`--temperature 0.7`, or leave {name} away",
            )
    return most_probable
