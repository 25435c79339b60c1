"""The tokens at which generation stops: those that end the trained answers, then the base's own.

A base model that is trained to chat ends its answers in `<|im_end|>`, while its config still says
`<|endoftext|>`: a server that uses this config never stops. So the trained tokens are written where
every server looks: `generation_config.json`, next to the adapter and in a merged model. It also has
what the chat template must be given for the prompt that answers were trained after, under the key
that some published models use; servers need flags for it (`finetune.data.switch`).
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.switch import TEMPLATE_KWARGS
from finetune.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GENERATION_CONFIG = "generation_config.json"
_OF_MODEL_CONFIG = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stops:
    """Where generation stops.

    Attributes:
        trained: Tokens that end the trained answers, the usual one first.
        base: Tokens at which the base model stops.
        template_kwargs: What the chat template must be given for the prompt of these answers.
    """

    trained: tuple[int, ...]
    base: tuple[int, ...]
    template_kwargs: Mapping[str, bool] = field(default_factory=dict)

    @property
    def ids(self) -> tuple[int, ...]:
        """All of them, the trained ones first."""
        return tuple(dict.fromkeys(self.trained + self.base))

    def shown(self, tokenizer: "PreTrainedTokenizerBase") -> str:
        """Return where answers end, in one line."""

        def names(ids: Iterable[int]) -> str:
            return ", ".join(f"{tokenizer.convert_ids_to_tokens(token)} ({token})" for token in ids)

        others = self.ids[len(self.trained) :]
        also = f"; generation stops at {names(others)} too" if others else ""
        if not self.trained:
            return f"No answer ends within `train.seq_len`, so no end is learned{also}"
        if len(self.trained) == 1:
            return f"Answers end with {names(self.trained)}{also}"
        return f"Answers end with different tokens: {names(self.trained)}{also}"


def cut_at(text: str, strings: Iterable[str]) -> str:
    """Return a text up to the first of some strings that end it."""
    found = [at for at in map(text.find, strings) if at >= 0]
    return text[: min(found, default=len(text))]


def eos_ids(fields: Mapping[str, Any], *, source: Path | str) -> tuple[int, ...]:
    """Return the tokens of `eos_token_id`, which is one, several or none.

    Raises:
        ModelError: It is something else.
    """
    value = fields.get("eos_token_id")
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(type(token) is int for token in ids):
        raise ModelError(
            f"eos_token_id is {value!r} in {source}",
            limit="it must be a token's number, or a list of them",
            hint=f"correct it in {source}",
        )
    return tuple(ids)


def with_eos(fields: Mapping[str, Any], ids: tuple[int, ...]) -> dict[str, Any]:
    """Return the fields of a generation config that stops at these tokens."""
    return {**fields, "eos_token_id": ids[0] if len(ids) == 1 else list(ids)}


def read_generation_config(folder: Path) -> dict[str, Any] | None:
    """Return the fields of a folder's generation config, None if it has none.

    Raises:
        ModelError: The file is damaged.
    """
    file = folder / GENERATION_CONFIG
    if not file.exists():
        return None
    try:
        fields = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _damaged(file, str(error)) from error
    if not isinstance(fields, dict):
        raise _damaged(file, f"it holds a {type(fields).__name__}")
    return fields


def template_kwargs_in(folder: Path) -> dict[str, bool]:
    """Return what a folder's generation config says that the chat template must be given.

    Raises:
        ModelError: The file is damaged.
    """
    found = (read_generation_config(folder) or {}).get(TEMPLATE_KWARGS, {})
    if not isinstance(found, dict) or not all(type(value) is bool for value in found.values()):
        raise _damaged(folder / GENERATION_CONFIG, f"{TEMPLATE_KWARGS} is {found!r}")
    return found


def write_generation_config(folder: Path, fields: Mapping[str, Any], stops: Stops) -> None:
    """Write a folder's generation config, with where to stop and what the template is given."""
    written = with_eos(fields, stops.ids)
    if stops.template_kwargs:
        written[TEMPLATE_KWARGS] = dict(stops.template_kwargs)
    text = json.dumps(written, indent=2) + "\n"
    (folder / GENERATION_CONFIG).write_text(text)


def merge_generation_config(base: Path, adapter: Path, folder: Path) -> None:
    """Let a merged model stop where the adapter was trained to, and where its base does.

    If the adapter has no generation config, the one copied from the base stays.

    Raises:
        ModelError: A file is damaged.
    """
    trained = read_generation_config(adapter)
    if trained is None:
        return
    fields = read_generation_config(base)
    if fields is None:  # transformers would make one of the model's config
        config = json.loads((base / "config.json").read_text())
        fields = {name: config[name] for name in _OF_MODEL_CONFIG if config.get(name) is not None}
    stops = Stops(
        trained=eos_ids(trained, source=adapter / GENERATION_CONFIG),
        base=eos_ids(fields, source=base / GENERATION_CONFIG),
        template_kwargs=template_kwargs_in(adapter),
    )
    if (stops.ids and stops.ids != stops.base) or stops.template_kwargs:
        write_generation_config(folder, fields, stops)


def _damaged(file: Path, problem: str) -> ModelError:
    return ModelError(
        f"{file} cannot be read: {problem}",
        limit="it must be a JSON object, as transformers writes it",
        hint=f"write it anew, or remove {file}: then the end of answers is taken from the template",
    )
