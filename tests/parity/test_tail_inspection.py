"""What a model computes after its layers, and its own loss, is computed as it does, or refused.

The reference is the model's own loss and plain autograd on the whole model.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import nn
from transformers import BartConfig, BartForConditionalGeneration, BertConfig, BertForMaskedLM
from transformers.loss.loss_utils import ForCausalLMLoss

import offload
from tests.parity.custom_model import (
    VOCABULARY,
    WIDTH,
    CustomLayer,
    CustomModel,
)
from tests.parity.custom_steps import (
    assert_equal,
    assert_refused,
    built,
)
from tests.parity.tiny_models import tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")


# ------------------------------------------------------------------------------- after the layers


class Skips(CustomModel):
    """Adds the embeddings, through a gate and a matrix that are zero."""

    def prepare(self) -> None:
        self.skip = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(1, 1, bias=False)

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return hidden + self.gate.weight * self.skip(embedded)


class Convolves(CustomModel):
    def prepare(self) -> None:
        self.skip = nn.Conv1d(WIDTH, WIDTH, 3, groups=WIDTH, bias=False)

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        padded = nn.functional.pad(hidden.transpose(1, 2), (2, 0))
        return hidden + self.skip(padded).transpose(1, 2)


class CapsAll(CustomModel):
    """Caps by what all tokens have, where that is large."""

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / (logits.abs().amax() / 1e4).clamp(min=1)


class CapsEach(CustomModel):
    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return 5 * torch.tanh(logits / 5)


class ByLength(CustomModel):
    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return (hidden - hidden.mean(-1, keepdim=True)) * hidden.shape[1] + hidden

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return logits / math.sqrt(logits.shape[1])


class BiasedByPlace(CustomModel):
    def prepare(self) -> None:
        self.skip = nn.Embedding(16, VOCABULARY)

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return logits + self.skip(torch.arange(logits.shape[1]))


class DetachesAfter(CustomModel):
    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return hidden.detach()


class ScalesGradient(CustomModel):
    """Has the values of its input and twice its gradient."""

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        num_tokens = hidden.shape[1]
        return num_tokens * hidden - (num_tokens - 1) * hidden.detach()


ALONE = "does not compute a token's logits from the last layer's output for it alone"


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (Skips, f"{ALONE}, but reads a tensor that the part before the layers made"),
        (Convolves, ALONE),
        (CapsAll, ALONE),
        (ByLength, ALONE),
        (BiasedByPlace, ALONE),
        (ScalesGradient, ALONE),
        (DetachesAfter, "has logits without a gradient by the last layer's output"),
    ],
)
def test_what_does_not_work_token_by_token_is_refused(kind: type[CustomModel], what: str) -> None:
    saved = ["skip"] if kind in (Skips, Convolves, BiasedByPlace) else None
    model = built(kind, modules_to_save=saved)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "skip" in name or "gate" in name:
                parameter.zero_()
    assert_refused(model, what)


class ReadsBack(CustomModel):
    """Adds what a token some places before has, where there is one."""

    distance = 1

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        far = self.distance
        if hidden.shape[1] <= far:
            return hidden
        return hidden + 0.5 * nn.functional.pad(hidden[:, :-far], (0, 0, far, 0))


class ReadsAhead(CustomModel):
    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return (
            hidden + 1e-9 * nn.functional.pad(hidden[:, 30:], (0, 0, 0, 30))[:, : hidden.shape[1]]
        )


class InBlocks(CustomModel):
    """Adds the mean of each full block of 16 tokens to its last token, after the head."""

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        blocks = logits[:, : logits.shape[1] // 16 * 16].unflatten(1, (-1, 16))
        logits = logits.clone()
        logits[:, 15::16][:, : blocks.shape[1]] += blocks.mean(2)
        return logits


class OfOtherRows(CustomModel):
    """Adds what the row before has at the same place, where there are more than two rows."""

    def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return hidden + hidden.roll(1, dims=0) if len(hidden) > 2 else hidden


class ScaledIfLong(CustomModel):
    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        return logits * (1 + (logits.shape[1] > 32))


class Back12(ReadsBack):
    distance = 12


class Back59(ReadsBack):
    distance = 59


def wide(num_rows: int, num_tokens: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (num_rows, num_tokens), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}


@pytest.mark.parametrize("kind", [Back12, Back59, ReadsAhead, InBlocks, OfOtherRows, ScaledIfLong])
def test_what_mixes_tokens_that_are_far_apart_is_refused(kind: type[CustomModel]) -> None:
    model = built(kind)
    engine = offload.attach(model, num_slots=2, device="cpu")
    with pytest.raises(offload.UnsupportedModelError, match=f"{ALONE}, in a trial of 192 tokens"):
        engine.forward_backward([wide(3, 60)])
    engine.detach()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_longer_micro_batches_than_before_are_tried_again() -> None:
    model = built(Back12)
    engine = offload.attach(model, num_slots=2, device="cpu")
    engine.forward_backward([wide(1, 8)])
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
    with pytest.raises(offload.UnsupportedModelError, match=ALONE):
        engine.forward_backward([wide(1, 8), wide(1, 13)])
    engine.detach()
    assert all(torch.equal(model.get_parameter(name).grad, x) for name, x in before.items())


def test_a_tail_that_mixes_more_tokens_than_a_row_has_is_refused_for_its_chunks() -> None:
    """Chunks hold the tokens of several rows; the model's own forward never has so many."""
    engine = offload.attach(built(Back59), num_slots=2, device="cpu", head_chunk_tokens=64)
    with pytest.raises(offload.UnsupportedModelError, match=ALONE):
        engine.forward_backward([wide(4, 20)])
    engine.detach()


