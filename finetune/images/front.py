"""Images of rows, given to the model's own forward: from tokens V, V + 1, ... to features.

Idea. A model's forward takes what its tower returned in place of pixels. So the tower need not be
there: a child of the model finds the tokens of images, puts the model's own token for
images in their place, and passes their features, and where they are, as the model's processor and
tower would. Each family's masks, positions and placing stay its own code.

Positions of several axes (M-RoPE) are computed by the model's own function, and passed. What it
keeps of them between calls (`rope_deltas`) is never used, for it is that of another batch.

Features that are added after the first layers (deepstack) are arguments of these layers, one of
each, zero where there is no image. So each layer adds its own, whenever it is computed.

A trial may cut an image. The rest of it is tokens with features, but positions and masks count them
as text, as an image is only known whole.

Shapes: B rows, T tokens, D model dim, N tokens of images.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MethodType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from finetune.errors import DataError, ModelError
from finetune.images.features import Features, Images
from offload.engine.generation import cache_argument
from offload.engine.model.layers import LayeredModel
from offload.engine.model.recorders import ByLayer, FrontArguments

if TYPE_CHECKING:
    from transformers import PreTrainedModel

EXACT_TYPES = frozenset(
    (
        "aya_vision",
        "cohere2_vision",
        "exaone4_5",
        "gemma3",
        "gemma4",
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "glm5_next",
        "glm_ocr",
        "hyperclovax_vision_v2",
        "idefics3",
        "internvl",
        "kimi_k25",
        "lfm2_vl",
        "lfm3_vl",
        "lighton_ocr",
        "llava",
        "minimax_m3_vl",
        "mistral3",
        "mistral_large4",
        "muse_glimmer",
        "paddleocr_vl",
        "qwen2_5_vl",
        "qwen2_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen4_exp",
        "smolvlm",
    )
)
"""Types of models whose gradients from features are those from pixels: `tests.parity.test_images`
compares them."""

ARGUMENTS = "image_arguments"
"""Name of the child of a model that gives it its images."""
_ADDED = "added_features"
_MASK, _POSITIONS = "attention_mask", "position_ids"


def require_exact(model_type: str) -> None:
    """Refuse a type of model whose gradients from images were not compared.

    Raises:
        ModelError: It is one.
    """
    if model_type not in EXACT_TYPES:
        raise ModelError(
            f"rows with images for a {model_type} model",
            limit="its gradients from images were not compared with plain transformers",
            hint=f"rows without images, or a model of type {', '.join(sorted(EXACT_TYPES))}",
        )


def add_images(model: "PreTrainedModel", images: Images) -> None:
    """Take tokens from `images.first_id` on for images, before the model gets its adapter.

    Args:
        model: The model without its wrapper; its tower may be without weights.
        images: Features of all images of its rows.

    Raises:
        ModelError: Images of such a model were not compared.
    """
    require_exact(model.config.model_type)
    embedding: Any = model.get_input_embeddings()
    embedding.num_virtual_tokens = images.most_tokens or int(images.starts[-1])
    arguments = ImageArguments(model, images)
    model.add_module(ARGUMENTS, arguments)
    for layer in LayeredModel(model).layers if arguments.num_adding else ():
        vars(layer)["forward"] = MethodType(_with_added, layer)


def _with_added(layer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Compute a layer, and add an image's features to what it returns."""
    added_BTD = kwargs.pop(_ADDED, None)
    output_BTD: torch.Tensor = type(layer).forward(layer, *args, **kwargs)
    return output_BTD if added_BTD is None else output_BTD + added_BTD.to(output_BTD.dtype)


class _Added(ByLayer):
    """Features (B, T, D) that are added after the first layers."""

    def __init__(self, by_layer: Sequence[torch.Tensor]) -> None:
        self._by_layer = by_layer

    def of_layer(self, layer: int) -> torch.Tensor | None:
        """Return those after one layer; None after the others."""
        return self._by_layer[layer] if layer < len(self._by_layer) else None


