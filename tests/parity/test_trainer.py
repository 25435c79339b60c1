"""The streamed trainers against transformers' and TRL's own, on the same rows."""

from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback

from finetune.adapter.linear_lora import Linear
from finetune.errors import ConfigError, DataError
from finetune.integrations.trainer import SluiceTrainer, Streaming
from offload.errors import OffloadError
from tests.parity.sft_trainers import ROWS, TOKENIZER, both, tiny_model, trained
from tests.parity.sft_trainers import made as made_of_sft_trainers
from tests.parity.steps import MODELS, NUM_LAYERS, tiny, with_lora
from tests.parity.tied_models import tied
from tests.parity.trainers import (
    STREAMING,
    Differences,
    Heard,
    adapter,
    collate,
    differences,
    history,
    made,
    rows,
)

ROUNDING = 1e-6
"""Of a loss in fp32, whose chunks are added up in another order; found are at most 4e-7."""


def both_trainer(folder: Path, model: str = "llama", **changes: Any) -> tuple[Any, Any]:
    """Return the plain Trainer and ours, both trained; one seeds all randomness when it is made."""
    found = []
    for kind in (Trainer, SluiceTrainer):
        found.append(made(kind, folder, model=tiny(model), **changes))
        found[-1].train()
    return found[0], found[1]


def require_equal(found: Differences) -> None:
    assert found.losses <= ROUNDING
    assert found.grad_norms <= ROUNDING
    assert found.eval_losses <= ROUNDING
    assert found.adapter <= ROUNDING


@pytest.fixture(scope="module")
def heard() -> dict[type[Trainer], Heard]:
    """Return the callbacks of the two trainers of `trained`."""
    return {kind: Heard() for kind in (Trainer, SluiceTrainer)}


