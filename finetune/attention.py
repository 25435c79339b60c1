"""By which of transformers' codes attention is computed."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_CAP = "attn_logit_softcapping"


def implementation_of(config: "PreTrainedConfig") -> str:
    """Return the code that computes a model's attention as its config has it.

    torch's fused attention knows no soft caps. Some versions of transformers choose it for models
    that have them (gemma2) and leave the caps out without a word: another model than was trained.
    """
    chosen = str(config._attn_implementation)
    is_capped = bool(vars(config.get_text_config()).get(_CAP))
    return "eager" if is_capped and chosen == "sdpa" else chosen


def compute_exactly(model: "PreTrainedModel") -> None:
    """Have a model's attention computed by `implementation_of` its config."""
    implementation = implementation_of(model.config)
    if implementation != model.config._attn_implementation:
        model.set_attn_implementation(implementation)
