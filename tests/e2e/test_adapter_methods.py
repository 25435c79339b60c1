"""Adapters of every method and option, from a recipe to plain peft."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config

import offload
from finetune.adapter.lora import load_adapter
from tests.builders import of_method
from tests.checkpoints import loaded
from tests.doubles import tiny_tokenizer
from tests.e2e.plain_heads import cosine
from tests.e2e.runs import adapter, losses, run
from tests.e2e.talking import Plain, talk

# peft looks for patterns among modules only, and says that those of experts fit nothing
EVERYTHING = {
    "rank_pattern": {"q_proj": 2, "experts.down_proj": 3},
    "alpha_pattern": {"q_proj": 3.0},
    "rslora": True,
    "loraplus_ratio": 4,
    "modules_to_save": ["norms", "router", "lm_head", "embed_tokens"],
}
DORA = {"dora": True, "experts": False, "modules_to_save": ["o_proj"]}
INPUT_IDS = torch.arange(5, 25).view(2, 10)


def plain_logits(model_dir: Path, adapter: Path | None) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(input_ids=INPUT_IDS).logits
    return logits


def streamed_logits(model_dir: Path, adapter: Path) -> torch.Tensor:
    """Return what `sluice generate` computes: layers in the slab, the adapter on top."""
    base = loaded(model_dir)
    model = load_adapter(base.model, adapter).eval()
    engine = offload.attach(model, num_slots=2, device="cpu", backing=base.backing)
    logits = engine.forward({"input_ids": INPUT_IDS}).logits
    engine.close()
    assert logits is not None
    return logits


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(EVERYTHING, marks=pytest.mark.slow),
        pytest.param(DORA, marks=pytest.mark.slow),
    ],
    ids=["everything", "DoRA"],
)
def test_options_train_resume_to_the_bit_and_load_in_plain_peft(
    options: dict[str, Any], tmp_path: Path, write_recipe, machine_file, model_dir, capsys
) -> None:
    recipe = write_recipe(
        adapter=options,
        train={"steps": 2},
        output={"checkpoint_every": 1},
        data={"eval_frac": None},
    )
    run_dir, words = tmp_path / "run", ("--machine", machine_file)
    assert run("finetune", recipe, *words) == 0
    assert (
        "DoRA rank 4" if options is DORA else "rank 4 (experts.down_proj 3, q_proj 2) on q_proj"
    ) in capsys.readouterr().out
    whole = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    logits = plain_logits(model_dir, run_dir / "adapter")
    assert not torch.allclose(logits, plain_logits(model_dir, None), atol=1e-4)
    assert torch.allclose(streamed_logits(model_dir, run_dir / "adapter"), logits, atol=1e-6)

    predicted = json.loads((run_dir / "predicted.json").read_text())
    checkpoint = run_dir / "checkpoints" / "step-0000002"
    trained = load_file(checkpoint / "trained.safetensors")
    counts = predicted["before measuring"]["model"]
    planned = counts["num_adapter_parameters"] + counts["num_module_parameters"]
    assert planned == sum(tensor.numel() for tensor in trained.values())

    shutil.rmtree(checkpoint)
    shutil.rmtree(run_dir / "adapter")
    assert run("finetune", recipe, *words, "--resume") == 0
    resumed = load_file(run_dir / "adapter" / "adapter_model.safetensors")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert run("generate", run_dir, "--prompt", "what follows 3", "--max-new-tokens", "2") == 0
    same = went_on(run_dir, recipe, machine_file, tmp_path / "next", "train.lr=1e-12")
    assert same.keys() == whole.keys()
    assert all(torch.allclose(same[name], whole[name], rtol=0, atol=1e-9) for name in whole)


def went_on(
    source: Path, recipe: Path, machine_file: Path, folder: Path, *settings: str
) -> dict[str, torch.Tensor]:
    """Return the adapter of a run that went on from another's, which trained it further."""
    words = ("--machine", machine_file, f"adapter.init_from={source}", f"output.dir={folder}")
    assert run("finetune", recipe, *words, *settings) == 0
    return load_file(folder / "adapter" / "adapter_model.safetensors")


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
@pytest.mark.slow
def test_a_run_goes_on_from_an_adapter(
    finished: Path, tmp_path: Path, write_recipe, machine_file, capsys
) -> None:
    before = load_file(finished / "adapter" / "adapter_model.safetensors")
    recipe = write_recipe(train={"steps": 1, "lr": 1e-12}, output={"eval_every": None})
    config = finished / "adapter" / "adapter_config.json"
    other = json.loads(config.read_text()) | {"base_model_name_or_path": "another/model"}
    config.write_text(json.dumps(other))
    same = went_on(finished / "adapter", recipe, machine_file, tmp_path / "a")
    shown = " ".join(capsys.readouterr().out.split())
    assert "was trained on another/model, and this is " in shown
    assert same.keys() == before.keys()
    assert all(torch.allclose(same[name], before[name], rtol=0, atol=1e-9) for name in before)


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
def test_a_run_goes_on_from_an_adapter_that_is_there(write_recipe, capsys) -> None:
    assert run("finetune", write_recipe(), "adapter.init_from=runs/nothing/at/all") == 1
    assert "there is no such file" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("adapter.alpha=7", "lora_alpha is 8"),
        ("adapter.rslora=true", "use_rslora is False"),
        ("adapter.alpha_pattern={q_proj: 3}", "alpha_pattern is {}"),
        ("adapter.rank=3", "it has shape (3, 32) here"),
        ("adapter.experts=false", "holds, and the model has no place for,"),
    ],
)
def test_a_run_goes_on_from_an_adapter_of_its_kind(
    setting: str, text: str, finished: Path, tmp_path: Path, write_recipe, machine_file, capsys
) -> None:
    words = ("--machine", machine_file, f"adapter.init_from={finished}", setting)
    assert run("finetune", write_recipe(), *words, f"output.dir={tmp_path / 'c'}") == 1
    assert text in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