@pytest.fixture(scope="module")
def trained_trainer(
    tmp_path_factory: pytest.TempPathFactory, heard: dict[type[Trainer], Heard]
) -> tuple[Any, Any]:
    folder = tmp_path_factory.mktemp("trained")
    plain, ours = (
        made(kind, folder, save_steps=2, callbacks=[callback]) for kind, callback in heard.items()
    )
    plain.train()
    ours.train()
    return plain, ours


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_losses_norms_rates_evaluations_and_adapter_are_the_plain_trainers(
    trained_trainer: tuple[Any, Any],
) -> None:
    plain, ours = trained_trainer
    require_equal(differences(plain, ours))
    assert len(history(ours, "loss")) == 6
    assert len(history(ours, "eval_loss")) == 3
    norms = history(ours, "grad_norm")
    assert min(norms) < 0.4 < max(norms), "some steps are clipped, and some are not"
    start, end = adapter(tiny("llama")), adapter(ours.model)
    assert all(not torch.equal(start[name], end[name]) for name in start)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_a_step_loads_each_layer_once_per_pass_whatever_its_micro_batches(
    tmp_path: Path,
) -> None:
    ours = made(SluiceTrainer, tmp_path, max_steps=3, eval_strategy="no", save_strategy="no")
    ours.train()
    assert ours.num_loads == 2 + 3 * 2 * (NUM_LAYERS - 2), "2 slots are filled once"
    before = ours.num_loads
    ours.evaluate()  # 3 batches
    assert ours.num_loads - before <= NUM_LAYERS


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_entries_of_the_log_have_the_plain_trainers_names(trained_trainer: tuple[Any, Any]) -> None:
    plain, ours = ([sorted(one) for one in t.state.log_history] for t in trained_trainer)
    assert plain == ours


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_weights_stay_on_the_host_and_come_back_at_the_end(tmp_path: Path) -> None:
    ours = made(SluiceTrainer, tmp_path, max_steps=1, eval_strategy="no")
    ours.train()
    batch = collate(rows(2))
    with pytest.raises(OffloadError, match="where gradients are recorded"):
        ours.model(**batch)
    ours.detach()
    plain = made(Trainer, tmp_path, max_steps=1, eval_strategy="no")
    plain.train()
    for trainer in (plain, ours):
        trainer.model.eval()
    losses = [one.model(**batch).loss.item() for one in (plain, ours)]
    assert losses[1] == pytest.approx(losses[0], rel=ROUNDING)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_what_layers_keep_and_where_embeddings_are_changes_no_bit(tmp_path: Path) -> None:
    kept = Streaming(
        num_slots=2,
        kept_graphs=1,
        kept_outputs=1,
        sent_outputs=1,
        sent_graphs=1,
        embeddings="host",
    )
    plainest, other = (
        made(SluiceTrainer, tmp_path / str(number), streaming=streaming, max_steps=4, eval_steps=3)
        for number, streaming in enumerate((STREAMING, kept))
    )
    for one in (plainest, other):
        one.train()
        one.detach()
    for name in ("loss", "grad_norm", "eval_loss"):
        assert history(other, name) == history(plainest, name)
    for name, value in adapter(plainest.model).items():
        assert torch.equal(value, adapter(other.model)[name])


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_where_one_weight_of_embedding_and_head_is_changes_no_bit(tmp_path: Path) -> None:
    on_host = replace(STREAMING, embeddings="host", head="host")
    plainest, other = (
        made(
            SluiceTrainer,
            tmp_path / str(number),
            model=tied("gemma3_text"),
            streaming=streaming,
            max_steps=4,
            eval_steps=3,
        )
        for number, streaming in enumerate((STREAMING, on_host))
    )
    for one in (plainest, other):
        one.train()
        one.detach()
    for name in ("loss", "grad_norm", "eval_loss"):
        assert history(other, name) == history(plainest, name)
    for name, value in adapter(plainest.model).items():
        assert torch.equal(value, adapter(other.model)[name])


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_mlps_in_tiles_and_branches_in_the_base_dtype_differ_by_rounding(tmp_path: Path) -> None:
    plain = made(Trainer, tmp_path, num_train_epochs=1)
    streaming = Streaming(num_slots=2, mlp_chunk_tokens=5, compute_dtype="auto")
    ours = made(SluiceTrainer, tmp_path, streaming=streaming, num_train_epochs=1)
    assert any(isinstance(module, Linear) for module in ours.model.modules())
    plain.train()
    ours.train()
    found = differences(plain, ours)
    assert max(found.losses, found.grad_norms, found.eval_losses) <= ROUNDING
    assert found.adapter <= 10 * ROUNDING  # AdamW makes steps of rounding near zero
    ours.detach()
    assert not any(isinstance(module, Linear) for module in ours.model.modules())
    batch = collate(rows(2))
    for one in (plain, ours):
        one.model.eval()
    assert ours.model(**batch).loss.item() == pytest.approx(
        plain.model(**batch).loss.item(), rel=ROUNDING
    )


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_a_model_that_cannot_be_attached_is_left_to_peft(tmp_path: Path) -> None:
    model = tiny("llama")
    refused = Streaming(num_slots=2, kept_graphs=9, compute_dtype="auto")
    with pytest.raises(OffloadError):
        made(SluiceTrainer, tmp_path, model=model, streaming=refused)
    assert not any(isinstance(module, Linear) for module in model.modules())
    streaming = Streaming(num_slots=2, compute_dtype="auto")
    made(SluiceTrainer, tmp_path, model=model, streaming=streaming).engine.detach()
    assert any(isinstance(module, Linear) for module in model.modules())
    made(SluiceTrainer, tmp_path, model=model)  # whose adapters peft computes
    assert not any(isinstance(module, Linear) for module in model.modules())