def test_weights_that_are_zero_are_so_again_after_an_inspection() -> None:
    class Gated(CustomModel):
        def prepare(self) -> None:
            self.skip = nn.Linear(WIDTH, WIDTH, bias=False)

        def after(self, hidden: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
            return hidden + self.skip(hidden)

    model = built(Gated, modules_to_save=["skip"])
    trained = model.get_base_model().skip.modules_to_save["default"].weight
    with torch.no_grad():
        trained.zero_()
    assert_equal(model)
    assert not trained.any()


def test_a_cap_for_each_logit_is_exact() -> None:
    assert_equal(built(CapsEach))


def test_an_embedding_that_counts_is_refused() -> None:
    model = built(CustomModel)
    num_calls = 0

    def count(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        return output * num_calls

    model.get_base_model().model.embed_tokens.register_forward_hook(count)
    assert_refused(model, "passes its layers other values when it is run again")


# A step of a model with the vocabulary of Qwen3; its head's gradient is a sum over all of it.
REAL_VOCABULARY = """
import sys, torch, offload
from transformers import Qwen3Config, Qwen3ForCausalLM
torch.manual_seed(0)
torch.set_num_threads(1)
config = Qwen3Config(
    vocab_size=151_936, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=1, num_key_value_heads=1, head_dim=64,
)
model = Qwen3ForCausalLM(config).to(getattr(torch, sys.argv[1])).requires_grad_(False)
model.model.norm.requires_grad_(True)
ids = torch.randint(0, 151_936, (1, 16))
own = float(model(input_ids=ids, labels=ids, use_cache=False).loss)
engine = offload.attach(model, num_slots=2, device="cpu")
assert abs(engine.forward_backward([{"input_ids": ids, "labels": ids}]).loss - own) < 1e-2
"""


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_real_vocabulary_is_exact_on_a_processor_that_adds_one_after_the_other(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of MKL's kernels, those for any processor have the largest rounding errors."""
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    run = subprocess.run(
        [sys.executable, "-c", REAL_VOCABULARY, dtype],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


# ----------------------------------------------------------------------------------- own losses


class WithZLoss(CustomModel):
    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return 1e-4 * logits.float().logsumexp(-1).square().mean()


class AboveThreshold(CustomModel):
    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return (logits.abs() - 30).relu().mean()


class Smoothed(CustomModel):
    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return -1e-2 * logits.float().log_softmax(-1).mean()


class WithoutPadding(CustomModel):
    """Counts no token that is padding, wherever it is."""

    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        kept = labels.masked_fill(labels == 2, -100)
        full, part = (
            self.loss_function(logits, those, vocab_size=VOCABULARY) for those in (labels, kept)
        )
        return part - full


class OfWeights(CustomModel):
    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        found = [p.square().sum() for n, p in self.named_parameters() if "lora_A" in n]
        return 1e-3 * torch.stack(found).sum() if found else 0.0


class OfTokens(CustomModel):
    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return 0.0 * self.tokens.sum()


class LeavesLoss(CustomLayer):
    """Leaves a loss on a part of it, as some routers do."""

    def forward(self, hidden: torch.Tensor, **arguments: Any) -> Any:
        self.mlp.balance = self.mlp(hidden).square().mean()
        return super().forward(hidden)


class Collects(CustomModel):
    layer = LeavesLoss

    def prepare(self) -> None:
        vars(self)["parts"] = [layer.mlp for layer in self.model.layers]

    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return sum(part.balance for part in vars(self)["parts"])


class Searches(CustomModel):
    layer = LeavesLoss

    def extra(self, logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return sum(m.balance for m in self.modules() if hasattr(m, "balance"))


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (WithZLoss, r"gives a loss of [\d.]+ where the mean of cross-entropies is [\d.]+"),
        (AboveThreshold, "changes the loss that its `loss_function` returns"),
        (Smoothed, r"gives a loss of [\d.]+ where"),
        (OfTokens, "reads a tensor that the part before the layers made"),
        (OfWeights, "reads the modules or parameters of a layer from outside"),
        (Collects, "but reads a tensor that layer 0 made"),
        (Searches, "reads the modules or parameters of a layer from outside"),
    ],
)
def test_a_loss_with_more_than_cross_entropy_is_refused(kind: type[CustomModel], what: str) -> None:
    assert_refused(built(kind), what)


def test_a_loss_that_leaves_out_padding_by_its_token_is_refused() -> None:
    model = built(WithoutPadding)
    model.config.pad_token_id = 2
    assert_refused(model, r"gives a loss of [\d.]+ where")


def next_tokens(logits: torch.Tensor, labels: torch.Tensor, **options: Any) -> torch.Tensor:
    rows, targets = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(rows, targets, **options)


class Weighted:
    """Weighs one class."""

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, **_more: Any) -> torch.Tensor:
        weight = torch.ones(logits.shape[-1])
        weight[61] = 5.0
        return next_tokens(logits, labels, weight=weight)


class Annealed:
    """Smooths labels from the twentieth call on."""

    calls = 0

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor, **_more: Any) -> torch.Tensor:
        self.calls += 1
        return next_tokens(logits, labels, label_smoothing=0.1 if self.calls > 20 else 0.0)


def without_a_token(logits: torch.Tensor, labels: torch.Tensor, **_more: Any) -> torch.Tensor:
    return next_tokens(logits, torch.where(labels == 61, -100, labels))


def copied(logits: torch.Tensor, labels: torch.Tensor, **_more: Any) -> torch.Tensor:
    return next_tokens(logits, labels)


def test_a_loss_function_of_ones_own_is_refused_whatever_it_gives_on_a_few_tokens() -> None:
    own: dict[str, Any] = {
        "Weighted": Weighted(),
        "Annealed": Annealed(),
        "without_a_token": without_a_token,
        "copied": copied,
        "partial": partial(ForCausalLMLoss, ignore_index=-100),
    }
    for name, function in own.items():
        model = built(CustomModel)
        model.get_base_model().loss_function = function
        assert_refused(model, f"has a loss function of its own, `{name}`")


class InCode(CustomModel):
    """Computes the loss without `loss_function`."""

    def forward(self, input_ids: torch.Tensor, labels: Any = None, **more: Any) -> Any:
        output: Any = super().forward(input_ids, **more)
        if labels is not None:
            output.loss = next_tokens(output.logits, labels)
        return output


class PassesNumber(CustomModel):
    def forward(self, input_ids: torch.Tensor, labels: Any = None, **more: Any) -> Any:
        output: Any = super().forward(input_ids, **more)
        if labels is not None:
            output.loss = self.loss_function(
                output.logits,
                labels,
                vocab_size=VOCABULARY,
                num_items_in_batch=(labels[:, 1:] != -100).sum(),
            )
        return output


class OtherLabels(CustomModel):
    def forward(self, input_ids: torch.Tensor, labels: Any = None, **more: Any) -> Any:
        output: Any = super().forward(input_ids, **more)
        if labels is not None:
            kept = torch.where(labels == VOCABULARY, -100, labels)
            output.loss = self.loss_function(output.logits, kept, vocab_size=VOCABULARY)
        return output


class CapsForLoss(CustomModel):
    def forward(self, input_ids: torch.Tensor, labels: Any = None, **more: Any) -> Any:
        output: Any = super().forward(input_ids, **more)
        if labels is not None:
            capped = output.logits.clamp(-1e3, 1e3)
            output.loss = self.loss_function(capped, labels, vocab_size=VOCABULARY)
        return output


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (InCode, "computes its loss by other code than its `loss_function`"),
        (PassesNumber, "passes `num_items_in_batch` to its `loss_function`"),
        (OtherLabels, "passes other labels to its `loss_function` than it is given"),
        (CapsForLoss, "passes other logits to its `loss_function` than it returns"),
    ],
)
def test_a_loss_that_is_transformers_own_in_part_only_is_refused(
    kind: type[CustomModel], what: str
) -> None:
    assert_refused(built(kind), what)


