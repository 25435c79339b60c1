"""What is done with a trained model: scored, talked to, merged, exported."""

import copy
import json
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from finetune.errors import ConfigError
from tests.e2e.runs import run
from tests.e2e.talking import Plain, talk

NUM_LAYERS, NUM_CHECKPOINTS = 4, 4


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory, model_dir: Path, rows_file: Path, machine_file: Path
) -> Path:
    """Return a folder with a recipe and its finished run, all of whose checkpoints are kept."""
    from tests.e2e.conftest import recipe_writer

    folder = tmp_path_factory.mktemp("trained")
    recipe = recipe_writer(folder / "whole", model_dir, rows_file)(
        output={"checkpoint_every": 1, "keep_checkpoints": NUM_CHECKPOINTS},
        train={"steps": NUM_CHECKPOINTS},
        report={"samples": 0, "log_to": []},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        assert run("finetune", recipe, "--machine", machine_file) == 0
    return folder / "whole"


def score(capsys: Any, *words: object) -> tuple[dict[str, Any], str]:
    capsys.readouterr()
    assert run("score", *words, "--json") == 0
    shown = capsys.readouterr()
    return json.loads(shown.out), shown.err


def plain_model(model_dir: Path, trained: Path, step: int | None) -> Any:
    """Return the base, or with a checkpoint's adapter, by transformers and peft alone."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if step is None:
        return model.eval()
    config = LoraConfig.from_pretrained(str(trained / "run" / "adapter"))
    config.inference_mode = False
    model = get_peft_model(model, config)
    file = trained / "run" / "checkpoints" / f"step-{step:07d}" / "trained.safetensors"
    tensors = load_file(file)
    assert tensors.keys() == {n for n, p in model.named_parameters() if p.requires_grad}
    assert not model.load_state_dict(tensors, strict=False).unexpected_keys
    return model.eval()


def plain_logp(model: Any, prompt: list[int], answer: list[int]) -> float:
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
    logps = logits.double().log_softmax(-1).gather(1, torch.tensor(answer)[:, None])
    return float(logps.sum())


def asked_and_answered(tokenizer: Any, prompt: str, answer: str) -> tuple[list[int], list[int]]:
    """Return the tokens before an answer, and its own with the one that ends it."""
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    before, found, _ = text.rpartition(f"{answer}<|im_end|>")
    return tuple(tokenizer(part, add_special_tokens=False).input_ids for part in (before, found))


@pytest.mark.slow
def test_checkpoints_score_as_by_transformers_and_peft_in_one_pass(
    trained, model_dir, rows_file, machine_file, cache, tmp_path, capsys
) -> None:
    out = tmp_path / "scores.jsonl"
    words = [trained / "recipe.yaml", rows_file, "--checkpoints", trained / "run", "--base"]
    words += ["--machine", machine_file, "--out", out]
    found, shown = score(capsys, *words)
    assert found["num_loads"] == NUM_LAYERS
    assert "1 pass over the 4 layers" in shown
    names = ["base", *(f"step {step}" for step in range(1, NUM_CHECKPOINTS + 1))]
    losses = {one["name"]: one["loss"] for one in found["scores"]}
    assert sorted(losses) == sorted(names)
    assert list(losses.values()) == sorted(losses.values())
    assert losses["step 4"] < losses["base"]
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    by_row = [json.loads(line) for line in out.read_text().splitlines()]
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    assert len(by_row) == len(rows) * len(names)
    for name in names:
        model = plain_model(model_dir, trained, None if name == "base" else int(name[-1]))
        own = [row for row in by_row if row["name"] == name]
        for row, raw in zip(own, rows, strict=True):
            prompt, answer = asked_and_answered(tokenizer, raw["question"], raw["answer"])
            assert row["tokens"] == len(answer)
            assert row["logp"] == pytest.approx(plain_logp(model, prompt, answer), abs=2e-5)
        total = sum(row["logp"] for row in own) / sum(row["tokens"] for row in own)
        assert losses[name] == pytest.approx(-total, rel=1e-9)


@pytest.mark.thorough
def test_a_finished_adapter_scores_as_its_last_checkpoint(
    trained, rows_file, machine_file, cache, capsys
) -> None:
    words = [trained / "recipe.yaml", rows_file, "--machine", machine_file]
    of_run, _ = score(capsys, *words, "--checkpoints", trained / "run")
    of_adapter, _ = score(capsys, *words, "--adapter", trained / "run")
    last = next(one for one in of_run["scores"] if one["name"] == "step 4")
    assert of_adapter["scores"][0]["loss"] == last["loss"]  # to the bit
    copied = trained / "copy"
    shutil.copytree(trained / "run" / "adapter", copied, dirs_exist_ok=True)
    both, _ = score(capsys, *words, "--adapter", trained / "run", "--adapter", copied)
    assert {one["loss"] for one in both["scores"]} == {last["loss"]}
    assert both["num_loads"] == NUM_LAYERS


@pytest.mark.slow
def test_adapters_that_peft_cannot_hold_together_are_scored_one_after_the_other(
    trained, model_dir, rows_file, machine_file, cache, tmp_path, capsys
) -> None:
    base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    folders, model = list[Path](), base
    kinds: dict[str, dict[str, Any]] = {
        "down": {"target_parameters": ["mlp.experts.down_proj"]},
        "both": {"target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]},
        "plain": {},
    }
    for name, changes in kinds.items():
        config = LoraConfig(r=2, target_modules=["q_proj"], **changes)
        model = get_peft_model(copy.deepcopy(base), config)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "lora_" in parameter_name:
                    parameter.normal_(std=0.3)
        model.save_pretrained(tmp_path / name)
        folders.append(tmp_path / name)
    words = [trained / "recipe.yaml", rows_file, "--machine", machine_file, "--base"]
    found, shown = score(capsys, *words, *(w for f in folders for w in ("--adapter", f)))
    assert "peft cannot hold all of these adapters in one model: 2 passes" in shown
    assert found["num_loads"] == 2 * NUM_LAYERS
    assert [len(wave) for wave in found["waves"]] == [3, 1]
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    losses = {Path(one["name"]).name: one["loss"] for one in found["scores"]}
    for folder in folders:
        model = PeftModel.from_pretrained(copy.deepcopy(base), folder).eval()
        logp, num = 0.0, 0
        for raw in rows:
            prompt, answer = asked_and_answered(tokenizer, raw["question"], raw["answer"])
            logp += plain_logp(model, prompt, answer)
            num += len(answer)
        assert losses[folder.name] == pytest.approx(-logp / num, rel=1e-4)


QUESTIONS: list[dict[str, Any]] = [
    {"prompt": f"is {n} even?", "choices": ["yes", "no", "no idea"], "answer": n % 2}
    for n in range(6)
]


def test_questions_are_answered_as_by_transformers(
    trained, model_dir, machine_file, cache, tmp_path, capsys
) -> None:
    questions = [*QUESTIONS, {**QUESTIONS[0], "prompt": "is it?", "answer": "no idea", "id": 7}]
    file, out = tmp_path / "questions.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in questions))
    words = (model_dir, file, "model.dtype=float32", "--machine", machine_file)
    found, shown = score(capsys, *words, "--out", out)
    assert "Columns that are not used: id" in shown
    tokenizer, model = (
        AutoTokenizer.from_pretrained(model_dir),
        plain_model(model_dir, trained, None),
    )
    num_right = num_right_by_byte = 0
    for row, asked in zip(out.read_text().splitlines(), questions, strict=True):
        own, choices = json.loads(row), asked["choices"]
        logps = [
            plain_logp(model, *asked_and_answered(tokenizer, asked["prompt"], c)) for c in choices
        ]
        assert own["choice_logps"] == pytest.approx(logps, abs=2e-5)
        by_byte = [logp / len(choice) for logp, choice in zip(logps, choices, strict=True)]
        answer = asked["answer"] if isinstance(asked["answer"], int) else 2
        assert own["answer"] == answer
        num_right += logps.index(max(logps)) == answer
        num_right_by_byte += by_byte.index(max(by_byte)) == answer
    (base,) = found["scores"]
    assert base["name"] == "base"
    assert base["accuracy"] == num_right / len(questions)
    assert base["accuracy_by_byte"] == num_right_by_byte / len(questions)
    assert run("score", *words) == 0
    table = capsys.readouterr().out
    assert "accuracy" in table
    assert f"{base['loss']:.4f}" in table


def test_every_token_of_a_long_document_is_scored_once(
    model_dir, machine_file, cache, tmp_path, capsys
) -> None:
    text = "abcdefghij" * 5
    file = tmp_path / "texts.jsonl"
    file.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "short"}) + "\n")
    words = [model_dir, file, "model.dtype=float32", "--machine", machine_file]
    found, _ = score(capsys, *words, "train.seq_len=16", "train.tokens_per_step=16")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
    assert found["scores"][0]["num_tokens"] == len(ids) - 1 + len("short")
    assert found["scores"][0]["num_rows"] == 2


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a", "choices": ["b"], "answer": 0}, "'choices' is no list of two or more"),
        ({"prompt": "a", "choices": ["b", "b"], "answer": 0}, "something empty, twice, or no text"),
        (
            {"prompt": "a", "choices": ["b", "c"], "answer": 2},
            "'answer' is '2', which is no choice",
        ),
        ({"prompt": "a", "choices": ["b", "c"], "answer": True}, "which is no choice"),
        ({"prompt": " ", "choices": ["b", "c"], "answer": 0}, "no text 'prompt'"),
        ({"prompt": "a" * 90, "choices": ["b", "c"], "answer": 0}, "it has more than 64 tokens"),
    ],
)
def test_questions_that_cannot_be_used_are_named(
    row, problem, trained, machine_file, cache, tmp_path, capsys
) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(QUESTIONS[0]) + "\n" + json.dumps(row) + "\n")
    assert run("score", trained / "recipe.yaml", file, "--machine", machine_file) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert problem in error
    assert "1 of 2 rows" in error
    assert "bad.jsonl:2" in error


def test_what_cannot_be_scored_is_refused_with_the_fix(
    trained, rows_file, machine_file, cache, tmp_path, capsys
) -> None:
    def refused(*words: object, code: int = 1) -> str:
        assert run("score", trained / "recipe.yaml", rows_file, *words) == code
        return " ".join(capsys.readouterr().err.split())

    copied, missing = tmp_path / "copied", tmp_path / "nowhere"
    shutil.copytree(trained / "run", copied)
    shutil.rmtree(copied / "checkpoints")
    assert "holds no run" in refused("--checkpoints", tmp_path)
    assert f"{copied} has no checkpoint" in refused("--checkpoints", copied)
    assert str(missing) in refused("--adapter", missing)
    twice = refused("--adapter", trained / "run", "--adapter", trained / "run")
    assert f"{trained / 'run'} is named twice" in twice
    assert f"there is no directory {missing}" in refused("--out", missing / "b.jsonl")
    small = refused("--machine", machine_file, "offload.vram_budget=0.001", code=3)
    assert "scoring a row of" in small
    damaged = copied / "checkpoints" / "step-0000001"
    shutil.copytree(trained / "run" / "checkpoints" / "step-0000001", damaged)
    content = bytearray((damaged / "trained.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "trained.safetensors").write_bytes(content)
    assert f"{damaged} is damaged" in refused("--checkpoints", copied)


@pytest.mark.slow
def test_a_run_that_trained_the_base_is_refused_and_its_model_is_scored(
    write_recipe, rows_file, machine_file, tmp_path, capsys
) -> None:
    recipe = write_recipe(train={"what": "all", "steps": 2, "lr": 0.003})
    content = yaml.safe_load(recipe.read_text())
    del content["adapter"]
    recipe.write_text(yaml.safe_dump(content))
    machine, run_dir = ("--machine", machine_file), tmp_path / "run"
    assert run("finetune", recipe, *machine, "report.samples=0") == 0
    capsys.readouterr()
    assert run("score", recipe, rows_file, "--checkpoints", run_dir, *machine) == 1
    error = " ".join(capsys.readouterr().err.split())
    assert f"{run_dir} trained the model's own weights (train.what: all)" in error
    assert f"`sluice score {run_dir / 'model'} ROWS`" in error
    columns = ["data.columns={prompt: question, completion: answer}"]
    words = [run_dir / "model", rows_file, "model.dtype=float32", *columns, *machine]
    found, _ = score(capsys, *words)
    base, _ = score(capsys, recipe, rows_file, *machine)
    assert found["scores"][0]["loss"] < base["scores"][0]["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("is_dora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpoints_with_modules_trained_whole_score_as_the_run_said(
    is_dora, write_recipe, machine_file, tmp_path, capsys
) -> None:
    """Half of the rows are held out: the run's own evaluation is of other code and cuts."""
    adapter = {"rank": 4, "alpha": 8, "targets": "attention", "experts": not is_dora}
    whole = ["norms", "router", "embed_tokens"]
    recipe = write_recipe(
        adapter=adapter | {"dora": is_dora, "modules_to_save": whole},
        offload={"codec": "native" if is_dora else "nf4"},
        output={"eval_every": 1, "checkpoint_every": 1, "keep_checkpoints": 3},
        train={"steps": 3},
    )
    held_out, train = tmp_path / "held_out.jsonl", tmp_path / "train.jsonl"
    rows = [{"question": f"what is {n}", "answer": f"{n}{n}"} for n in range(40)]
    for file, part in ((train, rows[:20]), (held_out, rows[20:])):
        file.write_text("".join(json.dumps(row) + "\n" for row in part))
    content = yaml.safe_load(recipe.read_text())
    del content["data"]["eval_frac"]
    content["data"] |= {"path": str(train), "eval_path": str(held_out)}
    recipe.write_text(yaml.safe_dump(content))
    machine, run_dir = ("--machine", machine_file), tmp_path / "run"
    assert run("finetune", recipe, *machine, "report.samples=0") == 0
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    said = {f"step {row['step']}": row["eval_loss"] for row in map(json.loads, lines)}
    found, _ = score(capsys, recipe, held_out, "--checkpoints", run_dir, "--base", *machine)
    assert found["num_loads"] == NUM_LAYERS
    losses = {one["name"]: one["loss"] for one in found["scores"]}
    base = losses.pop("base")
    assert losses == pytest.approx(said, rel=1e-5)
    assert len({base, *losses.values()}) == 4


@pytest.mark.slow
def test_rows_that_do_not_fit_into_one_pass_take_several_with_the_same_scores(
    trained, machine_file, cache, tmp_path, capsys
) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"question": f"what is {n}", "answer": f"{n}{n}"} for n in range(400)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [trained / "recipe.yaml", file, "--machine", machine_file]
    words += ["--checkpoints", trained / "run", "--base"]
    one, _ = score(capsys, *words)
    assert one["sweeps"] == [1]
    budget_gib = (one["peak_bytes"][0] - 1) / 2**30
    several, shown = score(capsys, *words, f"offload.vram_budget={budget_gib!r}")
    assert several["sweeps"][0] > 1
    assert several["num_loads"] == several["sweeps"][0] * NUM_LAYERS
    assert f"{several['sweeps'][0]} passes over the 4 layers" in shown
    losses = {score["name"]: score["loss"] for score in one["scores"]}
    assert {s["name"]: s["loss"] for s in several["scores"]} == pytest.approx(losses, rel=1e-6)