@pytest.mark.slow
def test_norms_and_routers_move_and_are_saved_under_their_own_names(
    tmp_path: Path, write_recipe, machine_file, model_dir
) -> None:
    recipe = write_recipe(adapter={"modules_to_save": ["norms", "router"]}, train={"steps": 1})
    assert run("finetune", recipe, "--machine", machine_file) == 0
    saved = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).state_dict()
    whole = {name: t for name, t in saved.items() if "lora_" not in name}
    parts = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    assert set(whole) == {
        f"base_model.model.model.{name}.weight"
        for name in ("norm", *(f"layers.{i}.{p}" for i in range(4) for p in (*parts, "mlp.gate")))
    }
    for name, tensor in whole.items():
        assert not torch.equal(tensor, base[name.removeprefix("base_model.model.")]), name


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
@pytest.mark.thorough
def test_an_adapter_is_written_for_vllm(finished: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "vllm"
    assert run("adapter", finished, "--format", "vllm", "--out", out) == 0
    assert f"{out}\nvLLM: `vllm serve " in capsys.readouterr().out
    names = set(load_file(out / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.3.mlp.experts.3.up_proj.lora_B.weight" in names
    assert run("adapter", finished, "--format", "gguf", "--out", tmp_path / "x") == 1
    assert "--format gguf; an adapter is written for vllm" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:The following rank_pattern keys did not match")
@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["adapter.modules_to_save=[gate]"], "adapter.modules_to_save names 'gate'"),
        (["adapter.rank_pattern={k: 3}"], "adapter.rank_pattern names 'k', which has no adapter"),
    ],
)
def test_what_can_have_no_effect_is_refused_before_anything_is_loaded(
    settings: list[str], text: str, tmp_path: Path, write_recipe, machine_file, capsys
) -> None:
    assert run("finetune", write_recipe(), "--machine", machine_file, *settings) == 1
    assert text in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------ methods


METHODS = ("loha", "lokr", "ia3", "vera", "oft", "miss", "hira")


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=ids).logits
    return result


@pytest.mark.thorough
@pytest.mark.parametrize(
    "method",
    [m if m == "vera" else pytest.param(m, marks=pytest.mark.slow) for m in METHODS],
)
def test_a_method_trains_as_planned_is_read_by_peft_and_merges(
    method, write_recipe, model_dir, machine_file, cache, tmp_path, capsys
) -> None:
    recipe = write_recipe(adapter=of_method(method, rank=4).model_dump(), report={"samples": 0})
    words, run_dir = ("--machine", machine_file), tmp_path / "run"
    assert run("finetune", recipe, *words, "train.steps=4") == 0
    stopped = losses(run_dir)
    assert run("finetune", recipe, *words, "--resume", "train.steps=6") == 0
    assert losses(run_dir)[:4] == stopped
    assert min(losses(run_dir)) < stopped[0]

    base: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    ids = torch.arange(1, 12)[None]
    before = logits(base, ids)
    plain = PeftModel.from_pretrained(base, str(run_dir / "adapter"), is_trainable=True)
    peft_count = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    capsys.readouterr()
    assert run("plan", recipe, *words, "--json") == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["model"]["num_adapter_parameters"] == peft_count

    trained = logits(plain, ids)
    assert (trained - before).abs().max() > 1e-3
    assert run("merge", run_dir, "--out", tmp_path / "merged") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    torch.testing.assert_close(logits(merged, ids), trained, rtol=1e-4, atol=1e-5)
    assert adapter(run_dir)


