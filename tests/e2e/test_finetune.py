"""Runs from a recipe: trained, stopped, resumed, and what they leave and explain."""

import itertools
import json
import math
import os
import platform
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensor
from transformers import (
    AutoModelForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    get_cosine_with_hard_restarts_schedule_with_warmup,
)

from finetune.errors import ConfigError
from finetune.planning.ranks import require_micro_batch_per_rank
from finetune.recipe.load import load_recipe
from finetune.report import energy
from finetune.report.pages import write_run_page
from finetune.report.share import SETTINGS, SharedRow
from finetune.run.run_dir import RunDir, as_begun
from finetune.training import measured, report
from finetune.training.metrics_writer import MetricsWriter
from offload.plan.machine.machine import Machine, named_machine
from offload.probe import load
from offload.probe.energy import Counter, Counters, Part
from tests.doubles import tiny_tokenizer
from tests.e2e.forked import Forked
from tests.e2e.runs import (
    ROOT,
    adapter,
    assert_same_training,
    losses,
    rows_of,
    run,
    same_adapter,
    start,
    wait_for,
)
from tests.hub import hub


def test_a_run_leaves_everything_that_was_promised(finished: Path) -> None:
    shown = (finished.parent / "shown.txt").read_text()
    assert ": it fits\n model " in shown
    assert "Predicted peak of" not in shown
    assert f"Details: `sluice explain {finished}`" in shown
    assert "Predicted from timed steps against measured" in shown
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


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
def test_the_command_of_a_run_hears_how_it_ended(finished: Path) -> None:
    heard = json.loads((finished.parent / "heard.json").read_text())
    assert heard["event"] == "end"
    assert heard["dir"] == str(finished)
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    assert (heard["step"], heard["loss"]) == (last["step"], last["loss"])
    assert "heard.json" not in (finished / "adapter" / "README.md").read_text()


def test_a_shared_row_has_figures_and_no_names(
    finished: Path, model_dir: Path, rows_file: Path, capsys
) -> None:
    assert run("share", finished) == 0
    shown = capsys.readouterr()
    assert shown.err == f"Saved: {finished / 'shared.json'}. Nothing was sent.\n"
    assert (finished / "shared.json").read_text() == shown.out
    row = SharedRow.model_validate_json(shown.out)
    report = json.loads((finished / "report.json").read_text())
    step = report["sections"][-1]["comparison"][0]
    assert (row.step.predicted_s, row.step.measured_s) == (step["predicted"], step["measured"])
    assert [peak.name for peak in row.peaks] == ["peak memory"]
    assert row.hardware.device == "cpu"
    assert row.model.id is None  # it is in a folder
    assert list(row.settings) == list(SETTINGS)
    assert None not in row.settings.values()
    recipe = load_recipe(str(finished / "recipe.yaml"), [])
    for name in (finished, model_dir, Path.home(), Path.cwd(), rows_file.name, platform.node()):
        assert str(name) not in shown.out
    assert f'"{recipe.output.name}"' not in shown.out
    (finished / "measured.json").unlink()
    assert run("share", finished) == 1
    assert f"{finished} holds no measured.json yet; " in capsys.readouterr().err


def test_the_call_in_the_model_card_loads_the_adapter(finished: Path, model_dir: Path) -> None:
    text = (finished / "adapter" / "README.md").read_text()
    call = text.split("```python\n")[1].split("```")[0]
    places = {
        f'"{model_dir.name}"': repr(str(model_dir)),
        '"ADAPTER"': repr(str(finished / "adapter")),
    }
    for shown, place in places.items():
        assert shown in call
        call = call.replace(shown, place)
    names: dict[str, Any] = {}
    exec(call, names)
    found = get_peft_model_state_dict(names["model"])
    saved = load_file(finished / "adapter" / "adapter_model.safetensors")
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())


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
    shutil.rmtree(finished / "adapter")
    assert run(*asked) == 0
    shown = capsys.readouterr()
    assert shown.out == answer
    step = len(losses(finished))
    assert f"is not finished: its checkpoint after step {step} answers" in shown.err
    shutil.rmtree(finished / "checkpoints")
    assert run(*asked) == 1
    assert "holds no finished run; " in capsys.readouterr().err


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
    assert "recipe.yaml --resume`." in shown
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
    assert events[-3]["text"] == f"Report:  {tmp_path / 'run' / 'report.html'}"
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


