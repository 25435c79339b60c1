"""A model goes to llama.cpp's converter whole, and what comes back is looked at."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from finetune.commands.export import served_by
from finetune.errors import CheckpointError, ConfigError, MergeError
from finetune.export.gguf import Exported, export_gguf
from finetune.export.llama_cpp import CONVERTER, QUANTIZER, programs_for
from tests.llama_cpp import llama_cpp, with_quantizer

TEMPLATE = "{{ 'caf\u00e9' }}{% for turn in messages %}{{ turn.content }}{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "merged"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def exported(source: Path, file: Path, clone: Path | None = None, form: str = "bf16") -> Exported:
    return export_gguf(source, file, programs_for(form, clone))


def test_the_converter_of_a_clone_gets_the_whole_folder(model: Path, tmp_path: Path) -> None:
    clone = llama_cpp(tmp_path / "llama.cpp")
    file = tmp_path / "new" / "model.gguf"
    made = exported(model, file, clone)
    assert made.file == file
    assert made.num_bytes == file.stat().st_size > len(TEMPLATE)
    python, folder, options, names, _ = json.loads((clone / "seen.json").read_text())
    assert python == sys.executable
    assert Path(folder).name == model.name  # the converter names the model after its folder
    assert options == ["--outtype", "bf16", "--outfile"]
    assert names == sorted(path.name for path in model.iterdir())
    _, names = json.loads((clone / "vocabulary.json").read_text())
    assert names == sorted(path.name for path in model.iterdir() if path.suffix != ".safetensors")
    assert [path.name for path in file.parent.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("tower", ["vision_config", "audio_config", None])
def test_a_model_with_a_tower_is_said_to_need_a_file_of_it(
    tower: str | None, model: Path, tmp_path: Path
) -> None:
    (model / "config.json").write_text(json.dumps({tower or "text_config": {}}))
    file = tmp_path / "model.gguf"
    made = exported(model, file, llama_cpp(tmp_path / "llama.cpp"))
    call = f"`{CONVERTER} BASE_DIR --mmproj --outfile mmproj-model.gguf`"
    assert any(call in note for note in made.notes) is (tower is not None)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (
            {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["<a>"]},
            {"tokenizer_class": "PreTrainedTokenizerFast", "additional_special_tokens": ["<a>"]},
        ),
        (
            {"extra_special_tokens": ["<b>"], "additional_special_tokens": ["<a>"]},
            {"additional_special_tokens": ["<a>", "<b>"]},
        ),
        (
            {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": {"image_token": "<i>"}},
            {"tokenizer_class": "Qwen2Tokenizer", "extra_special_tokens": {"image_token": "<i>"}},
        ),
    ],
)
def test_the_converter_gets_a_tokenizer_that_its_transformers_read(
    written: dict[str, object], read: dict[str, object], model: Path, tmp_path: Path
) -> None:
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps(written))
    clone = llama_cpp(tmp_path / "llama.cpp")
    exported(model, tmp_path / "model.gguf", clone)
    *_, seen = json.loads((clone / "seen.json").read_text())
    tried, _ = json.loads((clone / "vocabulary.json").read_text())
    assert seen == tried == read
    assert json.loads(settings.read_text()) == written  # the model itself stays as it is


@pytest.mark.parametrize(
    ("mode", "limit"),
    [
        (
            "refuses: NotImplementedError: BPE pre-tokenizer was not recognized - update it",
            "llama.cpp splits text by rules of its own for each tokenizer, and has none for this",
        ),
        ("refuses: ValueError: Tokenizer class Odd does not exist", "must have the tokenizer's"),
        ("refuses: ModuleNotFoundError: No module named 'torch'", "runs with packages of its own"),
        ("refuses: ERROR: Model Tiny is not supported", "the architectures that it has code for"),
    ],
)
def test_what_the_converter_does_not_know_is_refused_before_any_work(
    mode: str, limit: str, model: Path, tmp_path: Path
) -> None:
    clone = llama_cpp(tmp_path / "llama.cpp", mode)
    with pytest.raises(
        MergeError, match=re.escape(f"{CONVERTER} refuses {model}: {mode}")
    ) as error:
        exported(model, tmp_path / "model.gguf", clone)
    assert error.value.limit is not None
    assert limit in error.value.limit
    assert not (clone / "seen.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"merged", "llama.cpp"}


def test_a_converter_that_wants_weights_for_the_vocabulary_is_given_the_model(
    model: Path, tmp_path: Path
) -> None:
    clone = llama_cpp(tmp_path / "llama.cpp", "wants weights")
    exported(model, tmp_path / "model.gguf", clone)
    assert (clone / "seen.json").exists()


def test_a_clone_s_own_python_is_used(model: Path, tmp_path: Path) -> None:
    clone = llama_cpp(tmp_path / "llama.cpp")
    own = clone / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    exported(model, tmp_path / "model.gguf", clone)
    assert json.loads((clone / "seen.json").read_text())[0] == str(own)


def test_the_converter_on_the_path_is_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = llama_cpp(tmp_path / "bin", python=sys.executable)
    monkeypatch.setenv("PATH", str(folder))
    exported(model, tmp_path / "model.gguf")
    assert (folder / "seen.json").exists()


def test_without_a_converter_it_says_how_to_get_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MergeError, match=f"{CONVERTER} is not on the PATH; ") as caught:
        exported(model, tmp_path / "model.gguf")
    assert caught.value.hint == (
        "`git clone --depth 1 https://github.com/ggml-org/llama.cpp"
        " && python -m venv llama.cpp/.venv && llama.cpp/.venv/bin/pip install"
        " -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt`,"
        " then `--llama-cpp llama.cpp`"
    )
    with pytest.raises(MergeError, match=f"merged holds no {CONVERTER}; it must be a clone"):
        exported(model, tmp_path / "model.gguf", model)


def test_what_the_converter_cannot_write_is_quantised(model: Path, tmp_path: Path) -> None:
    clone, file = with_quantizer(llama_cpp(tmp_path / "llama.cpp")), tmp_path / "model.gguf"
    made = exported(model, file, clone, "Q4_K_M")
    assert file.read_bytes().endswith(b"weightsQ4_K_M")
    _, _, options, _, _ = json.loads((clone / "seen.json").read_text())
    assert options == ["--outtype", "auto", "--outfile"]
    assert {path.name for path in tmp_path.iterdir()} == {"merged", "llama.cpp", "model.gguf"}
    llama, ollama, studio = served_by(made, name="mine", is_for_ollama=True)
    assert llama == f"llama.cpp: `llama-server -m {file} --jinja`"
    create = f"`ollama create mine -f {tmp_path / 'Modelfile'}`"
    assert ollama == f"Ollama: {create}, then `ollama run mine`"
    assert studio.startswith(f"LM Studio: `lms import {file}`, or ")


def test_a_quantised_file_without_the_template_is_not_kept(model: Path, tmp_path: Path) -> None:
    clone = with_quantizer(llama_cpp(tmp_path / "llama.cpp"), works=False)
    with pytest.raises(MergeError, match=f"what {QUANTIZER} wrote lacks the model's chat template"):
        exported(model, tmp_path / "model.gguf", clone, "q6_k")
    assert not (tmp_path / "model.gguf").exists()


def test_without_a_quantiser_it_says_how_to_build_one_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    clone = llama_cpp(tmp_path / "llama.cpp")
    with pytest.raises(MergeError, match=f"{QUANTIZER} is neither .* nor built in") as caught:
        programs_for("q4_k_m", clone)
    assert caught.value.hint == (
        "`cmake -S llama.cpp -B llama.cpp/build && cmake --build llama.cpp/build --target"
        " llama-quantize`, then `--llama-cpp llama.cpp`; or `--gguf q8_0`, which needs the"
        " converter alone"
    )
    assert programs_for("q8_0", clone).quantizer is None


@pytest.mark.parametrize(
    ("form", "hint"),
    [
        ("my.gguf", "`--gguf q4_k_m --out my.gguf`"),
        ("q4km", "`--gguf q4_k_m`"),
        ("iq2_xxs", "`--gguf iq4_xs`"),
    ],
)
def test_a_form_that_is_none_is_refused_with_the_nearest(form: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"--gguf {form}; it is the form of the weights") as error:
        programs_for(form, None)
    assert error.value.hint == hint


def test_a_clone_is_found_where_it_is_named_or_usual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.chdir(tmp_path)
    here = with_quantizer(llama_cpp(tmp_path / "llama.cpp"))
    usual = programs_for("q4_k_m", None)
    assert usual.converter[-1] == f"llama.cpp/{CONVERTER}"
    assert usual.quantizer == f"llama.cpp/build/bin/{QUANTIZER}"
    monkeypatch.setenv("SLUICE_LLAMA_CPP", str(tmp_path / "other"))
    with pytest.raises(MergeError, match=f"other holds no {CONVERTER}; it must be a clone"):
        programs_for("q4_k_m", None)
    assert programs_for("q4_k_m", here).converter[-1] == str(here / CONVERTER)


@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("fails", f"{CONVERTER} ended with 1; "),
        ("writes nothing", f"{CONVERTER} wrote no model.gguf; "),
        ("lacks", "lacks the model's chat template; "),
        ("other", "is no GGUF file; "),
    ],
)
def test_what_goes_wrong_is_told_and_leaves_no_file(
    mode: str, message: str, model: Path, tmp_path: Path
) -> None:
    clone = llama_cpp(tmp_path / "llama.cpp", mode)
    with pytest.raises(MergeError, match=message):
        exported(model, tmp_path / "model.gguf", clone)
    assert {path.name for path in tmp_path.iterdir()} == {"merged", "llama.cpp"}


def test_a_model_of_two_chat_templates_is_refused(model: Path, tmp_path: Path) -> None:
    clone = llama_cpp(tmp_path / "llama.cpp")
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    with pytest.raises(MergeError, match="has two chat templates that differ; "):
        exported(model, tmp_path / "model.gguf", clone)
    named = [{"name": "tool_use", "template": ""}, {"name": "default", "template": TEMPLATE}]
    settings.write_text(json.dumps({"chat_template": named}))
    exported(model, tmp_path / "model.gguf", clone)


def test_a_folder_without_a_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    clone = llama_cpp(tmp_path / "llama.cpp")
    with pytest.raises(MergeError, match=r"merged has no tokenizer_config\.json; "):
        exported(model, tmp_path / "model.gguf", clone)


def test_a_file_that_is_there_is_kept(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("mine")
    with pytest.raises(MergeError, match=r"model\.gguf is there already; "):
        exported(model, file, llama_cpp(tmp_path / "llama.cpp"))
    assert file.read_text() == "mine"


def test_a_file_that_is_called_like_a_gguf_file_in_the_making_is_kept(
    model: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "partial-model.gguf"
    mine.write_text("mine")
    exported(model, tmp_path / "model.gguf", llama_cpp(tmp_path / "llama.cpp"))
    assert mine.read_text() == "mine"


def test_a_folder_that_is_no_model_and_no_run_is_refused(tmp_path: Path) -> None:
    clone = llama_cpp(tmp_path / "llama.cpp")
    with pytest.raises(CheckpointError, match="holds no finished run"):
        exported(tmp_path, tmp_path / "model.gguf", clone)
    assert {path.name for path in tmp_path.iterdir()} == {"llama.cpp"}


# ------------------------------------------------------------------------ llama.cpp's own converter


def saved_model(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Write a tiny Llama as transformers 5 does."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Return one of Llama's kind, which the converter reads without rules for its splitting."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abcde"]
    merges = [("a", "b")]
    core = Tokenizer(
        models.BPE(
            vocab={word: number for number, word in enumerate([*words, "ab"])},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    core.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        extra_special_tokens=["<|turn|>"],
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_transformers_5_writes_what_4_57_cannot_read(tmp_path: Path) -> None:
    """When this fails, the copy for the converter may have become needless."""
    llama_tokenizer().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "TokenizersBackend"
    assert settings["extra_special_tokens"] == ["<|turn|>"]


@pytest.mark.network
def test_llama_cpp_s_own_converter_reads_the_copy(llama_cpp_clone: Path, tmp_path: Path) -> None:
    model = saved_model(tmp_path / "tiny", llama_tokenizer())
    made = exported(model, tmp_path / "tiny.gguf", llama_cpp_clone)
    content = made.file.read_bytes()
    assert content[:4] == b"GGUF"
    for part in (TEMPLATE.encode(), b"<|turn|>", b"blk.1.attn_q.weight", b"output_norm.weight"):
        assert part in content


@pytest.mark.network
def test_llama_cpp_s_own_converter_refuses_the_quickstart_before_any_work(
    llama_cpp_clone: Path, tmp_path: Path
) -> None:
    model = Path(__file__).parents[4] / "recipes" / "quickstart" / "model"
    with pytest.raises(MergeError, match=f"{CONVERTER} refuses .*pre-tokenizer was not recognized"):
        exported(model, tmp_path / "q.gguf", llama_cpp_clone)
    assert not list(tmp_path.iterdir())
