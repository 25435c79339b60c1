"""Rotary embeddings of every type: each row has the frequencies that transformers gives it alone.

The reference is plain transformers and peft on a model that has seen no other row.
"""

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import offload
from tests.tiers import mostly_slow

ORIGINAL = 24
LENS = (16, 40, ORIGINAL, ORIGINAL + 1, 60)
FACTORS = {
    "short_factor": [1.0, 1.02, 1.1, 1.2],
    "long_factor": [1.0, 3.0, 11.0, 40.0],
    "original_max_position_embeddings": ORIGINAL,
}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {"factor": 4.0, **FACTORS},
    "llama3": {"factor": 4.0, **BANDS, "original_max_position_embeddings": ORIGINAL},
    "proportional": {"factor": 4.0, "partial_rotary_factor": 0.5},
}
KINDS = {
    "llama": {},
    "phi3": {"original_max_position_embeddings": ORIGINAL},
    "gemma2": {},
    "olmo2": {},
    "mistral": {},
    "qwen3": {},
}
ONLY = {"phi3": {"default", "longrope"}}  # of the others, those that transformers allows


def built(kind: str, rope: str) -> nn.Module:
    torch.manual_seed(0)
    parameters = {"rope_type": rope, "rope_theta": 10000.0, **ROPES[rope]}
    config = AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        pad_token_id=None,
        max_position_embeddings=96 if rope == "longrope" else ORIGINAL,
        **KINDS[kind],
        rope_parameters=parameters,
        attn_implementation="eager",
    )
    model = get_peft_model(
        AutoModelForCausalLM.from_config(config, dtype=torch.float32),
        LoraConfig(r=4, target_modules="all-linear"),
    )
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.05 * torch.randn_like(p))
    return model


def grads(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def rows_of() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 64, (1, n), generator=generator) for n in LENS]


def padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows of one micro-batch, padded on the right with a token that is in none of them."""
    most = max(row.shape[1] for row in rows)
    ids, labels, mask = (torch.full((len(rows), most), fill) for fill in (0, -100, 0))
    for b, row in enumerate(rows):
        n = row.shape[1]
        ids[b, :n], labels[b, :n], mask[b, :n] = row[0], row[0], 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def packed(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    labels = [torch.cat((torch.full((1, 1), -100), row[:, 1:]), 1) for row in rows]
    lens = torch.tensor([row.shape[1] for row in rows])
    return {"input_ids": torch.cat(rows, 1), "labels": torch.cat(labels, 1), "row_lens": lens}


FORMS = {
    "padded": lambda rows: [padded(rows)],
    "packed": lambda rows: [packed(rows)],
    "each alone": lambda rows: [{"input_ids": row, "labels": row} for row in rows],
    "long before short": lambda rows: [padded(rows[3:]), padded(rows[:3])],
}
CASES = [
    (kind, rope, form)
    for kind in KINDS
    for rope in ROPES
    if rope in ONLY.get(kind, ROPES)
    for form in FORMS
]
DEFAULT = (("phi3", "longrope", "padded"), ("llama", "dynamic", "packed"))


def test_every_type_of_transformers_is_tried() -> None:
    assert set(ROPE_INIT_FUNCTIONS) | {"default"} == set(ROPES)


@pytest.mark.parametrize(
    ("kind", "rope", "form"),
    mostly_slow(CASES, *DEFAULT, rest=pytest.mark.thorough),
)
def test_rows_on_both_sides_of_the_original_length_are_computed_as_each_alone(
    kind: str, rope: str, form: str
) -> None:
    rows = rows_of()
    total, loss = sum(row.shape[1] - 1 for row in rows), 0.0
    wanted = torch.zeros(())
    for row in rows:
        plain = built(kind, rope)
        own = plain(input_ids=row, labels=row, use_cache=False).loss * (row.shape[1] - 1) / total
        own.backward()
        loss, wanted = loss + own.item(), wanted + grads(plain)
    streamed = built(kind, rope)
    engine = offload.attach(streamed, num_slots=2, device="cpu")
    for _ in range(2):  # a second step finds what the first has left
        streamed.zero_grad()
        result = engine.forward_backward(FORMS[form](rows))
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert float((grads(streamed) - wanted).norm() / wanted.norm()) < 2e-6


@pytest.mark.parametrize("num_prompt", [ORIGINAL - 6, ORIGINAL - 1, ORIGINAL, ORIGINAL + 3])
@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_an_answer_that_grows_past_the_original_length_is_computed_as_a_whole_row(
    kind: str, num_prompt: int
) -> None:
    model = built(kind, "longrope").eval()
    ids = torch.randint(3, 64, (2, num_prompt), generator=torch.Generator().manual_seed(2))
    plain: Any = copy.deepcopy(model)
    engine = offload.attach(model, num_slots=2, device="cpu")
    with engine.generation() as generation:
        new = ids
        for _ in range(10):
            logits = generation.next_logits({0: new})[0]
            with torch.no_grad():
                whole = copy.deepcopy(plain)(input_ids=ids, use_cache=False).logits[:, -1]
            assert float((logits - whole).abs().max() / whole.abs().max()) < 1e-5
            new = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], dim=1)
    if kind == "phi3":  # whose `generate` drops its cache there too
        greedy = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
        mask = torch.ones(2, num_prompt, dtype=torch.long)
        own = plain.generate(input_ids=ids[:, :num_prompt], attention_mask=mask, **greedy)
        assert torch.equal(own, ids)
