"""Steps of models whose loss has the router's auxiliary loss in it."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from offload.engine.batch import Batch
from tests.parity.architectures import Gradients, gradients


def plain(model: nn.Module, batches: Sequence[Batch]) -> tuple[float, Gradients]:
    """Return loss and gradients of the model's own losses, weighted by label tokens."""
    model = copy.deepcopy(model)
    weights = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    loss = 0.0
    for weight, batch in zip(weights, batches, strict=True):
        output = model(**batch, use_cache=False)
        assert output.aux_loss > 0
        part = output.loss * (weight / sum(weights))
        part.backward()
        loss += part.item()
    return loss, gradients(model)


def plain_over_step(model: nn.Module, batches: Sequence[Batch]) -> tuple[float, Gradients]:
    """Return loss and gradients where the router loss is over all tokens of all micro-batches.

    One graph holds the whole step. Router logits are the model's own outputs, those of padding left
    out; a layer's are joined, and the loss is transformers' function (Mixtral's) of all of them,
    written out here so that float64 stays float64.
    """
    model = copy.deepcopy(model)
    num_labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    loss, heard = torch.zeros(()), []
    for batch in batches:
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        output = model(**inputs, output_router_logits=True, use_cache=False)
        logits_BTV = output.logits if output.logits.dtype.itemsize > 4 else output.logits.float()
        loss = loss + nn.functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum"
        )
        mask = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).flatten().bool()
        heard += [said.reshape(len(mask), -1)[mask] for said in output.router_logits]
    unwrap: Any = getattr(model, "get_base_model", None)
    base: Any = model if unwrap is None else unwrap()
    p_NE = torch.cat([torch.softmax(said, dim=-1) for said in heard])
    chosen_NK = p_NE.topk(base.num_experts_per_tok, dim=-1).indices
    share_E = nn.functional.one_hot(chosen_NK, p_NE.shape[1]).sum(1).to(p_NE.dtype).mean(0)
    balance = p_NE.shape[1] * (share_E * p_NE.mean(0)).sum()
    loss = loss / num_labels + base.router_aux_loss_coef * balance
    loss.backward()
    return loss.item(), gradients(model)
