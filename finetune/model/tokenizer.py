"""The tokenizer of a model."""

from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import ConfigError, ModelError, read_by_library
from finetune.model.config import cached_file, is_hub_reachable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_VOCABULARY_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(source: str | None) -> "PreTrainedTokenizerBase":
    """Load a tokenizer and make sure that it can pad.

    Raises:
        ConfigError: No source was given.
        ModelError: There is no tokenizer at the source.
    """
    from transformers import AutoTokenizer

    if source is None:
        raise ConfigError(
            "model.tokenizer: null, and `model.config` names no tokenizer",
            limit="rows must become tokens",
            hint="`model.tokenizer: DIR` or a hub id with the same vocabulary",
        )
    folder = Path(source)
    if folder.is_dir():
        _require_vocabulary(folder)
    elif cached_file(source, "tokenizer_config.json") is None:
        _require_hub(source)
    with read_by_library(
        f"the tokenizer in {source} cannot be read",
        error=ModelError,
        limit="it must hold tokenizer.json, or the files that its class needs",
        hint="download it again, or `model.tokenizer: DIR` or a hub id",
    ):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source,
            trust_remote_code=False,  # unasked, it would ask on the terminal
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _require_vocabulary(folder: Path) -> None:
    """Refuse a folder for which transformers would make up an empty tokenizer."""
    if not any((folder / name).exists() for name in _VOCABULARY_FILES):
        raise ModelError(
            f"no tokenizer in {folder}",
            limit=f"it must hold one of {', '.join(_VOCABULARY_FILES)}",
            hint="`model.tokenizer: DIR` or a hub id",
        )


def _require_hub(source: str) -> None:
    if not is_hub_reachable():
        raise ModelError(
            f"the tokenizer {source} is no local directory and not in the cache",
            limit="the Hugging Face hub cannot be reached",
            hint="`model.tokenizer: DIR` with a downloaded tokenizer",
        )