class _Rows(tuple[torch.Tensor, ...]):
    """The features of several images, also for a model that has those of all in one tensor."""

    __slots__ = ()

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return them all, elsewhere or in another type."""
        return torch.cat(self).to(*args, **kwargs)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _TowerOutput:
    """What a model's forward takes for the output of its tower."""

    pooler_output: _Rows
    deepstack_features: tuple[()] = ()  # layers add theirs themselves

    def to_tuple(self) -> tuple[_Rows]:
        """Return it as transformers does of an output that is not named."""
        return (self.pooler_output,)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Piece:
    """Tokens of a row that are successive ones of an image, with other tokens between or not."""

    features: Features
    tokens: slice  # part of the image's tokens
    places: tuple[int, torch.Tensor]  # the row, and where they are in it

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the image."""
        return self.tokens == slice(0, len(self.features.rows_ND))


class ImageArguments(FrontArguments):
    """Gives a model the images of its rows."""

    def __init__(self, model: "PreTrainedModel", images: Images) -> None:
        """Find what the model takes.

        Args:
            model: The model.
            images: Features of all images of its rows.
        """
        super().__init__()
        config: Any = model.config
        takes = inspect.signature(model.forward).parameters
        self._images = images
        self._types = [name for name in ("mm_token_type_ids", "token_type_ids") if name in takes]
        self._cache = cache_argument(model) or ""
        self._image_token: int = config.image_token_id
        self._rope: Any = getattr(model.base_model, "get_rope_index", None)
        # By cache: how far positions are ahead of the number of tokens, for each row (B, 1).
        self._ahead: WeakKeyDictionary[Any, torch.Tensor] = WeakKeyDictionary()
        self._size: int = config.get_text_config().hidden_size
        self._dtype = model.dtype
        self.num_adding = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))

    def forward(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of the model's forward, images in place of their tokens.

        Args:
            given: Arguments for rows of tokens.

        Raises:
            DataError: An image comes after tokens that are in a cache, or next to texts with the
                image token.
        """
        ids_BT = given["input_ids"]
        is_image_BT = ids_BT >= self._images.first_id
        pieces = self._pieces(ids_BT) if is_image_BT.any() else []
        types_BT = torch.zeros_like(ids_BT)
        for piece in pieces:
            types_BT[piece.places] = int(piece.is_whole)
        own_BT = ids_BT.masked_fill(is_image_BT, self._image_token)
        more: dict[str, Any] = {"input_ids": own_BT}
        if pieces:
            if self._num_past(given):
                raise DataError(
                    "an image after the first tokens of a row that is continued",
                    limit="a cache keeps no image's masks and positions",
                    hint="give the whole row again",
                )
            if (ids_BT == self._image_token).any():
                raise DataError(
                    f"a text has the token {self._image_token}",
                    limit="it is the model's image token, and the batch has images too",
                    hint="leave the token out of the text",
                )
            rows = _Rows(x.features.rows_ND[x.tokens].to(ids_BT.device) for x in pieces)
            output = _TowerOutput(pooler_output=rows)
            more |= {
                "mm_encoder_outputs": {"image": output},
                **dict.fromkeys(self._types, types_BT),
            }
        if self._rope is not None:
            more[_POSITIONS] = self._positions({**given, **more}, types_BT, pieces)
        if self.num_adding and not self._num_past(given):
            more[_ADDED] = _Added(self._added(ids_BT, pieces))
        return {**given, **more}

    def _pieces(self, ids_BT: torch.Tensor) -> list[_Piece]:
        """Return the pieces of images in rows, from left to right."""
        by_row = enumerate(ids_BT.cpu().numpy())
        return [piece for row, ids_T in by_row for piece in self._of_row(row, ids_T)]

    def _of_row(self, row: int, ids_T: npt.NDArray[np.int64]) -> Iterator[_Piece]:
        places_N = np.flatnonzero(ids_T >= self._images.first_id)
        tokens_N = ids_T[places_N] - self._images.first_id
        numbers_N = np.searchsorted(self._images.starts, tokens_N, side="right") - 1
        offsets_N = tokens_N - self._images.starts[numbers_N]
        is_first_N = (np.diff(tokens_N, prepend=-2) != 1) | (offsets_N == 0)
        begins = np.flatnonzero(is_first_N).tolist()
        for begin, end in pairwise([*begins, len(places_N)]):
            offset = int(offsets_N[begin])
            yield _Piece(
                features=self._images.features(int(numbers_N[begin])),
                tokens=slice(offset, offset + end - begin),
                places=(row, torch.from_numpy(places_N[begin:end])),
            )

    def _num_past(self, given: Mapping[str, Any]) -> int:
        """Return how many tokens of the rows are in a cache."""
        cache = given.get(self._cache)
        return 0 if cache is None else int(cache.get_seq_length())

    def _positions(
        self, given: Mapping[str, Any], types_BT: torch.Tensor, pieces: Sequence[_Piece]
    ) -> torch.Tensor:
        """Return positions (4, B, T): those of tokens, and of each of three axes."""
        ids_BT, cache = given["input_ids"], given.get(self._cache)
        own_BT = given.get(_POSITIONS)
        if own_BT is None:
            own_T = self._num_past(given) + torch.arange(ids_BT.shape[1], device=ids_BT.device)
            own_BT = own_T.expand(len(ids_BT), -1)
        grids = [piece.features.grid for piece in pieces if piece.is_whole]
        if grids:
            axes_3BT, ahead_B1 = self._rope(
                ids_BT,
                mm_token_type_ids=types_BT,
                image_grid_thw=torch.tensor(grids, device=ids_BT.device),
                attention_mask=given.get(_MASK),
            )
            if cache is not None:
                self._ahead[cache] = ahead_B1
        elif cache in self._ahead:
            ahead_B1 = self._ahead[cache]
            copies = len(own_BT) // len(ahead_B1)  # a row that is continued several times
            axes_3BT = (own_BT + ahead_B1.repeat_interleave(copies, dim=0)).expand(3, -1, -1)
        else:
            axes_3BT = own_BT.expand(3, -1, -1)
        return torch.cat([own_BT[None], axes_3BT])

    def _added(self, ids_BT: torch.Tensor, pieces: Sequence[_Piece]) -> list[torch.Tensor]:
        """Return what is added after the first layers, (B, T, D) each."""
        zero_D = torch.zeros(self._size, dtype=self._dtype, device=ids_BT.device)
        nothing_BTD = zero_D.expand(*ids_BT.shape, -1)
        if not pieces:
            return [nothing_BTD] * self.num_adding
        by_layer = [nothing_BTD.clone() for _ in range(self.num_adding)]
        for piece in pieces:
            for added_BTD, rows_ND in zip(by_layer, piece.features.layers, strict=True):
                added_BTD[piece.places] = rows_ND[piece.tokens].to(added_BTD)
        return by_layer