# ------------------------------------------------------------------------------------------ lm eval


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


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
@pytest.mark.filterwarnings("ignore")
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


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
@pytest.mark.filterwarnings("ignore")
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


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
@pytest.mark.filterwarnings("ignore")
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


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed")
@pytest.mark.filterwarnings("ignore")
def test_a_batch_size_is_refused(model_dir) -> None:
    from finetune.integrations.lm_eval import SluiceLM

    with pytest.raises(ConfigError, match="batch_size 8"):
        SluiceLM(str(model_dir), batch_size=8)


# --------------------------------------------------------------------------------------------- chat


@pytest.mark.thorough
def test_turns_are_remembered_and_the_base_answers_the_same(
    finished, model_dir, monkeypatch, capsys
) -> None:
    said = ["what follows 3", "", "and then", "/reset", "what follows 3"]
    capsys.readouterr()
    assert talk(said, monkeypatch, finished, "--compare") == 0
    shown = capsys.readouterr().out
    adapter, base = Plain(model_dir, finished / "adapter"), Plain(model_dir, None)
    first = [{"role": "user", "content": said[0]}]
    answer = adapter.answer(first)
    second = [*first, {"role": "assistant", "content": answer}]
    second.append({"role": "user", "content": said[2]})
    wanted = [base.answer(first), answer, base.answer(second), adapter.answer(second)]
    assert wanted[0] != wanted[1]
    spoken = [f"{name}: {text}" for name, text in zip(("base", "adapter") * 2, wanted, strict=True)]
    assert shown == "".join(f"{text}\n" for text in (*spoken, *spoken[:2]))


