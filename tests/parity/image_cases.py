"""Tiny models whose images are features, next to the same models from pixels; see `images`."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from _pytest.mark.structures import ParameterSet
from torch import nn

from finetune.images.features import Features, Images
from finetune.images.front import add_images
from finetune.images.tower import computed
from offload.engine.model.layers import LayeredModel
from tests.parity.images import FAMILIES, Row, rows_of, starts_of, tiny_base, with_lora
from tests.tiers import tiered

SLOW = (  # the others are exhaustive
    *("gemma3", "gemma4", "glm46v", "glm4v", "idefics3", "internvl", "lfm2_vl", "mistral3"),
    *("qwen2_5_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm"),
)
Batch = dict[str, torch.Tensor]


def types(*default: str) -> list[ParameterSet]:
    return tiered(list(FAMILIES), default=default, slow=set(SLOW) - set(default))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model with its images in two forms: for plain transformers, and as features."""

    plain: nn.Module  # from pixels
    model: nn.Module  # the same from features, with a tower without values
    images: Any
    features: list[Features]
    rows: list[Row]
    first_id: int

    def ids(self, row: Row) -> list[int]:
        """Return the tokens of a row as a step has them."""
        return [token if token >= 0 else self.first_id - 1 - token for token in row.tokens]


def case_of(model_type: str, *others: str) -> Case:
    """Return a case.

    Args:
        model_type: Its type.
        others: Modules with an adapter besides those of the layers.
    """
    base = tiny_base(model_type)
    images = FAMILIES[model_type].images(torch.Generator().manual_seed(3))
    features = [computed(base, image.inputs) for image in images]
    plain = with_lora(copy.deepcopy(base), *others)
    embedding: Any = base.get_input_embeddings()
    first_id = embedding.num_embeddings
    starts = np.array(starts_of(images))
    add_images(base, Images(first_id=first_id, starts=starts, of=lambda n: features[n]))
    model = with_lora(base, *others)
    for tower in LayeredModel(model).towers:
        tower.to("meta")
    rows = rows_of(FAMILIES[model_type], images)
    return Case(
        plain=plain,
        model=model,
        images=images,
        features=features,
        rows=rows,
        first_id=first_id,
    )


def padded(case: Case, rows: Sequence[Row]) -> Batch:
    width = max(len(row.tokens) for row in rows)
    return {
        "input_ids": torch.tensor([case.ids(r) + [0] * (width - len(r.tokens)) for r in rows]),
        "labels": torch.tensor([[*r.labels] + [-100] * (width - len(r.labels)) for r in rows]),
        "attention_mask": torch.tensor(
            [[i < len(r.tokens) for i in range(width)] for r in rows]
        ).long(),
    }


def packed(case: Case, rows: Sequence[Row]) -> Batch:
    return {
        "input_ids": torch.tensor([[token for row in rows for token in case.ids(row)]]),
        "labels": torch.tensor([[n for row in rows for n in (-100, *row.labels[1:])]]),
        "row_lens": torch.tensor([len(row.tokens) for row in rows]),
    }