SETTINGS: dict[str, dict[str, Any]] = {
    "no_accumulation": {"gradient_accumulation_steps": 1},
    "more_accumulation_than_rows": {"gradient_accumulation_steps": 20},
    "drop_last": {"dataloader_drop_last": True},
    "no_clipping": {"max_grad_norm": 0.0},
    "max_steps": {"max_steps": 7},
    "checkpointing": {"activation_checkpointing": True},
    "by_length": {"train_sampling_strategy": "group_by_length"},
    "in_order": {"train_sampling_strategy": "sequential"},
    "cosine": {"lr_scheduler_type": "cosine", "warmup_steps": 2},
    "sgd": {"optim": "sgd"},
    "logging_less": {"logging_steps": 2, "logging_first_step": True},
    "each_device": {"average_tokens_across_devices": False},
    "eval_on_start": {"eval_on_start": True, "per_device_eval_batch_size": 4},
    "tokens_seen": {"include_num_input_tokens_seen": "non_padding"},
    "workers": {"dataloader_num_workers": 1},
    "data_seed": {"data_seed": 7, "seed": 5},
}


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("name", SETTINGS)
def test_settings_mean_what_they_mean_to_the_plain_trainer(tmp_path: Path, name: str) -> None:
    plain, ours = both_trainer(tmp_path, **{"num_train_epochs": 1} | SETTINGS[name])
    require_equal(differences(plain, ours))
    assert ours.state.num_input_tokens_seen == plain.state.num_input_tokens_seen


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("model", sorted(MODELS))
def test_models_train_as_by_the_plain_trainer(tmp_path: Path, model: str) -> None:
    plain, ours = both_trainer(tmp_path, model, num_train_epochs=1)
    require_equal(differences(plain, ours))


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_a_run_resumes_to_the_bit_and_so_does_the_plain_trainer(
    trained_trainer: tuple[Any, Any], tmp_path: Path
) -> None:
    whole = trained_trainer[1]
    checkpoint = str(Path(whole.args.output_dir) / "checkpoint-2")  # within the first epoch
    resumed = made(SluiceTrainer, tmp_path / "resumed")
    resumed.train(resume_from_checkpoint=checkpoint)
    assert history(resumed, "loss") == history(whole, "loss")
    by_plain = made(Trainer, tmp_path / "plain")
    by_plain.train(resume_from_checkpoint=checkpoint)
    ends = [adapter(one.model) for one in (whole, resumed, by_plain)]
    for name, value in ends[0].items():
        assert torch.equal(value, ends[1][name])
        torch.testing.assert_close(value, ends[2][name], rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_dropout_is_drawn_by_seed_and_step(tmp_path: Path) -> None:
    def dropping(folder: str, *, dropout: float = 0.3, **changes: Any) -> Any:
        changes = {"max_steps": 3, "save_steps": 2, "eval_strategy": "no"} | changes
        model = tiny("llama", dropout=dropout)
        return made(SluiceTrainer, tmp_path / folder, model=model, **changes)

    whole, resumed = dropping("a"), dropping("b")
    whole.train()
    resumed.train(resume_from_checkpoint=str(Path(whole.args.output_dir) / "checkpoint-2"))
    ends = [adapter(one.model) for one in (whole, resumed)]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())
    assert history(resumed, "loss") == history(whole, "loss")
    for other in (dropping("c", seed=1, max_steps=1), dropping("d", dropout=0.0, max_steps=1)):
        other.train()
        assert history(other, "loss")[0] != history(whole, "loss")[0]


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_the_best_checkpoint_is_loaded_and_training_goes_on(tmp_path: Path) -> None:
    best: dict[str, Any] = {
        "num_train_epochs": 1,
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,
        "save_steps": 1,
    }
    plain, ours = both_trainer(tmp_path, **best)
    assert Path(ours.state.best_model_checkpoint).name == (
        Path(plain.state.best_model_checkpoint).name
    )
    for trainer in (plain, ours):
        trainer.train()
    require_equal(differences(plain, ours))


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_callbacks_are_called_for_the_same(
    trained_trainer: tuple[Any, Any], heard: dict[type[Trainer], Heard]
) -> None:
    plain, ours = (heard[type(trainer)].events for trainer in trained_trainer)
    assert plain == ours
    assert {name for name, _ in plain} == set(Heard.NAMES)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_a_callback_that_stops_within_a_step_leaves_the_weights(tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step == 2

    plain, ours = both_trainer(tmp_path, callbacks=[Stop()], eval_strategy="no")
    assert ours.state.global_step == 2
    assert differences(plain, ours).adapter <= ROUNDING


def odd_rows() -> list[dict[str, list[int]]]:
    """Rows of which one has no label, nor has the batch of the last two."""
    given = rows(8, seed=9)
    for number in (1, 6, 7):
        given[number]["labels"] = [-100] * len(given[number]["input_ids"])
    return given


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, 3, 8])
def test_evaluation_weighs_batches_as_the_plain_trainer(
    trained_trainer: tuple[Any, Any], size: int
) -> None:
    every = {}
    for trainer in trained_trainer:
        trainer.args.per_device_eval_batch_size = size
        losses = [
            trainer.evaluate(Dataset.from_list(odd_rows()))["eval_loss"],
            trainer.evaluate({"a": Dataset.from_list(rows(5, seed=1))})["eval_a_loss"],
            trainer.predict(Dataset.from_list(odd_rows())).metrics["test_loss"],
        ]
        every[type(trainer).__name__] = losses
    assert every["SluiceTrainer"] == pytest.approx(every["Trainer"], rel=ROUNDING)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_an_evaluation_computes_with_the_adapters_that_are_on(tmp_path: Path) -> None:
    every = {}
    for kind in (Trainer, SluiceTrainer):
        model = with_two_adapters()
        trainer = made(kind, tmp_path, model=model)
        losses = [trainer.evaluate()["eval_loss"]]
        with model.disable_adapter():
            losses.append(trainer.evaluate()["eval_loss"])
        losses.append(trainer.evaluate()["eval_loss"])
        model = with_two_adapters()
        model.base_model.set_adapter(["default", "other"])
        losses.append(made(kind, tmp_path, model=model).evaluate()["eval_loss"])
        every[kind.__name__] = losses
    first, off, again, both_on = every["SluiceTrainer"]
    assert first == again
    assert len({round(loss, 4) for loss in (first, off, both_on)}) == 3
    assert every["SluiceTrainer"] == pytest.approx(every["Trainer"], rel=ROUNDING)


