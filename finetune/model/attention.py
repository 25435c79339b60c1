"""Which of transformers' attention implementations a model uses."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_CAP = "attn_logit_softcapping"


def implementation_of(config: "PreTrainedConfig") -> str:
    """Return the attention implementation that computes what a model's config says.

    torch's fused attention has no soft caps. Some versions of transformers choose it for models
    that have them (gemma2) and silently drop the caps, which makes it a different model.
    """
    chosen = str(config._attn_implementation)
    is_capped = bool(vars(config.get_text_config()).get(_CAP))
    return "eager" if is_capped and chosen == "sdpa" else chosen


def compute_exactly(model: "PreTrainedModel") -> None:
    """Set a model's attention to the `implementation_of` its config."""
    implementation = implementation_of(model.config)
    if implementation != model.config._attn_implementation:
        model.set_attn_implementation(implementation)
