import itertools
import json
import random
import shutil
import signal
import textwrap
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MambaConfig, MambaForCausalLM

from finetune.recipe.load import load_recipe
from finetune.report import energy
from finetune.report.pages import write_run_page
from finetune.run.run_dir import RunDir
from finetune.training import measured, report
from finetune.training.metrics_writer import MetricsWriter
from offload.plan.machine.machine import named_machine
from offload.probe.energy import Counter, Counters, Part
from tests.doubles import tiny_tokenizer
from tests.e2e.runs import adapter, losses, rows_of, run, same_adapter, start, wait_for


def test_a_run_leaves_everything_that_was_promised(finished: Path) -> None:
    shown = (finished.parent / "shown.txt").read_text()
    assert ": it fits\n step " in shown
    assert "Predicted peak memory" not in shown
    assert f"Details: `sluice explain {finished}`" in shown
    assert "Predicted (calibrated) against measured" in shown
    assert "Before training: 0.0% of 4 right, after the prompt with enable_thinking=False" in shown
    assert shown.count("40 of 40 rows are trained after the prompt with enable_thinking=False") == 1
    samples = json.loads((finished / "samples_after.json").read_text())
    assert samples["prompts"] == {"enable_thinking=False": 4}
    fields = json.loads((finished / "adapter" / "generation_config.json").read_text())
    assert fields["default_chat_template_kwargs"] == {"enable_thinking": False}
    assert f"Adapter: {finished / 'adapter'}" in shown
    report = json.loads((finished / "report.json").read_text())
    assert set(report["exact_match"]) == {"before", "after"}
    end_id = tiny_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert f"Answers end with <|im_end|> ({end_id})" in shown
    assert (report["answer_end_token_ids"], report["stop_token_ids"]) == ([end_id], [end_id])
    (section,) = report["sections"]
    assert [row["name"] for row in section["comparison"]] == [
        *("step", "forward", "head and loss", "backward", "stall", "optimizer", "h2d", "data wait")
    ]
    assert all(row["measured"] > 0 for row in section["comparison"][:4])
    assert report["memory"][0]["name"] == "peak memory"
    for name in ("recipe.yaml", "predicted.json", "measured.json", "gantt.svg", "trace.json"):
        assert (finished / name).stat().st_size > 0
    trace = json.loads((finished / "trace.json").read_text())
    assert {e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"} >= {
        "predicted",
        "measured",
    }
    assert (finished / "profile" / "trace.json").exists()
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert ["eval_loss" in row for row in rows] == [False, False, True, False, False, True]
    # 4 layers over 2 slots; the step behind an evaluation finds the ring disturbed
    assert [row["num_loads"] for row in rows] == [6, 4, 4, 6, 4, 4]


def test_the_model_card_is_true_and_names_no_path_of_this_machine(
    finished: Path, model_dir: Path, rows_file: Path
) -> None:
    text = (finished / "adapter" / "README.md").read_text()
    data = ModelCard(text).data.to_dict()
    assert data["library_name"] == "peft"
    assert "base_model" not in data  # it is no repository of the hub
    assert "[More Information Needed]" not in text
    for path in (finished, model_dir, rows_file, Path.home(), Path.cwd()):
        assert f"{path}/" not in text
        assert str(path.parent) not in text
    assert f"A LoRA adapter of {model_dir.name} (qwen3_moe)" in text
    assert f"path: {rows_file.name}\n" in text
    state = finished / "checkpoints" / "step-0000006" / "state.json"
    assert json.loads(state.read_text())["data_hash"] in text
    report = json.loads((finished / "report.json").read_text())
    assert report["recipe_sha256"] in text
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert f"| training loss, step 6 | {last['loss']:.4f} |" in text
    assert f"| held-out loss, step 6 | {last['eval_loss']:.4f} |" in text
    assert (
        """vllm serve MODEL --default-chat-template-kwargs '{"enable_thinking": false}'""" in text
    )
    after = report["exact_match"]["after"]
    assert f"| held-out answers right to the letter, after training | {after:.1%} |" in text


def test_training_lowers_the_loss(finished: Path) -> None:
    found = losses(finished)
    assert sum(found[-2:]) < sum(found[:2])