def with_two_adapters() -> Any:
    """Return a model whose adapters change what it computes; the first is on, and trains."""
    model = tiny("llama")
    model.add_adapter("other", model.peft_config["default"])
    draw = torch.Generator().manual_seed(4)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(std=0.5, generator=draw)
    return model


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_predictions_are_the_plain_trainers(trained_trainer: tuple[Any, Any]) -> None:
    plain, ours = (one.predict(Dataset.from_list(rows(7, seed=5))) for one in trained_trainer)
    assert plain.predictions == pytest.approx(ours.predictions, abs=ROUNDING)
    assert (plain.label_ids == ours.label_ids).all()


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_metrics_of_logits_are_the_plain_trainers(tmp_path: Path) -> None:
    def right(found: Any) -> dict[str, float]:
        right_BT = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
        return {"right": right_BT[found.label_ids[:, 1:] != -100].mean()}

    plain, ours = both_trainer(tmp_path, compute_metrics=right, max_steps=2)
    assert history(plain, "eval_right") == history(ours, "eval_right")
    require_equal(differences(plain, ours))


class Stream(IterableDataset[dict[str, list[int]]]):
    """Rows without a length."""

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter(rows(11))


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_rows_without_a_length_train_and_evaluate(tmp_path: Path) -> None:
    plain, ours = both_trainer(tmp_path, train_dataset=Stream(), eval_dataset=Stream(), max_steps=2)
    require_equal(differences(plain, ours))


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_flattened_rows_are_kept_apart(tmp_path: Path) -> None:
    def flattened(given: Any) -> dict[str, torch.Tensor]:
        """Flatten rows with their positions alone, from which llama makes its own mask."""
        lens = [len(row["input_ids"]) for row in given]
        labels = [label for row in given for label in (-100, *row["labels"][1:])]
        return {
            "input_ids": torch.tensor([[i for row in given for i in row["input_ids"]]]),
            "labels": torch.tensor([labels]),
            "position_ids": torch.cat([torch.arange(n) for n in lens]).unsqueeze(0),
        }

    plain, ours = both_trainer(tmp_path, data_collator=flattened, max_steps=2)
    require_equal(differences(plain, ours))


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("has_boundaries", [False, True])
def test_batches_of_the_flattening_collator_are_taken(tmp_path: Path, has_boundaries: bool) -> None:
    flatten = DataCollatorWithFlattening(
        return_flash_attn_kwargs=has_boundaries, return_seq_idx=has_boundaries
    )
    changes = {"data_collator": flatten, "remove_unused_columns": False, "optim": "sgd"}
    require_equal(differences(*both_trainer(tmp_path, "qwen3", **changes)))


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.gpu
def test_a_card_trains_what_the_plain_trainer_trains(tmp_path: Path) -> None:
    plain, ours = both_trainer(tmp_path, "qwen3", use_cpu=False, optim="sgd")
    found = differences(plain, ours)
    assert max(found.losses, found.grad_norms, found.eval_losses, found.adapter) <= 1e-5
    logits = [one.predict(Dataset.from_list(rows(7, seed=5))).predictions for one in (plain, ours)]
    assert logits[1] == pytest.approx(logits[0], abs=1e-4)
    ours.detach()
    assert {p.device.type for p in ours.model.parameters()} == {"cpu"}


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_a_step_without_labels_is_refused(tmp_path: Path) -> None:
    given = [row | {"labels": [-100] * len(row["input_ids"])} for row in rows()]
    ours = made(SluiceTrainer, tmp_path, train_dataset=Dataset.from_list(given))
    with pytest.raises(DataError, match=r"no token in the 3 micro-batches of step 1 has a label"):
        ours.train()


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
def test_a_model_without_an_adapter_is_refused(tmp_path: Path) -> None:
    base: Any = MODELS["llama"]()
    with pytest.raises(ConfigError, match=r"the model is a LlamaForCausalLM; .* adapter of peft's"):
        made(SluiceTrainer, tmp_path, model=base)


@pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning")
@pytest.mark.thorough
def test_the_guides_example_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[2] / "docs" / "guides" / "trainer.md"
    example = page.read_text().partition("```python\n")[2].partition("```")[0]
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(page), "exec"), {})
    assert "23 layers loaded in 2 steps" in capsys.readouterr().out.splitlines()


# -------------------------------------------------------------------------------------- sft trainer


def require_equal_sft(plain: Any, ours: Any) -> None:
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


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.filterwarnings("ignore")
def test_answers_train_and_evaluate_as_by_trl(tmp_path: Path) -> None:
    plain, ours = both(tmp_path, "answers")
    require_equal_sft(plain, ours)
    assert len(history(ours, "loss")) == 6


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.thorough
def test_packed_rows_are_kept_apart_as_by_trl(tmp_path: Path) -> None:
    plain, ours = both(tmp_path, "texts", model="qwen3", packing=True, max_length=32)
    require_equal_sft(plain, ours)


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


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_rows_mean_what_they_mean_to_trl(tmp_path: Path, name: str) -> None:
    require_equal_sft(*both(tmp_path, **CASES[name]))


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_adamw_ends_within_the_rounding_that_it_amplifies(tmp_path: Path) -> None:
    found = differences(*both(tmp_path, "answers", optim="adamw_torch"))
    assert found.losses <= ROUNDING
    assert found.adapter <= 1e-4


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.filterwarnings("ignore")
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


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.filterwarnings("ignore")
def test_logits_of_packed_rows_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="logits of rows that share a sequence"):
        made_of_sft_trainers(
            tmp_path, "texts", packing=True, max_length=32, compute_metrics=lambda _: {}
        )
    trainer = made_of_sft_trainers(tmp_path, "texts", packing=True, max_length=32)
    with pytest.raises(ConfigError, match="logits of rows that share a sequence"):
        trainer.predict(trainer.eval_dataset)


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_metrics_of_logits_are_trls(tmp_path: Path) -> None:
    def right(found: Any) -> dict[str, float]:
        right_BT = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
        return {"right": right_BT[found.label_ids[:, 1:] != -100].mean()}

    plain, ours = both(tmp_path, "answers", compute_metrics=right)
    assert history(plain, "eval_right") == history(ours, "eval_right")
    assert differences(plain, ours).eval_losses <= ROUNDING


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.filterwarnings("ignore")
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


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_an_adapter_that_trl_makes_is_trained(tmp_path: Path) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"])
    found = differences(*both(tmp_path, "answers", peft_config=config))
    assert found.losses <= ROUNDING
    assert found.adapter <= ROUNDING
