"""lm_eval through the engine against its own class, on tasks in local files."""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from finetune.errors import ConfigError

pytestmark = [
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed"),
    pytest.mark.filterwarnings("ignore"),  # lm_eval's own
]

WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight")
ROWS: list[dict[str, Any]] = [
    {
        "question": f"what follows {word}?",
        "choices": [WORDS[(n + k) % 8] for k in (1, 3, 4)],
        "answer": n % 3,
        "text": f"{word} and then {WORDS[(n + 1) % 8]}, " * (1 + n % 3),
    }
    for n, word in enumerate(WORDS)
]
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
    "answers": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["q", "z"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name, task in TASKS.items():
        content = {
            "task": f"local_{name}",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
            "test_split": "test",
            **task,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content))
    return folder


@pytest.fixture(scope="module")
def adapter_dir(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Path:
    torch.manual_seed(1)
    base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "o_proj"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(str(folder))
    return folder


def sluice(model_dir: Path, machine_file: Path, *words: str, **options: Any) -> Any:
    from finetune.integrations.lm_eval import SluiceLM

    settings = " ".join(["model.dtype=float32", "train.seq_len=64", *words])
    return SluiceLM(str(model_dir), settings=settings, machine=str(machine_file), **options)


@pytest.fixture(params=["base", "adapter"])
def both(
    request: pytest.FixtureRequest, model_dir: Path, adapter_dir: Path, machine_file: Path
) -> Iterator[tuple[Any, Any]]:
    """Return our model and lm_eval's own."""
    from lm_eval.models.huggingface import HFLM

    options = {"adapter": str(adapter_dir)} if request.param == "adapter" else {}
    ours = sluice(model_dir, machine_file, **options)
    peft = {"peft": str(adapter_dir)} if request.param == "adapter" else {}
    theirs: Any = HFLM(pretrained=str(model_dir), dtype="float32", device="cpu", **peft)
    yield ours, theirs
    ours.close()


def evaluated(model: Any, tasks: Path) -> dict[str, Any]:
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=[f"local_{name}" for name in TASKS],
        task_manager=manager,
        bootstrap_iters=0,
        cache_requests=False,
        log_samples=True,
    )
    assert found is not None
    return found


def test_local_tasks_have_the_results_of_lm_evals_own_class(both, tasks) -> None:
    ours, theirs = evaluated(both[0], tasks), evaluated(both[1], tasks)
    for name in TASKS:
        mine, other = ours["results"][f"local_{name}"], theirs["results"][f"local_{name}"]
        figures = {key for key, value in other.items() if isinstance(value, float)}
        assert figures
        for key in figures:
            assert mine[key] == pytest.approx(other[key], rel=1e-5), (name, key)
    answers = [one["resps"] for one in ours["samples"]["local_answers"]]
    assert answers == [one["resps"] for one in theirs["samples"]["local_answers"]]
    assert len({str(one) for one in answers}) > 1


def test_all_requests_pass_the_layers_together(model_dir, machine_file) -> None:
    from lm_eval.api.instance import Instance

    model = sluice(model_dir, machine_file, "offload.num_slots=2")
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=(row["question"], choice), idx=0)
        for row in ROWS
        for choice in row["choices"]
    ]
    try:
        together = model.loglikelihood(requests, disable_tqdm=True)
        assert model.num_loads == 4  # once all layers
        alone = [model.loglikelihood([one], disable_tqdm=True)[0] for one in requests]
    finally:
        model.close()
    for (logp, is_greedy), (logp_alone, is_greedy_alone) in zip(together, alone, strict=True):
        assert logp == pytest.approx(logp_alone, abs=1e-4)
        assert is_greedy == is_greedy_alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"do_sample": True, "temperature": 0.7}, "a task samples"),
        ({"max_gen_toks": 128}, "max_gen_toks is 128"),
        ({"num_beams": 4}, "a task sets num_beams"),
    ],
)
def test_generation_that_is_not_greedy_is_refused(
    options, message, model_dir, machine_file
) -> None:
    from lm_eval.api.instance import Instance

    model = sluice(model_dir, machine_file)
    request = Instance(
        request_type="generate_until", doc={}, arguments=("a", {"until": ["b"], **options}), idx=0
    )
    try:
        with pytest.raises(ConfigError, match=message):
            model.generate_until([request])
    finally:
        model.close()


def test_a_batch_size_is_refused(model_dir) -> None:
    from finetune.integrations.lm_eval import SluiceLM

    with pytest.raises(ConfigError, match="batch_size 8"):
        SluiceLM(str(model_dir), batch_size=8)
