"""A model whose own weights were trained, as files that plain transformers loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from finetune.data.stops import Stops, write_generation_config
from finetune.files.manifest import whole_folder
from finetune.report.model_card import MODEL_CARD

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHARD_SIZE = "5GB"


def save_model(
    model: "PreTrainedModel",
    weights: Mapping[str, torch.Tensor],
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
    *,
    stops: Stops,
) -> None:
    """Write weights as published, config, tokenizer and generation config, whole with a manifest.

    Weights have the type that they computed in. Of a model that trained in bfloat16 these are the
    fp32 masters, rounded once.

    Args:
        model: On its engine.
        weights: Name -> what was trained, on the host.
        tokenizer: Of the model.
        folder: Where to.
        stops: Where generation stops.

    Raises:
        CheckpointError: The folder cannot be written; what was there before is unchanged.
    """
    frozen = {name: value.cpu() for name, value in model.state_dict().items()}
    first = {id(p): name for name, p in model.named_parameters()}
    one_of = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    state = {
        name: weights.get(one_of.get(name, name), value)  # tied weights are one, and saved as one
        for name, value in frozen.items()
    }
    with whole_folder(folder, unlisted=(MODEL_CARD,)) as partial:
        model.save_pretrained(str(partial), state_dict=state, max_shard_size=SHARD_SIZE)
        tokenizer.save_pretrained(str(partial))
        fields = model.generation_config.to_diff_dict() if model.generation_config else {}
        write_generation_config(partial, fields, stops)