def test_the_newest_two_checkpoints_are_kept(finished: Path) -> None:
    names = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert names == ["step-0000004", "step-0000006"]


@pytest.mark.thorough
def test_the_adapter_gives_the_same_logits_in_plain_transformers_and_peft(
    finished: Path, model_dir: Path
) -> None:
    tensors = adapter(finished)
    trained_b = {name for name, t in tensors.items() if "lora_B" in name and t.abs().max() > 0}
    assert any("q_proj" in name for name in trained_b)
    assert any("experts" in name for name in trained_b)
    newest = load_file(finished / "checkpoints" / "step-0000006" / "trained.safetensors")
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(base, finished / "adapter").eval()
    input_ids = torch.arange(5, 25).view(2, 10)
    with torch.no_grad():
        plain = loaded(input_ids=input_ids).logits
        for name, parameter in loaded.named_parameters():
            if name in newest:  # the tensors that were trained, put in by name
                assert torch.equal(parameter, newest.pop(name))
    assert not newest
    import offload

    engine = offload.attach(loaded, num_slots=2, device="cpu")
    ours = engine.forward({"input_ids": input_ids}).logits
    engine.detach()
    assert ours is not None
    assert torch.allclose(ours, plain, atol=1e-6)


@pytest.mark.thorough
def test_generate_answers_with_the_adapter(finished: Path, capsys) -> None:
    asked = ("generate", finished, "--prompt", "what follows 3", "--max-new-tokens", "3")
    assert run(*asked) == 0
    answer = capsys.readouterr().out
    assert answer.endswith("\n")
    for name in ("generation_config.json", "manifest.json"):  # older runs have neither
        (finished / "adapter" / name).unlink()
    assert run(*asked) == 0
    assert capsys.readouterr().out == answer


@pytest.mark.slow
def test_streamed_and_resident_runs_are_equal_to_the_bit(
    tmp_path, write_recipe, machine_file
) -> None:
    recipe = write_recipe()
    streamed = ["offload.num_slots=2", "offload.kept_graphs=1"]
    ways = {way: [*streamed, f"offload.{way}"] for way in ("tier=ram", "tier=disk", "stash=host")}
    ways["resident"] = ["offload.num_slots=all", "offload.kept_graphs=all"]
    ways["no checkpointing"] = ["train.gradient_checkpointing=false", "offload.num_slots=2"]
    ways["checkpointing"] = ["train.gradient_checkpointing=true", "offload.num_slots=2"]
    for way, settings in ways.items():
        arguments = [*settings, f"output.dir={tmp_path / way}"]
        assert run("finetune", recipe, "--machine", machine_file, *arguments) == 0
    resident = adapter(tmp_path / "resident")
    for way in ways:
        assert losses(tmp_path / way) == losses(tmp_path / "resident")
        found = adapter(tmp_path / way)
        assert all(torch.equal(found[name], resident[name]) for name in resident)


@pytest.mark.thorough
def test_eight_bit_adam_keeps_two_bytes_of_state_per_large_tensor(
    tmp_path, write_recipe, machine_file
) -> None:
    recipe = write_recipe(
        train={"optimizer": "adamw_8bit", "steps": 2}, adapter={"rank": 64, "alpha": 64}
    )
    assert run("finetune", recipe, "--machine", machine_file) == 0
    saved = torch.load(
        tmp_path / "run" / "checkpoints" / "step-0000002" / "optimizer.pt", weights_only=True
    )
    tensors = load_file(tmp_path / "run" / "checkpoints" / "step-0000002" / "trained.safetensors")
    weights = sum(t.numel() for t in tensors.values())
    in_8_bit = sum(
        value.numel()
        for state in saved["state"].values()
        for name, value in state["__bnb_optimizer_quant_state__"].items()
        if name in {"state1", "state2"} and value.dtype is torch.uint8
    )
    large = sum(t.numel() for t in tensors.values() if t.numel() >= 4096)
    assert large > weights / 2
    assert in_8_bit == 2 * large


