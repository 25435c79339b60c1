"""Virtual tokens in front of each row, whose embeddings train: prompt tuning and p-tuning, by peft.

Idea. A row begins with tokens V, V + 1, ..., which the vocabulary of V tokens does not have. The
embedding looks them up in what peft's own encoder returns, and all others where it always did. So
front, layers, packing and plan see rows that are longer by these tokens, and nothing else.

peft would put the same embeddings before those of a row itself. Its encoder is made a part of the
embedding, since what trains is inside the model.

Shapes: B rows, T tokens, D model dim, P virtual tokens.

Source: arXiv:2104.08691 (prompt tuning), arXiv:2103.10385 (p-tuning).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from peft import (
    PeftModel,
    get_peft_model,
)
from torch import nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from finetune.errors import CheckpointError, ConfigError, read_by_library
from finetune.recipe.adapters import AdapterSection
from finetune.run.adapter_folder import require_adapter_files
from offload.engine.generation import cache_argument
from offload.engine.model.layers import LayeredModel
from offload.engine.model.recorders import ByLayer, FrontArguments

ENCODER = "virtual_tokens"
"""Name of peft's encoder within the embedding."""


def add_virtual_tokens(model: PreTrainedModel, adapter: AdapterSection, *, seed: int) -> PeftModel:
    """Freeze the model and add virtual tokens, with an encoder drawn from `seed`.

    Args:
        model: Without adapters.
        adapter: An adapter of virtual tokens in the rows.
        seed: Of the encoder's weights.

    Raises:
        ConfigError: The model looks tokens up elsewhere too, where virtual ones are not.
    """
    config: Any = model.config.get_text_config()
    embedding: Any = model.get_input_embeddings()
    of = ""
    if getattr(config, "hidden_size_per_layer_input", 0):
        of = "hidden_size_per_layer_input"
    elif "hash_moe" in (getattr(config, "mlp_layer_types", None) or ()):
        of = "hash_moe layers"
    elif embedding.num_embeddings != config.vocab_size:
        of = f"vocab_size {config.vocab_size}"
    if of:
        raise ConfigError(
            f"adapter.method: {adapter.method} for a {config.model_type} model",
            limit=f"by its config's {of} it has other tables of tokens than its embedding of"
            f" {embedding.num_embeddings:,}, which have no virtual ones",
            hint="`adapter.method: lora`",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        adapted: PeftModel = get_peft_model(model, adapter.peft_config(task_type="CAUSAL_LM"))
    encoder: Any = adapted.prompt_encoder[adapted.active_adapter]
    embedding.add_module(ENCODER, encoder)
    embedding.num_virtual_tokens = adapter.num_in_front
    vars(embedding)["forward"] = MethodType(_embedded, embedding)
    return adapted


def _embedded(embedding: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """Return the embeddings (B, T, D) of tokens, virtual ones among them."""
    num, encoder = embedding.num_embeddings, getattr(embedding, ENCODER)
    found_BTD: torch.Tensor = type(embedding).forward(embedding, ids_BT.clamp(max=num - 1))
    tokens_P = torch.arange(embedding.num_virtual_tokens, device=ids_BT.device)
    table_PD = encoder(tokens_P.unsqueeze(0))[0]
    own_BTD = functional.embedding((ids_BT - num).clamp(min=0), table_PD).to(found_BTD.dtype)
    return torch.where((ids_BT >= num).unsqueeze(-1), own_BTD, found_BTD)


# ---------------------------------------------------------------------------------------------
# Prefix tuning: keys and values that train, in front of those of each layer, by peft.
#
# Idea. peft's encoder returns keys and values of P tokens for each layer, and a model takes them as
# what it has kept of tokens before the row: its positions and masks count them. transformers' cache
# would keep the row's own keys as well, and a layer that is computed again for its gradients would
# find them there twice. So the model is given a past that keeps nothing: each layer gets its own
# part and returns it in front of its keys and values, however often it is computed.
#
# The encoder runs once for a micro-batch, before the layers. Its table is looked up for one row,
# and rows share the result in float32, so that the gradients of all rows are summed as peft sums
# them.
#
# Shapes: B rows, T tokens, P tokens of the prefix, L layers, H heads of keys, K features of a head.
#
# Source: arXiv:2101.00190.

PREFIX_ENCODER = "prefix_tuning"
"""Name of peft's encoder within the model."""
_MASK, _POSITIONS = "attention_mask", "position_ids"


def add_prefix(model: PreTrainedModel, adapter: AdapterSection, *, seed: int) -> PeftModel:
    """Freeze the model and add a prefix to each layer, with an encoder drawn from `seed`.

    Args:
        model: Without adapters.
        adapter: An adapter of virtual tokens' keys and values.
        seed: Of the encoder's weights.

    Raises:
        ConfigError: Not all layers of the model keep plain keys and values.
    """
    config = adapter.peft_config(task_type="CAUSAL_LM")
    require_plain_cache(model, adapter)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapted: PeftModel = get_peft_model(model, config)
        except ValueError as error:  # of a config that names sizes as no other does
            why_not = f"peft does not find the size of its keys: {error}"
            raise _refusal(model, adapter, why_not) from error
    num_layers = len(LayeredModel(model).layers)
    if config.num_layers != num_layers:
        why_not = f"it has {num_layers} layers, of which peft counts {config.num_layers}"
        raise _refusal(model, adapter, why_not)
    _put_in_front(adapted)
    return adapted


def load_prefix(model: PreTrainedModel, folder: Path) -> None:
    """Put a saved prefix on a model, for inference.

    Args:
        model: Without adapters.
        folder: In peft's format.

    Raises:
        CheckpointError: It is damaged, or of another model.
    """
    require_adapter_files(folder)
    with read_by_library(
        f"{folder} cannot be put on this model",
        error=CheckpointError,
        limit="the adapter must be of this model",
        hint="name the model that the prefix was trained on",
    ):
        adapted = PeftModel.from_pretrained(model, str(folder), local_files_only=True)
    _put_in_front(adapted)


def _put_in_front(adapted: PeftModel) -> None:
    base: Any = adapted.get_base_model()
    name = adapted.active_adapter
    encoder, config = adapted.prompt_encoder[name], adapted.peft_config[name]
    base.add_module(PREFIX_ENCODER, PrefixArguments(encoder, config, base))


def _refusal(model: PreTrainedModel, adapter: AdapterSection, why_not: str) -> ConfigError:
    return ConfigError(
        f"adapter.method: {adapter.method} for a {model.config.model_type} model",
        limit=f"{why_not}, and a prefix is plain keys and values of each layer",
        hint="`adapter.method: lora`",
    )


def require_plain_cache(model: PreTrainedModel, adapter: AdapterSection) -> None:
    """Refuse a model, with or without weights, whose layers keep no plain keys and values.

    Raises:
        ConfigError: They keep something else.
    """
    if why_not := _why_not(model):
        raise _refusal(model, adapter, why_not)


def _why_not(model: Any) -> str:
    """Return why a model's cache is not keys and values of whole heads; nothing if it is that."""
    if cache_argument(model) is None:
        return "it takes no cache of keys and values"
    if model.config.get_text_config(decoder=True).to_dict().get("kv_lora_rank") is not None:
        return "its cache is that of latent attention"
    try:
        layers = DynamicCache(config=model.config).layers
    except AttributeError as error:
        return f"its cache is not of one stack of layers: {error}"
    others = {type(layer) for layer in layers} - {DynamicLayer, DynamicSlidingWindowLayer}
    return f"its cache is {' and '.join(sorted(x.__name__ for x in others))}" if others else ""


class _LayerPast(tuple[torch.Tensor, ...]):
    """Keys and values (1, H, P, K) in front of one layer's own: a cache that keeps nothing else.

    As a container it shows a visit its two tensors, which are cut from the front like any others.
    """

    __slots__ = ()

    def update(
        self, keys_BHTK: torch.Tensor, values_BHTK: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the keys and values of rows with those of the prefix in front."""
        return tuple(map(_with_prefix, self, (keys_BHTK, values_BHTK)))

    def get_seq_length(self, _layer: int = 0) -> int:
        """Return P."""
        return self[0].shape[-2]


class _Past(DynamicCache, ByLayer):
    """Keys and values of all layers for one row, of which the part before the layers reads sizes.

    Layers that slide have all of them too: masks count them.
    """

    def of_layer(self, layer: int) -> _LayerPast:
        """Return those of one layer."""
        own: Any = self.layers[layer]
        return _LayerPast((own.keys, own.values))


class PrefixArguments(FrontArguments):
    """Gives a model the keys and values of its prefix, and counts them in mask and positions."""

    def __init__(self, encoder: nn.Module, config: Any, model: Any) -> None:
        """Keep peft's encoder, whose weights train.

        Args:
            encoder: Of the prefix.
            config: Its own, as peft has completed it.
            model: The model that the prefix is in front of.
        """
        super().__init__()
        self.encoder: Any = encoder
        self.is_on = True
        self._is_saved: bool = config.inference_mode
        self._num_tokens: int = config.num_virtual_tokens
        self._num_heads: int = config.num_attention_heads
        self._num_layers: int = config.num_layers
        self._dtype: torch.dtype = model.dtype  # of the keys in its own cache
        past = cache_argument(model)
        assert past is not None, "`require_plain_cache` before"
        self._past = past

    def forward(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of the model's forward for rows with the prefix in front.

        Args:
            given: Those for rows alone; a cache among them is filled if it is empty.
        """
        if not self.is_on:
            return given
        input_ids_BT = given["input_ids"]
        mask_BT, positions_BT = given.get(_MASK), given.get(_POSITIONS)
        more: dict[str, Any] = {}
        if mask_BT is not None:
            ones_BP = mask_BT.new_ones(len(mask_BT), self._num_tokens)
            more[_MASK] = torch.cat([ones_BP, mask_BT], dim=1)
        if positions_BT is not None:
            more[_POSITIONS] = positions_BT + self._num_tokens
        cache = given.get(self._past)
        if cache is None:
            more[self._past] = _Past(self._pairs(input_ids_BT.device))
        elif not cache.get_seq_length():
            for layer, pair in enumerate(self._pairs(input_ids_BT.device)):
                of_rows = [x.expand(len(input_ids_BT), -1, -1, -1).to(self._dtype) for x in pair]
                cache.update(*of_rows, layer)
        return {**given, **more}

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Compute the model without its prefix in this context."""
        self.is_on = False
        try:
            yield
        finally:
            self.is_on = True

    def _pairs(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values (1, H, P, K) of each layer."""
        tokens_1P = torch.arange(self._num_tokens, device=device).unsqueeze(0)
        is_table = self._is_saved  # of what the encoder returned, when it was saved
        encoder = self.encoder.embedding if is_table else self.encoder
        by_token: torch.Tensor = encoder(tokens_1P)  # (1, P, 2L * H * K)
        by_head = by_token.unflatten(-1, (2 * self._num_layers, self._num_heads, -1))
        keys_and_values = by_head.permute(2, 0, 3, 1, 4).unbind()
        return list(zip(keys_and_values[::2], keys_and_values[1::2], strict=True))


def _with_prefix(own_1HPK: torch.Tensor, of_rows_BHTK: torch.Tensor) -> torch.Tensor:
    """Return keys or values (B, H, P + T, K) of rows with those of the prefix in front.

    Raises:
        ConfigError: The layer has other heads.
    """
    num, _, *size = of_rows_BHTK.transpose(1, 2).shape
    _, _, *own_size = own_1HPK.transpose(1, 2).shape
    if size != own_size:
        raise ConfigError(
            f"a prefix in front of a layer's keys or values of heads and features {tuple(size)}",
            limit=f"peft's prefix has {tuple(own_size)} in each layer",
            hint="`adapter.method: lora`",
        )
    own_BHPK = own_1HPK.expand(num, -1, -1, -1).to(of_rows_BHTK.dtype)
    return torch.cat([own_BHPK, of_rows_BHTK], dim=-2)