# ------------------------------------------------------------------------------------------- prefix


PREFIX: dict[str, Any] = {"method": "prefix", "num_virtual_tokens": 6}
NUM_STEPS = 6


def prefix_recipe(write_recipe: Any, **sections: dict[str, Any]) -> Path:
    recipe: Path = write_recipe(
        adapter=PREFIX | sections.pop("adapter", {}),
        train={"steps": NUM_STEPS, "lr": 0.1, "micro_batch_size": 3, "grad_accum_steps": 2},
        report={"samples": 3},
        output={"eval_every": 3, "checkpoint_every": 2},
        **sections,
    )
    return recipe


@pytest.mark.slow
def test_a_run_is_evaluated_answers_resumes_and_chats_as_plain_peft(
    rows_file, tmp_path, model_dir, write_recipe, machine_file, monkeypatch, capsys
) -> None:
    words = ("finetune", prefix_recipe(write_recipe), "--machine", machine_file)
    run_dir = tmp_path / "run"
    assert run(*words) == 0
    whole = losses(run_dir), adapter(run_dir)
    assert whole[0][-1] < whole[0][0]
    answers = json.loads((run_dir / "samples_after.json").read_text())
    shutil.rmtree(run_dir / "adapter")
    for folder in sorted(run_dir.glob("checkpoints/*"))[1:]:
        shutil.rmtree(folder)
    assert run(*words, "--resume") == 0
    ours = losses(run_dir), adapter(run_dir)
    assert ours[0] == whole[0]
    assert ours[1].keys() == whole[1].keys()
    assert all(torch.equal(ours[1][name], tensor) for name, tensor in whole[1].items())
    assert json.loads((run_dir / "samples_after.json").read_text()) == answers

    said = "what follows 3"
    capsys.readouterr()
    assert talk([said], monkeypatch, run_dir, "--compare") == 0
    shown = capsys.readouterr().out
    turns = [{"role": "user", "content": said}]
    tuned = Plain(model_dir, run_dir / "adapter").answer(turns)
    plain = Plain(model_dir, None).answer(turns)
    assert tuned != plain
    assert shown == f"base: {plain}\nadapter: {tuned}\n"

    capsys.readouterr()
    asked = ("generate", run_dir, "--prompt", said, "--max-new-tokens", 123)
    assert run(*asked) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert "6 virtual tokens, a prompt of" in err
    assert "the model was made for at most 128 hint: `--max-new-tokens" in err

    for command in (
        ("merge", run_dir, "--out", tmp_path / "merged"),
        ("adapter", run_dir, "--format", "vllm", "--out", tmp_path / "vllm"),
        ("score", words[1], rows_file, "--adapter", run_dir, "--machine", machine_file),
    ):
        capsys.readouterr()
        assert run(*command) != 0, command
        assert "PREFIX_TUNING" in capsys.readouterr().err
    scored = ("score", words[1], rows_file, "--checkpoints", run_dir, "--machine", machine_file)
    assert run(*scored) != 0
    assert "an adapter of the type PREFIX_TUNING" in capsys.readouterr().err


# ----------------------------------------------------------------------------------- virtual tokens


LR, SEED, VIRTUAL_TOKENS_NUM_STEPS, NUM = 0.05, 3, 4, 7
SEQ_LEN, NUM_ROWS = 64, 5  # the last of which is short
CONFIGS: dict[str, Any] = {
    "prompt": PromptTuningConfig,
    "p_tuning": PromptEncoderConfig,
    "prefix": PrefixTuningConfig,
    "prefix_mlp": partial(PrefixTuningConfig, prefix_projection=True),
}
SHOWN = {
    "prompt": f"prompt tuning, {NUM} virtual tokens in front of each row",
    "p_tuning": f"p-tuning, {NUM} virtual tokens in front of each row",
    "prefix": f"prefix tuning, {NUM} keys and values in front of each layer's",
}
SHOWN["prefix_mlp"] = SHOWN["prefix"]
ROWS = [{"text": f"what follows {n}{'!' * (n % 5)} is {n + 1}"} for n in range(12)]