def test_a_second_run_is_not_written_over_the_first(finished: Path, capsys) -> None:
    recipe = finished.parent / "recipe.yaml"
    assert run("finetune", recipe) == 1
    assert f"{finished} holds a run already" in capsys.readouterr().err


def test_a_changed_recipe_is_not_resumed_and_the_difference_is_named(
    finished: Path, capsys
) -> None:
    assert run("finetune", finished / "recipe.yaml", "train.lr=0.5", "--resume") == 1
    assert "train.lr: 0.02 -> 0.5" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ interruption


NOISY_BEST = {
    "train": {
        "steps": 12,
        "neftune_alpha": 5.0,
        "schedule": "cosine_with_restarts",
        "num_cycles": 2,
        "warmup_ratio": 0.1,
        "early_stopping_patience": 4,
    },
    "output": {"eval_every": 2, "best_checkpoint": "use"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "settings"),
    [
        ("in a step", {"train": {"steps": 12}, "data": {"num_workers": 1}}),
        ("while saving", {"train": {"steps": 12}}),
        ("in a step", NOISY_BEST),
    ],
)
def test_a_killed_run_resumes_to_the_bit(
    moment, settings, tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = write_recipe(**settings)
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    assert run("finetune", recipe, "--machine", machine_file, f"output.dir={whole}") == 0
    metrics, checkpoints = run_dir / "metrics.jsonl", run_dir / "checkpoints"
    chance = random.Random(moment)
    words: tuple[object, ...] = ("finetune", recipe, "--machine", machine_file)
    for _ in range(2):
        process = forked.start(*words)
        steps = metrics.read_text().count("\n") if metrics.exists() else 0
        if moment == "while saving":
            process.wait_for(lambda: any(checkpoints.glob("partial-*")))
        else:
            goal = steps + chance.randrange(1, 4)
            process.wait_for(
                lambda goal=goal: metrics.exists() and metrics.read_text().count("\n") >= goal
            )
            time.sleep(chance.random() * 0.05)
        assert process.end(signal.SIGKILL) == -signal.SIGKILL
        words = (*words, "--resume")[:5]
    process = forked.start(*words)
    assert process.end() == 0, process.shown
    assert losses(run_dir) == losses(whole)
    resumed, uninterrupted = adapter(run_dir), adapter(whole)
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted)


@pytest.mark.slow
def test_a_copied_run_goes_on_in_the_copy_and_a_moved_one_where_it_is(
    tmp_path, write_recipe, machine_file
) -> None:
    recipe = write_recipe(train={"steps": 2}, output={"dir": str(tmp_path / "a")})
    words = ("--machine", machine_file, "--resume", "train.steps=3")
    assert run("finetune", recipe, "--machine", machine_file) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert run("finetune", tmp_path / "b" / "recipe.yaml", *words) == 0
    after = {path: path.read_bytes() for path in (tmp_path / "a").rglob("*") if path.is_file()}
    assert after == before
    assert len(losses(tmp_path / "b")) == 3
    moved = (tmp_path / "a").rename(tmp_path / "moved")
    assert run("finetune", recipe, *words, f"output.dir={moved}") == 0
    assert not (tmp_path / "a").exists()
    assert losses(moved) == losses(tmp_path / "b")


@pytest.mark.slow
def test_ctrl_c_ends_the_step_saves_and_can_be_resumed(
    tmp_path, write_recipe, machine_file
) -> None:
    recipe = write_recipe(
        train={"steps": 200, "schedule": "constant"}, output={"checkpoint_every": 1000}
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    process = start(recipe, machine_file)
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 2, process)
    process.send_signal(signal.SIGINT)
    shown = process.communicate(timeout=60)[0]
    assert process.returncode == 130, shown
    assert "continue with `--resume`" in shown
    done = len(losses(tmp_path / "run"))
    saved = [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()]
    assert saved == [f"step-{done:07d}"]