@pytest.mark.parametrize("others_frac", [None, 0.63])
def test_that_other_programs_run_or_a_gpu_lacks_is_said_before_the_first_step(
    others_frac: float | None, write_recipe, machine_file, tmp_path, capsys, monkeypatch
) -> None:
    file = tmp_path / "here.json"
    here = Machine.from_json(machine_file.read_text())
    file.write_text(replace(here, others_frac=others_frac).to_json())
    monkeypatch.setattr(load, "MAX_OTHERS_FRAC", -math.inf)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    recipe = write_recipe(train={"steps": 1}, offload={"device": "auto"})
    assert run("finetune", recipe, "--machine", file) == 0
    before = " ".join(capsys.readouterr().out.split("step 1/1")[0].split())
    assert "PyTorch sees no NVIDIA GPU on this machine, so its CPU trains" in before
    notes = re.findall(r"(\S+ \w+) (?:measured|timed) while other programs took (\S+)%", before)
    if others_frac is None:
        assert [what for what, _ in notes] == ["Steps were"]
    else:
        assert [number for _, number in notes] == ["63"]  # once is enough


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


# -------------------------------------------------------------------------------- schedule and best


def rows(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def figures(run_dir: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "lr", "grad_norm", "eval_loss")
    return [tuple(row.get(name) for name in names) for row in rows(run_dir)]


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def forget_after(run_dir: Path, step: int) -> None:
    """Leave what a kill leaves after a step: no later checkpoint, no adapter, later metrics."""
    shutil.rmtree(run_dir / "adapter")
    for folder in (run_dir / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)


@pytest.mark.slow
def test_noise_and_restarts_are_resumed_to_the_bit(tmp_path, write_recipe, machine_file) -> None:
    recipe = write_recipe(
        train={
            "neftune_alpha": 5.0,
            "schedule": "cosine_with_restarts",
            "num_cycles": 2,
            "warmup_ratio": 0.3,
        }
    )
    words = ("finetune", recipe, "--machine", machine_file)
    run_dir = tmp_path / "run"
    assert run(*words) == 0
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.02)
    schedule = get_cosine_with_hard_restarts_schedule_with_warmup(optimizer, 2, 6, num_cycles=2)
    for row in rows(run_dir):
        assert row["lr"] == schedule.get_last_lr()[0]
        optimizer.step()
        schedule.step()
    whole, trained = figures(run_dir), adapter(run_dir)
    forget_after(run_dir, 4)
    assert run(*words, "--resume") == 0
    assert figures(run_dir) == whole
    assert_same(adapter(run_dir), trained)


@pytest.mark.slow
def test_a_run_of_a_constant_rate_that_is_made_longer_is_the_longer_run_to_the_bit(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(train={"schedule": "constant"})
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words) == 0
    assert run(*words, "train.steps=3", f"output.dir={tmp_path / 'short'}") == 0
    capsys.readouterr()
    longer = (*words, f"output.dir={tmp_path / 'short'}", "train.steps=6", "--resume")
    assert run(*longer) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "train.steps: 3 -> 6; the learning rate of the first 3 steps is the same" in shown
    assert figures(tmp_path / "short") == figures(tmp_path / "run")
    assert_same(adapter(tmp_path / "short"), adapter(tmp_path / "run"))
    seals = [row["prediction_sha256"] for row in rows(tmp_path / "short")]
    assert len(set(seals[:3])) == len(set(seals[3:])) == 1
    assert seals[2] != seals[3]
    assert json.loads((tmp_path / "short" / "predicted-2.json").read_text())["num_steps"] == 6
    assert run(*longer) == 0  # the run has six steps from now on
    assert run(*(word for word in longer if word != "train.steps=6"), "train.steps=3") == 1
    assert "train.steps: 6 -> 3" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_is_made_longer_says_from_which_step_its_rate_differs(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(train={"schedule": "linear", "steps": 4})
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words) == 0
    before = figures(tmp_path / "run")
    capsys.readouterr()
    assert run(*words, "--resume", "train.steps=8", "train.lr=0.5") == 1
    assert "train.lr: 0.02 -> 0.5" in capsys.readouterr().err
    assert run(*words, "--resume", "train.steps=8") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "with 8 steps the learning rate differs from step 2 on: steps 2 to 4 were" in shown
    after = figures(tmp_path / "run")
    assert after[:4] == before
    assert [row[2] for row in after[4:]] == [0.02 * ((8 - step) / 8) for step in range(4, 8)]


BEST: dict[str, Any] = {
    "train": {"steps": 8, "schedule": "constant", "lr": 0.3},  # too large: the loss rises again
    "output": {
        "eval_every": 1,
        "checkpoint_every": 4,
        "keep_checkpoints": 1,
        "best_checkpoint": "use",
    },
}