def test_a_loss_function_is_the_models_own_again_after_an_inspection() -> None:
    model = built(CustomModel)
    assert_equal(model)
    assert "_loss_function" not in vars(model.get_base_model())
    model = built(CustomModel)
    model.get_base_model().loss_function = ForCausalLMLoss
    assert_equal(model)
    assert vars(model.get_base_model())["_loss_function"] is ForCausalLMLoss


def test_a_hook_around_an_adapted_model_that_changes_its_loss_is_refused() -> None:
    model = built(CustomModel)

    def change(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        if output.loss is not None:
            output.loss = output.loss * 1.001
        return output

    model.register_forward_hook(change)
    assert_refused(model, r"gives a loss of [\d.]+ where")


def test_a_small_extra_term_shows_in_16_bits_too() -> None:
    assert_refused(built(WithZLoss).bfloat16(), r"gives a loss of [\d.]+ where")


def qwen3(config: Any) -> Any:
    base = tiny_model("qwen3")
    return get_peft_model(base, config).train()


def test_the_regularisation_of_adalora_is_refused() -> None:
    config = AdaLoraConfig(
        target_modules=["q_proj"], total_step=10, init_r=4, target_r=2, task_type="CAUSAL_LM"
    )
    assert_refused(
        qwen3(config), "reads the modules or parameters of a layer from outside.*AdaLora"
    )


def test_invocation_tokens_of_an_adapter_are_refused() -> None:
    config = LoraConfig(
        target_modules=["q_proj"], alora_invocation_tokens=[7, 8], task_type="CAUSAL_LM"
    )
    assert_refused(qwen3(config), "reads the modules or parameters of a layer from outside")


def bart() -> Any:
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCABULARY,
            d_model=WIDTH,
            encoder_layers=2,
            decoder_layers=3,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=WIDTH,
            decoder_ffn_dim=WIDTH,
            max_position_embeddings=32,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            dropout=0.0,
        )
    )


def bert() -> Any:
    return BertForMaskedLM(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=WIDTH,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


@pytest.mark.thorough
@pytest.mark.parametrize("build", [bart, bert, lambda: tiny_model("pegasus")])
def test_a_loss_that_is_not_shifted_is_refused(build: Callable[[], Any]) -> None:
    model = build()
    names = ["q_proj"] if "Bert" not in type(model).__name__ else ["query"]
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=names)).train()
    assert_refused(adapted, "compares each token's logits with the label in its own place")
