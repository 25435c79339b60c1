"""A run is trained, merged and exported by the commands; plain transformers reads the result."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from tests.e2e.runs import run

IDS = torch.arange(3, 27).view(2, 12)
CONVERTER = """
import sys
from pathlib import Path
folder, outfile = Path(sys.argv[1]), Path(sys.argv[3])
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
        assert run("export", source, "--gguf", file, "--llama-cpp", clone) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert f"GGUF: {file}" in shown
        flag = """--chat-template-kwargs '{"enable_thinking": false}'`"""
        assert f"llama.cpp: `llama-server -m {file} --jinja {flag}" in shown
        assert "Ollama: `ollama run NAME --think=false`" in shown
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

    shutil.rmtree(finished / "adapter")
    assert run("merge", finished, "--out", merged) == 1
    assert "run holds no finished run; " in capsys.readouterr().err
    assert run("export", finished, "--gguf", tmp_path / "x.gguf", "--llama-cpp", finished) == 1
    assert "holds no convert_hf_to_gguf.py; " in capsys.readouterr().err
    assert not merged.exists()