@pytest.mark.slow
def test_energy_adds_up_over_a_resume_and_each_checkpoint_has_a_page(
    tmp_path: Path, write_recipe, machine_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By counters that rise by 10 J and 1 J each time they are read; the last one falls silent."""

    def rising(part: Part, by_j: float, *, fails: bool = False) -> Counter:
        reads = itertools.count(1)

        def read_j() -> float:
            number = next(reads)
            if fails and number > 2:
                raise OSError("unplugged")
            return 1000 + number * by_j

        return Counter(part=part, name=part, read_j=read_j)

    starts = iter([(rising("GPU", 10),), (rising("GPU", 10), rising("CPU", 1, fails=True))])
    monkeypatch.setattr(
        measured, "find_counters", lambda bus_id, host: Counters(found=next(starts), missing={})
    )
    monkeypatch.setattr(energy, "LEAST_WINDOW_S", 0.0)
    folder, pages = tmp_path / "run", list[str]()

    def kept(run_dir: Path, *, goes_on: bool = False) -> Path:
        page = write_run_page(run_dir, goes_on=goes_on)
        pages.append(page.read_text())
        return page

    monkeypatch.setattr(report, "write_run_page", kept)
    monkeypatch.setattr(report, "PAGE_EVERY_S", 0.0)
    recipe = write_recipe(
        train={"steps": 2, "schedule": "constant"},
        output={"checkpoint_every": 1},
        report={"price_per_kwh": 3.6e5, "currency": "EUR"},
    )
    assert run("finetune", recipe, "--machine", machine_file) == 0
    assert ["when the run went on" in page for page in pages] == [True, False, False]
    first = json.loads((folder / "report.json").read_text())
    assert first["energy"]["parts"]["GPU"]["joules"] == pytest.approx(20)
    assert run("finetune", recipe, "--machine", machine_file, "--resume", "train.steps=4") == 0
    figures = json.loads((folder / "report.json").read_text())
    assert figures["energy"]["parts"]["GPU"]["joules"] == pytest.approx(40)
    assert figures["energy"]["parts"]["CPU"]["num_steps"] == 1
    assert "unplugged" in figures["energy"]["missing"]["CPU"]
    assert (figures["cost"], figures["currency"]) == (pytest.approx(4.1), "EUR")
    assert figures["versions"]["torch"] == metadata.version("torch")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    both, gpu = {"GPU": 10.0, "CPU": 1.0}, {"GPU": 10.0}
    assert [row["energy_j"] for row in rows] == [gpu, gpu, both, gpu]
    assert "unplugged" in pages[-1]


@pytest.mark.thorough
def test_logs_are_objects_with_each_step_or_nothing(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(train={"steps": 2}, output={"eval_every": 2})
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words, "--json-logs") == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["loss"] for e in events if e["event"] == "step"] == losses(tmp_path / "run")
    assert {e["event"] for e in events} == {"note", "table", "step", "evaluation"}
    assert events[-2]["text"] == f"Report:  {tmp_path / 'run' / 'report.html'}"
    assert run(*words, "--overwrite", "--quiet") == 0
    assert capsys.readouterr().out == ""
    assert run(*words, "--quiet", "--json-logs") == 1
    assert "error: both --quiet and --json-logs" in capsys.readouterr().err


@pytest.mark.slow
def test_metrics_go_to_tensorboard_when_asked(tmp_path, write_recipe, machine_file) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = write_recipe(train={"steps": 2}, report={"log_to": ["tensorboard"]})
    assert run("finetune", recipe, "--machine", machine_file) == 0
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    shown = [event.value for event in board.Scalars("loss")]
    assert shown == pytest.approx(losses(tmp_path / "run"))
    (text,) = board.Tensors("recipe/text_summary")
    told = textwrap.dedent(text.tensor_proto.string_val[0].decode())
    written = (tmp_path / "run" / "recipe.yaml").read_text().splitlines(keepends=True)
    assert told == "".join(written[1:-1])  # without the hash and what is said of it


def test_wandb_is_given_the_resolved_recipe(tmp_path, write_recipe, monkeypatch) -> None:
    """By a module that notes what it is given, as W&B takes an account."""
    (tmp_path / "wandb.py").write_text(
        "given = []\n"
        "class Run:\n"
        "    log = finish = lambda self, *args, **settings: None\n"
        "def init(**settings):\n"
        "    given.append(settings)\n"
        "    return Run()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    recipe = load_recipe(str(write_recipe(report={"log_to": ["wandb"]})), [])
    run_dir = RunDir(recipe.output.run_dir)
    run_dir.start(recipe, experts_implementation=None)
    for is_main in (True, False):
        MetricsWriter(run_dir, recipe, is_main=is_main, first_step=0)
    import wandb

    (settings,) = wandb.given
    assert settings["config"] == recipe.model_dump(mode="json")
    assert settings["config"]["train"]["weight_decay"] == 0.0  # a default
    assert settings["allow_val_change"] is True


# ---------------------------------------------------------------------------- what must not happen


def test_files_of_others_are_not_deleted(tmp_path, write_recipe, machine_file, capsys) -> None:
    precious = tmp_path / "run"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    for words in ((), ("--overwrite",)):
        assert run("finetune", write_recipe(), "--machine", machine_file, *words) == 1
        assert f"{precious} is there and holds no run" in capsys.readouterr().err
    assert (precious / "thesis.txt").read_text() == "years of work"


@pytest.mark.slow
def test_an_overwritten_run_keeps_what_is_not_its_own(finished: Path, machine_file) -> None:
    (finished / "notes.txt").write_text("keep")
    recipe = finished.parent / "recipe.yaml"
    assert run("finetune", recipe, "--machine", machine_file, "--overwrite", "train.steps=2") == 0
    assert (finished / "notes.txt").read_text() == "keep"
    assert len(losses(finished)) == 2


def test_a_loss_that_is_not_finite_stops_the_run_before_the_update(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(
        train={"lr": 1.0, "steps": 200, "max_grad_norm": None, "schedule": "constant"},
        adapter={"alpha": 1e20},
        output={"checkpoint_every": 1},
    )
    assert run("finetune", recipe, "--machine", machine_file) == 1
    err = capsys.readouterr().err
    assert "nan" in err or "inf" in err
    assert "train.lr: 2.5e-01" in err
    newest = max((tmp_path / "run" / "checkpoints").iterdir(), default=None)
    if newest is not None:
        saved = load_file(newest / "trained.safetensors")
        assert all(torch.isfinite(tensor).all() for tensor in saved.values())


@pytest.mark.parametrize(
    "name",
    [
        "optimizer.pt",
        pytest.param("trained.safetensors", marks=pytest.mark.slow),
        pytest.param("state.json", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_can_be_taken(
    name: str, finished: Path, machine_file, capsys
) -> None:
    newest = finished / "checkpoints" / "step-0000006"
    file = newest / name
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    words = ("finetune", finished / "recipe.yaml", "--machine", machine_file, "--resume")
    assert run(*words) == 1
    assert f"{newest} is damaged" in capsys.readouterr().err
    shutil.rmtree(newest)
    assert run(*words) == 0
    assert len(losses(finished)) == 6


@pytest.mark.slow
def test_a_run_that_lost_its_timeline_can_still_be_finished(finished: Path, machine_file) -> None:
    (finished / "measured.json").unlink()
    words = ("finetune", finished / "recipe.yaml", "--machine", machine_file, "--resume")
    assert run(*words) == 0


def test_rates_of_another_machine_are_refused(write_recipe, capsys, tmp_path) -> None:
    file = tmp_path / "card.json"
    file.write_text(named_machine("rtx5090").to_json())
    assert run("finetune", write_recipe(), "--machine", file) == 1
    assert "--machine holds rates of cuda in bfloat16" in capsys.readouterr().err
    file.write_bytes(b"\xff\xfe\x00")
    assert run("finetune", write_recipe(), "--machine", file) == 1
    assert f"{file} is no text of a machine file" in capsys.readouterr().err


@pytest.mark.parametrize("packing", ["off", "on"])
def test_an_epoch_trains_each_row_once_and_resumes_to_the_bit(
    packing, tmp_path, write_recipe, machine_file, capsys
) -> None:
    train = {"steps": None, "epochs": 2, "micro_batch_size": 4, "grad_accum_steps": 8}
    data = {"packing": packing, "eval_frac": None}
    recipe = write_recipe(train=train, data=data, output={"checkpoint_every": 1})
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words) == 0
    assert "3 steps: 2 epochs of 40 rows, of which the last step has 16" in capsys.readouterr().out
    ids = tiny_tokenizer()([f"{number + 1}" for number in range(40)], add_special_tokens=False)
    learned = sum(len(one) + 1 for one in ids["input_ids"])  # each answer and its end
    assert sum(row["num_label_tokens"] for row in rows_of(tmp_path / "run")) == 2 * learned
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    shutil.rmtree(max((tmp_path / "run" / "checkpoints").iterdir()))
    assert run(*words, "--resume") == 0
    assert same_adapter(tmp_path / "run", tmp_path / "whole")


def test_settings_behind_the_last_step_are_refused(write_recipe, machine_file, capsys) -> None:
    recipe = write_recipe(train={"steps": None, "epochs": 0.1, "warmup_steps": 5})
    assert run("finetune", recipe, "--machine", machine_file) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "train.warmup_steps is 5 and train.epochs: 0.1 are 1 steps" in shown


def test_a_model_without_weights_is_said_to_have_none(
    tmp_path, write_recipe, model_dir, machine_file, capsys
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(model_dir / "config.json", bare)
    recipe = write_recipe(model={"path": str(bare)})
    assert run("finetune", recipe, "--machine", machine_file) == 1
    assert f"{bare} holds no *.safetensors" in capsys.readouterr().err


def test_an_adapter_on_a_weight_that_the_model_reads_itself_is_named_once(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    """Mamba reads `dt_proj.weight`: an adapter there never learned, and nothing said so (#41)."""
    tokenizer, folder = tiny_tokenizer(), tmp_path / "mamba"
    config = MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=len(tokenizer))
    MambaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    parts = {"model": {"path": str(folder)}, "train": {"steps": 3}}
    recipe = write_recipe(**parts, adapter={"experts": False, "targets": "all-linear"})
    assert run("finetune", recipe, "--machine", machine_file) == 0
    shown = " ".join("".join(capsys.readouterr()).split())
    assert shown.count("got no gradient in the first step") == 1
    assert "dt_proj.lora_A.default.weight and 3 more got no gradient" in shown


def test_tokens_that_the_model_lacks_are_named_before_it_is_loaded(
    tmp_path, write_recipe, machine_file, rows_file, capsys
) -> None:
    """The model was loaded first, and the token was named by its number alone (#41)."""
    own = tmp_path / "tokenizer"
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<call>"])
    tokenizer.save_pretrained(own)
    recipe = write_recipe(model={"tokenizer": str(own)})
    rows = tmp_path / "calls.jsonl"
    rows.write_text(rows_file.read_text().replace("follows 3", "<call> follows 3"))
    words = f"the token <call> has the number {len(tokenizer) - 1:,}, and the model has"
    for command in (("finetune", recipe), ("score", recipe, rows, "train.seq_len=64")):
        more = (f"data.path={rows}",) if command[0] == "finetune" else ()
        assert run(*command, *more, "--machine", machine_file) == 1
        shown = " ".join(capsys.readouterr().err.split())
        assert words in shown
        assert "Loading" not in shown
        assert "resize_token_embeddings(len(tokenizer))" in shown
    tokenizer.pad_token = "<pad>"
    tokenizer.save_pretrained(own)
    assert (
        run("finetune", recipe, "--machine", machine_file, f"output.dir={tmp_path / 'third'}") == 1
    )
    assert "(what pads rows)" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize(
    "delay_s",
    [
        pytest.param(0.0, marks=pytest.mark.exhaustive),
        0.3,
        pytest.param(0.8, marks=pytest.mark.exhaustive),
    ],
)
def test_ctrl_c_while_workers_start_does_not_hang(
    delay_s: float, tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = write_recipe(train={"steps": 100_000}, data={"num_workers": 1})
    process = forked.start("finetune", recipe, "--machine", machine_file, has_session=True)
    process.wait_for(lambda: (tmp_path / "run" / "predicted.json").exists())
    time.sleep(delay_s)
    process.signal(signal.SIGINT, to_group=True)  # what a terminal does: all processes get it
    assert process.end() == 130, process.shown