@pytest.mark.thorough
def test_what_cannot_be_talked_with_is_refused(finished, tmp_path, monkeypatch, capsys) -> None:
    assert talk(["hello"], monkeypatch, tmp_path / "nowhere") == 1
    assert talk(["hello"], monkeypatch, finished, "--top-k", "3") == 1
    assert "top" in capsys.readouterr().err


@pytest.mark.thorough
def test_an_answer_ends_where_the_model_has_no_more_positions(
    finished, monkeypatch, capsys
) -> None:
    assert talk(["what follows 3"], monkeypatch, finished, num_new=100_000) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 1
    assert "positions" not in shown.err


@pytest.mark.slow
def test_an_answer_without_room_is_not_remembered(finished, monkeypatch, capsys) -> None:
    import finetune.commands.trained_model as trained_model
    from offload.errors import DoesNotFitError

    lengths = list[int]()

    def room(*_: object, prompt_tokens: int, **_others: object) -> None:
        lengths.append(prompt_tokens)
        if len(lengths) == 2:
            raise DoesNotFitError("too long", limit="there is no room", hint="shorter")

    monkeypatch.setattr(trained_model, "require_room", room)
    assert talk(["what follows 3", "more", "more"], monkeypatch, finished) == 0
    shown = capsys.readouterr()
    assert "too long: there is no room. /reset forgets what was said before." in shown.err
    assert lengths[1] == lengths[2] > lengths[0]
    assert len(shown.out.splitlines()) == 2


