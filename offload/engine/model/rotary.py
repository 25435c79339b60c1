"""Rotary embeddings whose frequencies depend on the length of a row: LongRoPE and dynamic NTK.

Problem. transformers writes the frequencies of the longest row of a call into the module: in place
for LongRoPE, and for dynamic NTK together with the greatest length seen so far. A row would be
computed with the frequencies of a row before it, or of a longer one in its micro-batch.

Idea. While the model's own forward runs without its layers, these modules start each call from the
frequencies of their config, and compute rows that are padded to one length one by one, each up to
its own last token. So a row has the frequencies that it has alone.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.engine.meanwhile import meanwhile

_ORIGINAL, _CACHED = "original_inv_freq", "max_seq_len_cached"


class LengthRotary:
    """The rotary modules of a model, outside its layers, that depend on a row's length."""

    def __init__(self, decoder: nn.Module, modules: Sequence[nn.Module]) -> None:
        """Find them.

        Args:
            decoder: The module that calls them, which is given the rows and their mask.
            modules: All modules outside the layers.
        """
        self._decoder = decoder
        self._modules = [module for module in modules if _depends_on_length(module)]
        self._lengths = {length for module in self._modules for length in _switch_lengths(module)}
        self._mask_BT: torch.Tensor | None = None

    def switches(self, num_before: int, num_after: int) -> bool:
        """Return whether LongRoPE has other frequencies for a row once it has grown.

        Args:
            num_before: Tokens of the row before.
            num_after: Tokens of it now.
        """
        return any(num_before <= length < num_after for length in self._lengths)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compute each row in a block as it is computed alone."""
        if not self._modules:
            yield
            return
        forwards = [{"forward": partial(self._forward, m, m.forward)} for m in self._modules]
        hook = self._decoder.register_forward_pre_hook(self._note_mask, with_kwargs=True)
        try:
            with meanwhile(*zip(map(vars, self._modules), forwards, strict=True)):
                yield
        finally:
            hook.remove()
            for module in self._modules:
                _reset(module)

    def _note_mask(self, _decoder: nn.Module, _args: Any, given: Mapping[str, Any]) -> None:
        mask = given.get("attention_mask")
        self._mask_BT = mask if isinstance(mask, torch.Tensor) else None

    def _forward(
        self,
        module: nn.Module,
        compute: Callable[..., Any],
        x: torch.Tensor,
        position_ids: torch.Tensor,
        **more: Any,
    ) -> Any:
        rows_dim = position_ids.dim() - 2
        if self._mask_BT is None or self._mask_BT.shape[0] == 1:
            _reset(module)
            return compute(x, position_ids, **more)
        mask_BT, rows = self._mask_BT.bool(), list[Any]()
        for b in range(mask_BT.shape[0]):
            own = position_ids.narrow(rows_dim, b if position_ids.shape[rows_dim] > 1 else 0, 1)
            last = torch.where(mask_BT[b], own, 0).amax(dim=-1, keepdim=True)
            _reset(module)
            rows.append(compute(x[b : b + 1], torch.minimum(own, last), **more))
        if isinstance(rows[0], torch.Tensor):
            return torch.cat(rows, dim=rows_dim)
        return tuple(torch.cat(parts, dim=rows_dim) for parts in zip(*rows, strict=True))


def _depends_on_length(module: nn.Module) -> bool:
    kinds = getattr(module, "rope_type", None)
    kinds = kinds.values() if isinstance(kinds, dict) else (kinds,)
    return any(kind == "longrope" or "dynamic" in str(kind) for kind in kinds)


def _switch_lengths(module: Any) -> set[int]:
    """Return the lengths above which a rotary module takes the long factors of LongRoPE."""
    rope = module.config.rope_parameters
    parts = [rope] if "rope_type" in rope else rope.values()  # or by type of layer
    name = "original_max_position_embeddings"
    return {part[name] for part in parts if part["rope_type"] == "longrope"}


def _reset(module: nn.Module) -> None:
    """Set the frequencies to those of the config, in memory of their own."""
    for name, original in list(module.named_buffers(recurse=False)):
        if name.endswith(_ORIGINAL):
            module._buffers[name.replace(_ORIGINAL, "inv_freq")] = original.clone()
    for name in list(vars(module)):
        if name.endswith(_CACHED):
            setattr(module, name, getattr(module, "original_max_seq_len"))  # noqa: B009 - untyped