def dense_dir(tmp_path: Path) -> Path:
    tokenizer = tiny_tokenizer()
    torch.manual_seed(1)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
    }
    config = Qwen3Config(**shape, vocab_size=len(tokenizer))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    tokenizer.save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


def plain_run(base: Path, method: str) -> tuple[list[float], Any, list[torch.Tensor]]:
    """Train on all rows in each step, one at a time, by transformers and peft alone."""
    tokenizer = AutoTokenizer.from_pretrained(base)
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(SEED)
    model = get_peft_model(model, CONFIGS[method](num_virtual_tokens=NUM, task_type="CAUSAL_LM"))
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0)
    texts = [[*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id] for row in ROWS]
    joined = torch.tensor([[token for ids in texts for token in ids]])  # documents, as one
    rows = list(joined.split(SEQ_LEN, dim=1))
    assert len(rows) == NUM_ROWS
    is_in_layers = method.startswith("prefix")
    nums = [row.shape[1] - is_in_layers for row in rows]  # else the first token is predicted too
    found = []
    for step in range(VIRTUAL_TOKENS_NUM_STEPS):
        losses_ = [
            model(input_ids=r, labels=r).loss * n / sum(nums)
            for r, n in zip(rows, nums, strict=True)
        ]
        loss = torch.stack(losses_).sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.param_groups[0]["lr"] = LR * cosine(step, VIRTUAL_TOKENS_NUM_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, model.eval(), rows


def text_recipe(write_recipe: Any, tmp_path: Path, base: Path, method: str) -> Path:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    recipe: Path = write_recipe(
        model={"path": str(base)},
        adapter={"method": method, "num_virtual_tokens": NUM},
        data={"path": str(file), "format": "text", "eval_frac": None} | {"columns": {}},
        train={
            "steps": VIRTUAL_TOKENS_NUM_STEPS,
            "lr": LR,
            "seed": SEED,
            "micro_batch_size": NUM_ROWS,
        }
        | {"grad_accum_steps": 1, "seq_len": SEQ_LEN},
        report={"samples": 0},
        output={"eval_every": None, "checkpoint_every": 2},
    )
    return recipe


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("dense", "prompt"),
        ("mixture", "p_tuning"),
        ("dense", "prefix"),
        pytest.param("mixture", "prefix", marks=pytest.mark.slow),
        pytest.param("dense", "prefix_mlp", marks=pytest.mark.slow),
        pytest.param("dense", "p_tuning", marks=pytest.mark.slow),
        pytest.param("mixture", "prompt", marks=pytest.mark.slow),
    ],
)
def test_reorder_virtual_tokens_learn_as_in_plain_peft(
    family, method, tmp_path, model_dir, write_recipe, machine_file, capsys
) -> None:
    base, run_dir = dense_dir(tmp_path) if family == "dense" else model_dir, tmp_path / "run"
    recipe = text_recipe(write_recipe, tmp_path, base, method)
    assert run("finetune", recipe, "--machine", machine_file) == 0
    expected, plain, rows = plain_run(base, method)
    num = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"{num:,} parameters: {SHOWN[method]}" in shown
    assert losses(run_dir) == pytest.approx(expected, rel=2e-5)
    assert expected[-1] < expected[0]
    whole = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = PeftModel.from_pretrained(whole, str(run_dir / "adapter")).eval()
    with torch.no_grad():
        for row in rows[-2:]:
            torch.testing.assert_close(
                loaded(input_ids=row).logits, plain(input_ids=row).logits, rtol=1e-3, atol=1e-3
            )


@pytest.mark.slow
def test_move_a_run_goes_on_to_the_bit_and_other_commands_refuse_its_adapter(
    tmp_path, model_dir, write_recipe, machine_file, capsys
) -> None:
    recipe = text_recipe(write_recipe, tmp_path, model_dir, "p_tuning")
    words, run_dir = ("finetune", recipe, "--machine", machine_file), tmp_path / "run"
    assert run(*words) == 0
    whole = losses(run_dir), adapter(run_dir)
    shutil.rmtree(run_dir / "adapter")
    shutil.rmtree(max(run_dir.glob("checkpoints/*")))
    assert run(*words, "--resume") == 0
    ours = losses(run_dir), adapter(run_dir)
    assert ours[0] == whole[0]
    assert all(torch.equal(ours[1][name], tensor) for name, tensor in whole[1].items())
    capsys.readouterr()
    for command in (
        ("merge", run_dir, "--out", tmp_path / "merged"),
        ("generate", run_dir, "--prompt", "what"),
    ):
        assert run(*command) != 0
        assert "P_TUNING" in capsys.readouterr().err
