"""What a model reads and returns: how many tokens it knows, or the outputs of a classifier.

A sequence classifier of transformers runs its head on all tokens of a row, and returns the outputs
of the last one that is no padding; a token classifier returns those of all. So rows of a single
token give the outputs of any tokens, by the model's own code. Shapes: N tokens, each a row of its
own, C outputs.
"""

from typing import TYPE_CHECKING, Any

import torch

from offload.engine.batch import Vocabulary
from offload.engine.closeness import are_close, are_equal
from offload.engine.model.layers import LayeredModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def vocabulary_of(model: "PreTrainedModel") -> Vocabulary:
    """Return the vocabulary; if no head is found, the config's number of tokens is used."""
    head = model.get_output_embeddings()
    num_predicted = _size(head, "out_features")
    embedding = model.get_input_embeddings()
    if head is None:
        num_predicted = getattr(model.config.get_text_config(), "vocab_size", None)
    num_read = _size(embedding, "num_embeddings")
    num_virtual: int = getattr(embedding, "num_virtual_tokens", 0)  # whose embeddings train
    return Vocabulary(
        num_read=None if num_read is None else num_read + num_virtual,
        num_predicted=num_predicted,
    )


def is_classifier(model: LayeredModel) -> bool:
    """Return whether a model classifies rows or tokens, by the name that transformers gives it."""
    return model.name.endswith(("ForSequenceClassification", _OF_TOKENS))


def classifier_outputs(
    model: LayeredModel, hidden_1ND: torch.Tensor, *, index: int | None
) -> torch.Tensor:
    """Run norm and head of a classifier on some tokens.

    Returns one output of each, (N,), or all of them, (N, C).

    Args:
        model: The classifier.
        hidden_1ND: Output of its last layer.
        index: Which output; None takes all.

    Raises:
        UnsupportedModelError: It is no classifier, or has fewer outputs.
    """
    outputs_NC = _of_last_token(model, hidden_1ND.transpose(0, 1))
    if not isinstance(outputs_NC, torch.Tensor) or outputs_NC.dim() != 2:
        model.refuse("returns no outputs for a whole row", limit=_CLASSIFIER)
    if index is None:
        return outputs_NC
    if not 0 <= index < outputs_NC.shape[1]:
        model.refuse(
            f"has {outputs_NC.shape[1]} outputs, from 0, and the loss reads {index}",
            limit="it reads one of the head's outputs",
        )
    return outputs_NC[:, index]


def require_outputs_of_last_token(model: LayeredModel, hidden_BTD: torch.Tensor) -> None:
    """Check that a classifier's outputs for a row follow from its last token alone.

    Args:
        model: The classifier.
        hidden_BTD: Output of its last layer for any rows.

    Raises:
        UnsupportedModelError: They are not.
    """
    padding = getattr(model.model.config.get_text_config(), "pad_token_id", None)
    ids_BT = torch.full(hidden_BTD.shape[:2], int(padding == 0), device=hidden_BTD.device)
    poisoned_BTD = hidden_BTD.clone()
    poisoned_BTD[:, :-1] = torch.nan
    own_BC = _of_last_token(model, poisoned_BTD, input_ids=ids_BT)
    last_BC, again_BC = (_of_last_token(model, hidden_BTD[:, -1:]) for _ in range(2))
    if not are_close(last_BC, own_BC, num_terms=hidden_BTD.shape[-1]):
        model.refuse("does not compute its outputs from a row's last token", limit=_CLASSIFIER)
    if not are_equal(last_BC, again_BC):
        model.refuse("gives other outputs for the same hidden state", limit=_CLASSIFIER)


def _of_last_token(model: LayeredModel, hidden_BTD: torch.Tensor, **inputs: torch.Tensor) -> Any:
    """Return a classifier's outputs of the last token of each row, (B, C)."""
    logits = getattr(model.output(hidden_BTD, **inputs), "logits", None)
    is_by_token = isinstance(logits, torch.Tensor) and logits.dim() == _BY_TOKEN_DIM
    if is_by_token and model.name.endswith(_OF_TOKENS):
        assert logits is not None
        return logits[:, -1]
    return logits


_BY_TOKEN_DIM, _OF_TOKENS = 3, "ForTokenClassification"
_CLASSIFIER = (
    "a loss of the head's outputs trains a sequence classifier, e.g."
    " `AutoModelForSequenceClassification.from_pretrained(..., num_labels=1)`"
)


def _size(module: Any, name: str) -> int | None:
    """Return a size of a module, which peft may have wrapped."""
    module = getattr(module, "original_module", module)
    unwrap = getattr(module, "get_base_layer", None)
    size = getattr(module if unwrap is None else unwrap(), name, None)
    return size if isinstance(size, int) else None
