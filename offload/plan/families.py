"""The model families: how each departs from a plain decoder, and typed reading of their configs.

A Hugging Face config names the sizes; which tensors follow from them differs by family in a few
ways: biases, norms on queries and keys, attention windows, where the width of an expert stands.
`FAMILIES` lists exactly these. Defaults are those of transformers 5; sizes that make a model what
it is have none and must be in the config.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

from offload.errors import UnsupportedModelError

T = TypeVar("T")


class Config:
    """Typed access to a config, with errors that name the key."""

    def __init__(self, values: Mapping[str, object], model_type: str) -> None:
        """Keep the parsed config."""
        self._values = values
        self._model_type = model_type

    def size(self, *keys: str) -> int:
        """Return the first of these keys that has a value: a size that cannot be guessed."""
        for key in keys:
            if self._values.get(key) is not None:
                return self.size_or(key, 0)
        raise UnsupportedModelError(
            f"the config of a {self._model_type} model has no `{keys[0]}`",
            limit="this size cannot be guessed",
            hint=f'add `"{keys[0]}": ...` to config.json',
        )

    def size_or(self, key: str, default: int) -> int:
        """Return a size, or the default where the key is missing or null."""
        return self._typed(key, int, default, "a whole number")

    def flag(self, key: str, *, default: bool) -> bool:
        """Return a boolean, or the default where the key is missing or null."""
        return self._typed(key, bool, default, "true or false")

    def names(self, key: str) -> list[object]:
        """Return a list, empty where the key is missing or null."""
        return self._typed(key, list, [], "a list")

    def is_null(self, key: str) -> bool:
        """Whether the key is there without a value."""
        return self._values.get(key, 0) is None

    def _typed(self, key: str, kind: type[T], default: T, limit: str) -> T:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise UnsupportedModelError(
                f"`{key}` is {value!r} in the config of a {self._model_type} model",
                limit=f"it must be {limit}",
                hint=f"correct `{key}` in config.json",
            )
        return value


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """How a model type departs from the plain decoder; values are those of missing keys.

    `expert_width` is the config key of an expert's width, None in dense families. `slides` tells
    whether layer i has a window where the config lists no layer types.
    """

    max_positions: int = 131072
    kv_heads: int | None = None
    head_dim: int | None = None
    is_tied: bool = False
    bias_key: str | None = "attention_bias"
    has_bias: bool = False
    is_output_biased: bool = True
    qk_norm: Literal["head", "whole"] | None = None
    norms: int = 2
    has_sinks: bool = False
    expert_width: str | None = None
    is_moe_biased: bool = False
    window: int | None = None
    has_window_switch: bool = False
    slides: Callable[[int, Config], bool] = lambda _i, _config: True


def _above(i: int, config: Config) -> bool:
    return i >= config.size_or("max_window_layers", 28)


_qwen = partial(Family, max_positions=32768, window=4096, has_window_switch=True)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(max_positions=2048),
    "mistral": Family(kv_heads=8, bias_key=None, window=4096),
    "mixtral": Family(kv_heads=8, bias_key=None, expert_width="intermediate_size"),
    "qwen2": _qwen(
        kv_heads=32, bias_key=None, has_bias=True, is_output_biased=False, slides=_above
    ),
    "qwen2_moe": _qwen(
        kv_heads=16,
        bias_key="qkv_bias",
        has_bias=True,
        is_output_biased=False,
        expert_width="moe_intermediate_size",
        slides=lambda i, config: i % 2 == 0 and not _above(i, config),
    ),
    "qwen3": _qwen(kv_heads=32, head_dim=128, qk_norm="head", slides=_above),
    "qwen3_moe": _qwen(kv_heads=4, qk_norm="head", expert_width="moe_intermediate_size"),
    "olmoe": Family(max_positions=4096, qk_norm="whole", expert_width="intermediate_size"),
    "gemma3_text": Family(
        kv_heads=4,
        head_dim=256,
        is_tied=True,
        qk_norm="head",
        norms=4,
        window=4096,
        slides=lambda i, config: (i + 1) % config.size_or("sliding_window_pattern", 6) != 0,
    ),
    "gpt_oss": Family(
        kv_heads=8,
        head_dim=64,
        has_bias=True,
        has_sinks=True,
        expert_width="intermediate_size",
        is_moe_biased=True,
        window=128,
        slides=lambda i, _config: i % 2 == 0,
    ),
}