# -------------------------------------------------------------------------------------------- merge


IDS = torch.arange(3, 27).view(2, 12)
CONVERTER = """
import sys
from pathlib import Path
folder, outfile = Path(sys.argv[1]), Path(sys.argv[-1])
assert {"config.json", "model.safetensors", "tokenizer.json"} <= {f.name for f in folder.iterdir()}
outfile.write_bytes(b"GGUF" + (folder / "chat_template.jinja").read_bytes())
"""


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(IDS).logits
    return found


def test_a_run_is_merged_and_exported(finished: Path, model_dir: Path, capsys) -> None:
    out = finished.parent / "merged"
    assert run("merge", finished, "--out", out) == 0
    shown = capsys.readouterr().out
    assert f"Model: {out}" in shown
    assert "rounded" not in shown
    served = " ".join(shown.split())
    flag = """--default-chat-template-kwargs '{"enable_thinking": false}'`"""
    assert f"vLLM: `vllm serve {out} {flag}" in served
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    before = logits(base)
    wanted = logits(PeftModel.from_pretrained(base, str(finished / "adapter")))
    found = logits(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32))
    assert (before - wanted).norm() > 0.01 * wanted.norm()
    assert (found - wanted).norm() < 1e-5 * wanted.norm()
    end_id = AutoTokenizer.from_pretrained(model_dir).convert_tokens_to_ids("<|im_end|>")
    assert GenerationConfig.from_pretrained(model_dir).eos_token_id is None
    for folder in (out, finished / "adapter"):
        assert GenerationConfig.from_pretrained(folder).eos_token_id == end_id
        fields = json.loads((folder / "generation_config.json").read_text())
        assert fields["default_chat_template_kwargs"] == {"enable_thinking": False}
    template = AutoTokenizer.from_pretrained(out).chat_template
    assert template == AutoTokenizer.from_pretrained(model_dir).chat_template

    clone = finished.parent / "llama.cpp"
    clone.mkdir()
    (clone / "convert_hf_to_gguf.py").write_text(CONVERTER)
    for source in (finished, out):
        file = finished.parent / f"{source.name}.gguf"
        words = ("--gguf", "bf16", "--out", file, "--llama-cpp", clone)
        assert run("export", source, *words) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"GGUF: {file}" in shown
        flag = """--chat-template-kwargs '{"enable_thinking": false}'`"""
        assert f"llama.cpp: `llama-server -m {file} --jinja {flag}" in shown
        assert f"LM Studio: `lms import {file}`, or the file in ~/.lmstudio/models/sluice/" in shown
        assert "Ollama" not in shown
        assert "vLLM" not in shown
        assert file.read_bytes() == b"GGUF" + template.encode()
    names = {path.name for path in finished.parent.iterdir()}
    assert {name for name in names if "partial" in name} == set()

    assert run("merge", finished, "--out", out) == 1
    assert f"error: {out} is there already; " in capsys.readouterr().err


