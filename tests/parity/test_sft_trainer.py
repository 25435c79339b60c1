"""SluiceSFTTrainer against TRL's own SFTTrainer, on the same rows.

TRL multiplies the head in tiles of the vocabulary, so gradients differ by rounding even in a
resident model, and AdamW turns rounding of gradients near zero into steps. So adapters are compared
after SGD.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig

from finetune.errors import ConfigError
from tests.parity.sft_trainers import ROWS, TOKENIZER, both, made, tiny_model, trained
from tests.parity.steps import with_lora
from tests.parity.trainers import STREAMING, differences, history

pytestmark = [
    pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed"),
    pytest.mark.filterwarnings("ignore"),  # TRL's own
]

ROUNDING = 1e-6


def require_equal(plain: Any, ours: Any) -> None:
    found = differences(plain, ours)
    assert found.losses <= ROUNDING
    assert found.grad_norms <= ROUNDING
    assert found.eval_losses <= ROUNDING
    assert found.adapter <= ROUNDING
    for name in ("num_tokens", "eval_num_tokens"):
        assert history(plain, name) == history(ours, name)
    assert history(plain, "eval_mean_token_accuracy") == pytest.approx(
        history(ours, "eval_mean_token_accuracy"), abs=ROUNDING
    )


def test_answers_train_and_evaluate_as_by_trl(tmp_path: Path) -> None:
    plain, ours = both(tmp_path, "answers")
    require_equal(plain, ours)
    assert len(history(ours, "loss")) == 6


@pytest.mark.thorough
def test_packed_rows_are_kept_apart_as_by_trl(tmp_path: Path) -> None:
    plain, ours = both(tmp_path, "texts", model="qwen3", packing=True, max_length=32)
    require_equal(plain, ours)


CASES: dict[str, dict[str, Any]] = {
    "texts": {"rows": "texts"},
    "chats": {"rows": "chats", "model": "qwen3", "max_length": 60},
    "gemma3": {"rows": "texts", "model": "gemma3"},
    "experts": {"rows": "texts", "model": "qwen3_moe", "router_aux_loss_coef": 0.0},
    "no_padding": {"rows": "texts", "model": "qwen3", "padding_free": True, "max_length": None},
    "wrapped": {
        "rows": "texts",
        "packing": True,
        "packing_strategy": "wrapped",
        "max_length": 32,
    },
    "packed_to_train_alone": {
        "rows": "texts",
        "model": "gemma3",
        "packing": True,
        "eval_packing": False,
        "max_length": 32,
    },
    "packed_answers_in_eights": {
        "rows": "answers",
        "packing": True,
        "max_length": 32,
        "pad_to_multiple_of": 8,
    },
    "all_of_the_prompt": {"rows": "answers", "completion_only_loss": False},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rows_mean_what_they_mean_to_trl(tmp_path: Path, name: str) -> None:
    require_equal(*both(tmp_path, **CASES[name]))


@pytest.mark.slow
def test_adamw_ends_within_the_rounding_that_it_amplifies(tmp_path: Path) -> None:
    found = differences(*both(tmp_path, "answers", optim="adamw_torch"))
    assert found.losses <= ROUNDING
    assert found.adapter <= 1e-4


@pytest.mark.slow
def test_a_run_resumes_to_the_bit(tmp_path: Path) -> None:
    whole = trained(tmp_path, "answers", is_streamed=True, model="llama", save_steps=2)
    from finetune.integrations.sft import SluiceSFTTrainer

    resumed: Any = SluiceSFTTrainer(
        with_lora(tiny_model("llama")),
        whole.args,
        streaming=STREAMING,
        train_dataset=Dataset.from_list(ROWS["answers"]),
        eval_dataset=Dataset.from_list(ROWS["answers"][:7]),
        processing_class=TOKENIZER,
    )
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
    assert history(resumed, "loss") == history(whole, "loss")
    ends = [dict(one.model.named_parameters()) for one in (whole, resumed)]
    assert all(
        torch.equal(value, ends[1][name]) for name, value in ends[0].items() if value.requires_grad
    )


def test_a_mixtures_router_loss_is_refused_with_the_setting_that_leaves_it_out(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="output_router_logits: true") as caught:
        trained(tmp_path, "texts", is_streamed=True, model="qwen3_moe")
    assert "router_aux_loss_coef=0.0" in caught.value.hint


def test_the_loss_of_dynamic_fine_tuning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is given loss_type=dft"):
        trained(tmp_path, "texts", is_streamed=True, model="llama", loss_type="dft")


def test_logits_of_packed_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="logits of rows that share a sequence"):
        made(tmp_path, "texts", packing=True, max_length=32, compute_metrics=lambda _: {})
    trainer = made(tmp_path, "texts", packing=True, max_length=32)
    with pytest.raises(ConfigError, match="logits of rows that share a sequence"):
        trainer.predict(trainer.eval_dataset)


@pytest.mark.slow
def test_metrics_of_logits_are_trls(tmp_path: Path) -> None:
    def right(found: Any) -> dict[str, float]:
        right_BT = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
        return {"right": right_BT[found.label_ids[:, 1:] != -100].mean()}

    plain, ours = both(tmp_path, "answers", compute_metrics=right)
    assert history(plain, "eval_right") == history(ours, "eval_right")
    assert differences(plain, ours).eval_losses <= ROUNDING


@pytest.mark.slow
def test_rows_of_another_form_are_evaluated_as_by_trl(tmp_path: Path) -> None:
    every = [
        [
            trainer.evaluate(Dataset.from_list(ROWS["texts"][:5]))["eval_loss"],
            trainer.evaluate({"a": Dataset.from_list(ROWS["answers"][:4])})["eval_a_loss"],
        ]
        for trainer in both(tmp_path, "answers", packing=True, max_length=32)
    ]
    assert every[1] == pytest.approx(every[0], rel=ROUNDING)


@pytest.mark.slow
def test_an_adapter_that_trl_makes_is_trained(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"])
    found = differences(*both(tmp_path, "answers", peft_config=config))
    assert found.losses <= ROUNDING
    assert found.adapter <= ROUNDING
