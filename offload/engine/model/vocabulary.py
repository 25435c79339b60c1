"""How many tokens a model can read and predict, by its own embedding and head."""

from typing import TYPE_CHECKING, Any

from offload.engine.batch import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def vocabulary_of(model: "PreTrainedModel") -> Vocabulary:
    """Return the vocabulary; if no head is found, the config's number of tokens is used."""
    head = model.get_output_embeddings()
    num_predicted = _size(head, "out_features")
    if head is None:
        num_predicted = getattr(model.config.get_text_config(), "vocab_size", None)
    return Vocabulary(
        num_read=_size(model.get_input_embeddings(), "num_embeddings"),
        num_predicted=num_predicted,
    )


def _size(module: Any, name: str) -> int | None:
    """Return a size of a module, which peft may have wrapped."""
    module = getattr(module, "original_module", module)
    unwrap = getattr(module, "get_base_layer", None)
    size = getattr(module if unwrap is None else unwrap(), name, None)
    return size if isinstance(size, int) else None