@pytest.mark.thorough
def test_how_a_run_was_trained_decides_how_it_is_merged(
    finished: Path, tmp_path: Path, capsys
) -> None:
    recipe, merged = finished / "recipe.yaml", tmp_path / "merged"
    text = "".join(recipe.read_text().splitlines(keepends=True)[1:-1])  # to be changed on purpose
    assert "codec: auto" in text
    recipe.write_text(text.replace("codec: auto", "codec: nf4"))
    assert run("merge", finished, "--out", merged) == 0
    shown = capsys.readouterr().out.replace("\n", " ")
    assert "was trained with weights that were rounded to nf4 (model.layers." in shown
    percent = float(shown.partition("_proj.weight by ")[2].partition(" %")[0])
    assert 7 < percent < 11
    shutil.rmtree(merged)

    assert "init: pretrained" in text
    recipe.write_text(text.replace("init: pretrained", "init: random"))
    assert run("merge", finished, "--out", merged) == 1
    assert "trained a model of random weights; " in capsys.readouterr().err

    assert run("export", finished, "--llama-cpp", finished) == 1
    assert "holds no convert_hf_to_gguf.py; " in capsys.readouterr().err
    shutil.rmtree(finished / "adapter")
    assert run("merge", finished, "--out", merged) == 1
    assert "run holds no finished run; " in capsys.readouterr().err
    assert run("export", finished) == 1
    assert "run holds no finished run; " in capsys.readouterr().err
    assert not merged.exists()