@pytest.mark.slow
def test_the_adapter_is_that_of_the_best_checkpoint_also_after_a_kill(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    words = ("finetune", write_recipe(**BEST), "--machine", machine_file)
    run_dir = tmp_path / "run"
    assert run(*words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    evals = {row["step"]: row["eval_loss"] for row in rows(run_dir)}
    best = min(evals, key=lambda step: evals[step])
    assert best < 8
    kept = sorted(folder.name for folder in (run_dir / "checkpoints").iterdir())
    assert kept == [f"step-{best:07d}", "step-0000008"]
    assert f"What was trained is that of step {best}: its loss on held-out rows, " in shown
    weights = load_file(run_dir / "checkpoints" / kept[0] / "trained.safetensors")
    saved = {name.replace(".default", ""): t for name, t in weights.items()}
    assert_same(adapter(run_dir), saved)
    report = json.loads((run_dir / "report.json").read_text())
    assert report["adapter_step"] == best
    whole, trained = figures(run_dir), adapter(run_dir)
    forget_after(run_dir, best)
    assert run(*words, "--resume") == 0
    assert figures(run_dir) == whole
    assert_same(adapter(run_dir), trained)


@pytest.mark.slow
def test_a_run_stops_early_and_is_not_made_longer(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(
        train={
            "steps": 40,
            "schedule": "constant",
            "lr": 0.3,
            "early_stopping_patience": 2,
            "early_stopping_min_delta": 0.01,
        },
        output={"eval_every": 1, "checkpoint_every": None, "best_checkpoint": "keep"},
    )
    words = ("finetune", recipe, "--machine", machine_file)
    run_dir = tmp_path / "run"
    assert run(*words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Stopped early: 2 losses on held-out rows in a row were no lower than" in shown
    losses = [row["eval_loss"] for row in rows(run_dir)]
    assert 2 < len(losses) < 40
    assert min(losses[:-2]) - 0.01 <= min(losses[-2:])
    trained = adapter(run_dir)
    shutil.rmtree(run_dir / "adapter")
    assert run(*words, "--resume") == 0  # nothing is left to run
    assert len(rows(run_dir)) == len(losses)
    assert_same(adapter(run_dir), trained)
    capsys.readouterr()
    assert run(*words, "--resume", "train.steps=50") == 1
    err = " ".join(capsys.readouterr().err.split())
    assert f"train.steps is raised to 50, and {run_dir} has stopped early" in err


# ------------------------------------------------------------------------------------------ signals


CODES = {signal.SIGTERM: 143, signal.SIGHUP: 129}


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """Where a program puts its temporary files; there are none at the end."""
    folder = tmp_path / "tmp"
    folder.mkdir()
    yield folder
    assert not list(folder.iterdir())


@pytest.fixture
def start_signals(
    endless: Path, machine_file: Path, temporary: Path, forked: Forked
) -> Callable[..., Any]:
    """Return what starts an endless run in a session of its own."""
    return partial(
        forked.start,
        *("finetune", endless, "--machine", machine_file),
        variables={"TMPDIR": str(temporary)},
        has_session=True,
    )


def wait_for_rows(run_dir: Path, number: int) -> None:
    metrics, end_s = run_dir / "metrics.jsonl", time.monotonic() + 240
    while not (metrics.exists() and metrics.read_text().count("\n") >= number):
        assert time.monotonic() < end_s
        time.sleep(0.005)


@pytest.fixture
def endless(write_recipe) -> Path:
    recipe: Path = write_recipe(
        train={"steps": 100_000, "schedule": "constant"},
        data={"num_workers": 1},
        output={"checkpoint_every": 100_000},
    )
    return recipe


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", CODES)
def test_a_signal_to_all_processes_of_a_run_ends_it_with_a_checkpoint(
    number: signal.Signals, start_signals, tmp_path
) -> None:
    process = start_signals()
    wait_for_rows(tmp_path / "run", 2)
    process.signal(number, to_group=True)  # its data worker gets it too
    assert process.end() == CODES[number], process.shown
    assert "recipe.yaml --resume`." in process.shown
    assert "Traceback" not in process.shown
    assert_saved_at_its_last_step(tmp_path / "run")
    assert not (tmp_path / "run" / "run.lock").exists()


def assert_saved_at_its_last_step(run_dir: Path) -> None:
    done = len(losses(run_dir))
    saved = [path.name for path in (run_dir / "checkpoints").iterdir()]
    assert saved == [f"step-{done:07d}"]


@pytest.mark.slow
def test_a_signal_before_the_first_step_leaves_nothing(start_signals, tmp_path) -> None:
    process = start_signals()
    process.wait_for(lambda: (tmp_path / "run" / "run.lock").exists())
    assert process.end(signal.SIGTERM) == 143, process.shown
    assert process.shown.endswith("stopped\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_hangup_that_nohup_ignores_stays_ignored(
    endless, tmp_path, machine_file, temporary
) -> None:
    program = [sys.executable, "cli.py", "finetune", str(endless), "--machine", str(machine_file)]
    process = subprocess.Popen(
        ["env", f"TMPDIR={temporary}", "nohup", *program],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_rows(tmp_path / "run", 2)
    os.killpg(process.pid, signal.SIGHUP)
    wait_for_rows(tmp_path / "run", len(losses(tmp_path / "run")) + 3)
    os.killpg(process.pid, signal.SIGTERM)
    shown = process.communicate(timeout=120)[0]
    assert process.returncode == 143, shown


@pytest.mark.long
@pytest.mark.slow
def test_a_terminal_that_is_closed_costs_nothing(start_signals, tmp_path) -> None:
    terminal, other_end = pty.openpty()
    process = start_signals(output=os.ttyname(other_end), is_on_terminal=True)
    os.set_blocking(terminal, False)
    metrics = tmp_path / "run" / "metrics.jsonl"

    def has_rows() -> bool:
        with suppress(BlockingIOError):
            os.read(terminal, 65536)  # or the program waits for room
        return metrics.exists() and metrics.read_text().count("\n") >= 2

    process.wait_for(has_rows)
    os.close(other_end)
    os.close(terminal)
    assert process.end() == 129
    assert_saved_at_its_last_step(tmp_path / "run")


@pytest.mark.slow
def test_a_signal_to_one_of_two_ranks_stops_both_at_one_step(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = write_recipe(
        train={"steps": 100_000, "schedule": "constant"}, output={"checkpoint_every": 100_000}
    )
    ranks = forked.start_ranks("finetune", recipe, "--machine", machine_file)
    wait_for_rows(tmp_path / "run", 2)
    ranks[1].signal(signal.SIGTERM)
    assert [rank.end() for rank in ranks] == [143, 143], [rank.shown for rank in ranks]
    assert_saved_at_its_last_step(tmp_path / "run")


@pytest.mark.slow
def test_a_signal_before_the_first_step_to_one_of_two_ranks_is_named_by_the_other(
    tmp_path, endless, machine_file, forked
) -> None:
    ranks = forked.start_machines("finetune", endless, "--machine", machine_file, sizes=(1, 1))
    ranks[1].wait_for(lambda: (tmp_path / "run" / "run.lock").exists())
    assert ranks[1].end(signal.SIGTERM) == 143, ranks[1].shown
    assert ranks[0].end() == 1
    assert "error (rank 0): rank 1 has failed: Interrupted: SIGTERM" in ranks[0].shown


def test_resume_and_overwrite_exclude_each_other(write_recipe, machine_file, capsys) -> None:
    words = ("finetune", write_recipe(), "--machine", machine_file, "--resume", "--overwrite")
    assert run(*words) == 1
    assert (
        "error: both --resume and --overwrite\n\nhint: `--resume` continues it"
        in capsys.readouterr().err
    )


# ----------------------------------------------------------------------------------------- download


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_downloads_its_model_and_says_so_once(
    tmp_path: Path, write_recipe, model_dir: Path, machine_file: Path, num_ranks: int
) -> None:
    shutil.copytree(model_dir, tmp_path / "hub" / "own" / "model")
    recipe = write_recipe(train={"steps": 1})
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = ("cli.py", "finetune", str(recipe), "--machine", str(machine_file))
    with hub(tmp_path / "hub") as served:
        done = subprocess.run(
            [
                *("env", "-u", "http_proxy", "-u", "HTTP_PROXY", "OMP_NUM_THREADS=1"),
                *(f"{name}={value}" for name, value in served.variables.items()),
                *(sys.executable, *(launcher if num_ranks > 1 else ()), *words),
                "model.path=own/model",
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Downloading own/model: ") == 1, done.stdout
    assert served.asked.count("model.safetensors") == 1


# ------------------------------------------------------------------------------------------- choice


OPEN = {"micro_batch_size": "auto", "grad_accum_steps": None, "tokens_per_step": 6 * 64}


def settings(run_dir: Path) -> dict[str, object]:
    train: dict[str, object] = yaml.safe_load((run_dir / "recipe.yaml").read_text())["train"]
    return train


@pytest.mark.slow
def test_an_open_size_is_settled_written_down_and_kept_by_a_resume(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(data={"packing": "off"}, train={**OPEN, "steps": 4})
    words = ("finetune", recipe, "--machine", machine_file)
    assert run(*words, "--verbose") == 0
    assert "\nRejected\n" in capsys.readouterr().out
    run_dir = tmp_path / "run"
    size = settings(run_dir)["micro_batch_size"]
    assert size in (1, 2, 3, 6)
    predicted = json.loads((run_dir / "predicted.json").read_text())["calibrated"]["schedule"]
    assert predicted["num_micro_batches"] == 6 // int(str(size))

    # each process has a micro-batch, or the resume is refused
    settled = as_begun(load_recipe(str(recipe), []), RunDir(run_dir).begun())
    assert settled.train.micro_batch_size == size
    too_many = settled.train.num_micro_batches + 1
    with pytest.raises(ConfigError, match=f"micro-batches for {too_many} processes"):
        require_micro_batch_per_rank(settled.train, num_ranks=too_many)

    # the settled recipe is the same run, to the bit
    again = tmp_path / "again"
    settled_words = ("--machine", machine_file, f"output.dir={again}")
    assert run("finetune", run_dir / "recipe.yaml", *settled_words) == 0
    assert losses(run_dir) == losses(again)
    first, second = adapter(run_dir), adapter(again)
    assert all(torch.equal(first[name], second[name]) for name in first)

    # another machine would choose another size: the run keeps its own
    other = 3 if size != 3 else 2
    drop_last_checkpoint(run_dir)
    file = run_dir / "recipe.yaml"
    text = "".join(file.read_text().splitlines(keepends=True)[1:-1])  # without the hash
    file.write_text(text.replace(f"micro_batch_size: {size}", f"micro_batch_size: {other}"))
    capsys.readouterr()
    assert run(*words, "--resume", "--verbose") == 0
    assert settings(run_dir)["micro_batch_size"] == other
    assert f"in {6 // other} micro-batches of {other} x" in capsys.readouterr().out


def drop_last_checkpoint(run_dir: Path) -> None:
    newest = sorted((run_dir / "checkpoints").glob("step-*"))[-1]
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()


@pytest.mark.slow
def test_the_first_loss_does_not_depend_on_the_size(tmp_path, write_recipe, machine_file) -> None:
    recipe = write_recipe(data={"packing": "off"}, train={**OPEN, "steps": 1})
    first = []
    for size in (1, 6):
        words = (f"train.micro_batch_size={size}", f"output.dir={tmp_path / str(size)}")
        assert run("finetune", recipe, "--machine", machine_file, *words) == 0
        first.append(losses(tmp_path / str(size))[0])
    assert first[0] == pytest.approx(first[1], rel=1e-5)


# ----------------------------------------------------------------------------------------- compiled


@pytest.mark.exhaustive
def test_a_compiled_run_resumes_to_the_bit_in_another_process(
    tmp_path: Path, write_recipe, machine_file
) -> None:
    recipe = write_recipe(
        adapter={"targets": "all-linear", "dropout": 0.1, "experts": False},
        train={"steps": 4, "compile": True},
        output={"checkpoint_every": 2},
    )

    def finetune(folder: str, *words: str) -> tuple[str, dict[str, torch.Tensor]]:
        kernels = f"TORCHINDUCTOR_CACHE_DIR={tmp_path / f'kernels{len(words)}'}"
        program = ["env", kernels, sys.executable, ROOT / "cli.py", "finetune", recipe]
        done = subprocess.run(
            [*program, "--machine", machine_file, f"output.dir={tmp_path / folder}", *words],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, load_file(tmp_path / folder / "adapter" / "adapter_model.safetensors")

    shown, whole = finetune("run")
    assert "Compiling the layers, trying the longest batch" in shown
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-0000004")
    shutil.rmtree(tmp_path / "run" / "adapter")
    _, resumed = finetune("run", "--resume")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    _, plain = finetune("plain", "train.compile=false")
    assert any(not torch.equal(plain[name], whole[name]) for name in whole)


# --------------------------------------------------------------------------- experts implementation


def way_of(run_dir: Path) -> str:
    way: str = json.loads((run_dir / "experts.json").read_text())["experts_implementation"]
    return way


@pytest.mark.slow
def test_a_run_goes_on_as_it_was_begun_and_not_as_it_would_begin_here(
    tmp_path: Path, write_recipe, machine_file, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []  # on so small a model the bits of both ways are the same
    grouped_mm = torch.nn.functional.grouped_mm

    def counted(*given: Any, **named: Any) -> torch.Tensor:
        if not isinstance(given[0], FakeTensor):  # the check of a model without weights
            calls.append("grouped_mm")
        return grouped_mm(*given, **named)

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", counted)
    recipe = write_recipe()
    words = ("finetune", recipe, "--machine", machine_file, "--verbose")
    told = ("model.experts_implementation=grouped_mm", f"output.dir={tmp_path / 'told'}")
    assert run(*words, *told) == 0
    assert "expert kernels  grouped_mm (as the recipe says)" in capsys.readouterr().out
    assert way_of(tmp_path / "told") == "grouped_mm"
    num_whole = len(calls)
    assert num_whole > 6
    calls.clear()

    assert run(*words) == 0
    assert "expert kernels  eager (as --machine says)" in capsys.readouterr().out
    begun = tmp_path / "run"
    assert way_of(begun) == "eager"
    assert not calls

    # as if this run had been begun where grouped products are the fastest
    (begun / "experts.json").write_text('{"experts_implementation": "grouped_mm"}')
    shutil.rmtree(begun / "checkpoints")
    (begun / "checkpoints").mkdir()
    assert run(*words, "--resume") == 0
    assert "expert kernels  grouped_mm (as the run was begun)" in capsys.readouterr().out
    resumed, whole = adapter(begun), adapter(tmp_path / "told")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert len(calls) == num_whole


def test_a_run_that_triton_began_does_not_go_on_without_it(
    finished: Path, machine_file, capsys
) -> None:
    (finished / "experts.json").write_text('{"experts_implementation": "triton"}')
    words = ("finetune", finished / "recipe.yaml", "--machine", machine_file)
    assert run(*words, "--resume") == 1
    assert (
        "was begun with expert kernels triton, which cannot run here: " in capsys.readouterr().err
    )


@pytest.mark.thorough
def test_the_fastest_way_of_a_trial_is_planned_run_and_written_down(
    tmp_path: Path, write_recipe, machine_file, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    # a CPU has nothing to try; this is what a run does on a card
    monkeypatch.setattr("finetune.training.prepare.resolve_expert_backend", lambda *_, **__: None)
    recipe = write_recipe(train={"steps": 2})
    assert run("finetune", recipe, "--machine", machine_file, "--verbose") == 0
    shown = capsys.readouterr().out
    (best,) = [
        line.strip().partition(":")[0]
        for line in shown.splitlines()
        if line.rstrip().endswith("(taken)")
    ]
    assert f"expert kernels  {best} (measured)" in shown
    assert way_of(tmp_path / "run") == best
    planned = json.loads((tmp_path / "run" / "predicted.json").read_text())["before measuring"]
    assert planned["experts_implementation"] == {"value": best, "source": "measured"}


@pytest.mark.gpu
def test_a_card_tries_the_ways_writes_the_fastest_down_and_resumes_with_it(
    tmp_path: Path, write_recipe, capsys
) -> None:
    recipe = write_recipe(offload={"device": "cuda"}, model={"dtype": "bfloat16"})
    assert run("finetune", recipe, "--verbose") == 0
    shown = capsys.readouterr().out
    assert "Experts of one layer" in shown
    assert shown.count("(taken)") == 1
    way = way_of(tmp_path / "run")
    assert f"expert kernels  {way} (measured)" in shown
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-0000006")
    assert run("finetune", recipe, "--resume", "--verbose") == 0
    shown = capsys.readouterr().out
    assert "Experts of one layer" not in shown
    assert f"expert kernels  {way} (as the run was begun)" in shown


# ------------------------------------------------------------------------------------------ encoded


@pytest.mark.slow
def test_layers_in_ram_and_on_disk_train_alike_and_the_store_is_built_once(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(offload={"device": "cpu", "num_slots": 2, "codec": "nf4"})
    words = ("finetune", recipe, "--machine", machine_file)
    found = {}
    for tier in ("ram", "disk"):
        folder = tmp_path / tier
        assert run(*words, f"offload.tier={tier}", f"output.dir={folder}") == 0
        found[tier] = losses(folder), adapter(folder)
    assert capsys.readouterr().out.count("Wrote the layers of") == 1
    assert len(list((tmp_path / "cache" / "sluice" / "stores").glob("*.store"))) == 1
    assert found["ram"][0] == found["disk"][0]
    weights = found["disk"][1]
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found["ram"][1].items())
    assert run(*words, "offload.codec=native", f"output.dir={tmp_path / 'native'}") == 0
    assert losses(tmp_path / "native") != found["ram"][0]


@pytest.mark.exhaustive
def test_a_killed_encoded_run_resumes_to_the_bit(
    tmp_path, write_recipe, machine_file, forked
) -> None:
    recipe = write_recipe(
        train={"steps": 8}, offload={"device": "cpu", "num_slots": 2, "codec": "nf4"}
    )
    run_dir, whole = tmp_path / "run", tmp_path / "whole"
    assert run("finetune", recipe, "--machine", machine_file, f"output.dir={whole}") == 0
    metrics = run_dir / "metrics.jsonl"
    process = forked.start("finetune", recipe, "--machine", machine_file)
    process.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    process.end(signal.SIGKILL)
    assert run("finetune", recipe, "--machine", machine_file, "--resume") == 0
    assert losses(run_dir) == losses(whole)
    resumed, uninterrupted = adapter(run_dir), adapter(whole)
    assert all(torch.equal(resumed[name], uninterrupted[name]) for name in uninterrupted)


@pytest.mark.slow
def test_two_ranks_share_one_encoded_slab(tmp_path, write_recipe, machine_file, forked) -> None:
    recipe = write_recipe(offload={"device": "cpu", "num_slots": 2, "codec": "nf4"})
    words = ("finetune", recipe, "--machine", machine_file)
    ranks = forked.start_ranks(*words, f"output.dir={tmp_path / 'two'}")
    assert [rank.end() for rank in ranks] == [0, 0], [rank.shown for rank in ranks]
    assert "Plan for 2 x " in ranks[0].shown
    assert run(*words, f"output.dir={tmp_path / 'one'}") == 0
    assert_same_training(tmp_path / "two", tmp_path / "one")


# --------------------------------------------------------------------------------------------- init


@pytest.mark.thorough
def test_what_init_writes_trains(
    tmp_path: Path, model_dir: Path, machine_file: Path, cache: Path, capsys
) -> None:
    rows, recipe = tmp_path / "rows.jsonl", tmp_path / "new" / "mine.yaml"
    row = {"instruction": "what follows {}", "output": "more"}
    texts = (json.dumps(row | {"instruction": f"what follows {n}"}) for n in range(300))
    rows.write_text("\n".join(texts))
    words = ("--model", model_dir, "--data", rows, "--machine", machine_file, "--out", recipe)
    assert run("init", *words, "--yes") == 0
    assert "tokens of a row, by the model's tokenizer" in capsys.readouterr().out
    found = load_recipe(str(recipe), [])
    assert found.model.path == str(model_dir)
    assert found.data.format == "alpaca"
    run_dir = tmp_path / "run"
    settings = ["model.dtype=float32", "train.steps=2", "offload.device=cpu"]
    settings += (f"output.dir={run_dir}", "train.tokens_per_step=256", "data.num_workers=0")
    assert run("finetune", recipe, *settings, "--machine", machine_file) == 0
    assert len(losses(run_dir)) == 2


# ------------------------------------------------------------------------------------------ explain


def rows_of_explain(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def stop_after(run_dir: Path, step: int) -> None:
    """Make of a finished run what a kill behind a later step would have left."""
    rows = (run_dir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(rows[: step + 1]))
    for folder in (run_dir / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    shutil.rmtree(run_dir / "adapter")
    for name in ("report.json", "trace.json", "gantt.svg"):
        (run_dir / name).unlink()


def forge(file: Path) -> None:
    content = json.loads(file.read_text())
    content["calibrated"]["predicted"]["phases_s"]["step"] *= 1.1
    file.chmod(0o644)
    file.write_text(json.dumps(content, indent=1))


def _require_sealed_and_traced(file: Path, shown: str) -> None:
    """Memory is of the traced grade, and what was turned down stands beside it."""
    assert not file.stat().st_mode & 0o222
    predicted = json.loads(file.read_text())
    assert predicted["memory_grade"] == "traced"
    terms = predicted["calibrated"]["predicted"]["device_memory"]
    assert terms.keys() & {"one visit", "head chunk"}
    assert not any(name.startswith("one visit:") for name in terms)
    assert predicted["calibrated"]["predicted"]["peak_vram_bytes"] == sum(terms.values())
    assert "Predicted peak of device memory (formula)" in shown
    assert "Memory (traced): " in shown
    assert predicted["choice"]["choice"]["codec"] == "nf4"
    assert isinstance(predicted["choice"]["rejected"], list)


@pytest.mark.slow
def test_a_run_is_explained_from_its_files_resumed_and_caught_when_forged(
    tmp_path, write_recipe, machine_file, capsys
) -> None:
    recipe = write_recipe(
        train={"steps": 4}, offload={"stash": "host", "codec": "nf4", "kept_graphs": 2}
    )
    run_dir = tmp_path / "run"
    assert run("finetune", recipe, "--machine", machine_file, "--verbose") == 0
    at_end = capsys.readouterr().out
    _require_sealed_and_traced(run_dir / "predicted.json", at_end)
    first = (run_dir / "predicted.json").read_bytes()
    _require_true_rows(run_dir)

    # again, in a process that has neither torch nor the recipe's model
    report = json.loads((run_dir / "report.json").read_text())
    told = json.loads(_explained_without_torch(run_dir))
    assert told == {name: report[name] for name in told}
    assert {"changes", "sections", "measured_step", "memory"} <= told.keys()
    assert run("explain", run_dir) == 0
    again = capsys.readouterr().out
    table = at_end.partition("Predicted from timed steps against measured")[2].partition(
        "\nAdapter"
    )
    assert table[0] in again
    _require_memory_by_term(report)
    _require_the_very_ops(run_dir)

    # killed behind step 3, with a checkpoint of step 2
    stop_after(run_dir, 2)
    assert run("explain", run_dir) == 0
    assert "3 of 4 steps are done" in capsys.readouterr().out
    assert (run_dir / "gantt.svg").exists()
    words = ("finetune", recipe, "--machine", machine_file, "--resume")
    assert run(*words) == 0
    assert (run_dir / "predicted.json").read_bytes() == first
    report = json.loads((run_dir / "report.json").read_text())
    assert [(s["prediction"], s["steps"]) for s in report["sections"]] == [(1, [1, 2]), (2, [3, 4])]
    assert report["changes"] == []

    # forged
    forge(run_dir / "predicted.json")
    capsys.readouterr()
    assert run("explain", run_dir) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("PREDICTION CHANGED: 2 steps were run after a prediction")
    assert "PREDICTION CHANGED: predicted.json is not what predicted-2.json was" in shown
    assert run(*words) == 1
    err = capsys.readouterr().err
    assert f"in {run_dir} a prediction was changed" in err
    assert "cannot be changed after a step was run" in err
    assert "\n\nhint: restore predicted.json" in err

    # a run that is overwritten leaves nothing of it, however read-only
    RunDir(run_dir).start(RunDir(run_dir).recipe(), experts_implementation=None)
    assert {path.name for path in run_dir.iterdir()} == {"recipe.yaml", "checkpoints"}


def _require_true_rows(run_dir: Path) -> None:
    """Check that every step's parts are its time, and that its codec and stash are among them."""
    seals = set()
    for row in rows_of_explain(run_dir):
        parts = row["parts_s"]
        seconds = sum(sum(p) if isinstance(p, list) else p for p in parts.values())
        wall_s = row["phases_s"]["step"] + row["phases_s"]["data wait"]
        assert seconds == pytest.approx(wall_s, abs=1e-6)
        assert parts["outside the pass"] >= 0
        assert len(parts["forward"]) == len(parts["decode"]) == len(parts["backward"]) == 4
        seals.add(row["prediction_sha256"])
    assert len(seals) == 1


def _require_the_very_ops(run_dir: Path) -> None:
    """Check that what was simulated is what ran, op by op."""
    predicted, measured = (
        json.loads((run_dir / name).read_text())["timeline"]
        for name in ("predicted.json", "measured.json")
    )
    same = ("lane", "kind", "layer", "micro_batch", "waits")
    assert [[op[k] for k in same] for op in predicted] == [[op[k] for k in same] for op in measured]


def _require_memory_by_term(report: dict) -> None:
    memory = {row["name"]: row for row in report["memory"]}
    assert {"slots", "decoded layer", "slab", "stashed layer inputs"} <= memory.keys()
    assert {"adapters", "optimizer states", "embeddings, norm and head"} <= memory.keys()
    assert memory["adapters"]["error"] == 0
    terms = [row for name, row in memory.items() if name != "peak memory"]
    measured = sum(row["measured"] for row in terms if row["measured"] is not None)
    assert measured == memory["peak memory"]["measured"]
    assert 0 < report["measured_step"]["bound_s"] <= 1.5 * report["measured_step"]["step_s"]


def _explained_without_torch(run_dir: Path) -> str:
    code = (
        "import sys\nfrom finetune.app import main\n"
        f"try:\n    main(['explain', {str(run_dir)!r}, '--json'])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'transformers', 'peft', 'bitsandbytes', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return done.stdout


def test_what_is_no_run_is_refused(tmp_path: Path, capsys) -> None:
    assert run("explain", tmp_path) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"error: {tmp_path} holds no predicted.json; ")
    assert "\n\nhint: name the directory that `sluice finetune` wrote" in err
