"""A causal language model as custom code has them, whose layers and forward a test can change.

    class Mine(CustomModel):
        def after(self, hidden, embedded): ...

Its loss is the one that transformers gives to causal language models.
"""

from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

WIDTH, VOCABULARY, NUM_LAYERS = 16, 64, 4


class CustomConfig(PreTrainedConfig):
    model_type = "custom_for_tests"

    def __init__(self, **changes: Any) -> None:
        super().__init__(**{"loss_type": "ForCausalLM", **changes})
        self.hidden_size = WIDTH
        self.num_hidden_layers = NUM_LAYERS
        self.vocab_size = VOCABULARY


class CustomLayer(nn.Module):
    """Attention and an MLP; `compute` is what tests change."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.q_proj, self.v_proj, self.mlp = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def attend(self, hidden: torch.Tensor) -> torch.Tensor:
        x = self.norm(hidden)
        scores = self.q_proj(x) @ x.transpose(1, 2)
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(later, -1e9).softmax(-1) @ self.v_proj(x)

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        return hidden + torch.tanh(self.mlp(self.attend(hidden)))


class CustomBody(nn.Module):
    def __init__(self, layer: type[CustomLayer]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(layer(index) for index in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(WIDTH)


class CustomModel(PreTrainedModel, GenerationMixin):
    config_class = CustomConfig
    base_model_prefix = "model"
    layer: type[CustomLayer] = CustomLayer

    def __init__(self, config: CustomConfig) -> None:
        super().__init__(config)
        self.model = CustomBody(type(self).layer)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.prepare()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.4)

    def get_decoder(self) -> Any:
        return self.model

    def prepare(self) -> None:
        """Add what a test needs."""

    def call(self, layer: Any, hidden: torch.Tensor, index: int) -> torch.Tensor:
        """Call one layer."""
        output = layer(hidden)
        return output[0] if isinstance(output, tuple) else output

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Compute what comes between the layers and the norm."""
        return hidden

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        """Change the logits."""
        return logits

    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | float | None:
        """Return what is added to the loss; None for nothing."""

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        **arguments: Any,
    ) -> CausalLMOutputWithPast:
        self.tokens, self.labels = input_ids, labels
        hidden = embedded = self.model.embed_tokens(input_ids)
        for index, layer in enumerate(self.model.layers):
            hidden = self.call(layer, hidden, index)
        logits = self.cap(self.lm_head(self.model.norm(self.after(hidden, embedded))))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=VOCABULARY)
            extra = self.extra(logits, labels)
            loss = loss if extra is None else loss + extra
        return CausalLMOutputWithPast(loss=loss, logits=logits)
