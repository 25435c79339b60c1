"""A model goes to llama.cpp's converter whole, and what comes back is looked at."""

import json
import stat
import sys
from pathlib import Path

import pytest

from finetune.errors import CheckpointError, MergeError
from finetune.export import CONVERTER, export_gguf

TEMPLATE = "{{ 'caf\u00e9' }}{% for turn in messages %}{{ turn.content }}{% endfor %}"
# Writes down what it was given, and a file as a converter would; MODE is what goes wrong.
FAKE = """
import json, sys
from pathlib import Path
folder, option, outfile = sys.argv[1:]
here = Path(__file__).parent
(here / "seen.json").write_text(json.dumps([sys.executable, sys.argv[1:], sorted(
    file.name for file in Path(folder).iterdir())]))
if MODE == "fails":
    sys.exit("Model Tiny is not supported")
template = (Path(folder) / "chat_template.jinja").read_bytes()
content = {"lacks": b"GGUF\\3", "other": b"ggjt" + template}.get(MODE, b"GGUF\\3" + template)
if MODE != "writes nothing":
    Path(outfile).write_bytes(content + b"weights")
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "merged"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def llama_cpp(folder: Path, mode: str = "works", *, python: str = "") -> Path:
    folder.mkdir()
    shebang = f"#!{python}\n" if python else ""
    script = folder / CONVERTER
    script.write_text(f"{shebang}MODE = {mode!r}\n{FAKE}")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return folder


def test_the_converter_of_a_clone_gets_the_whole_folder(model: Path, tmp_path: Path) -> None:
    clone = llama_cpp(tmp_path / "llama.cpp")
    file = tmp_path / "new" / "model.gguf"
    exported = export_gguf(model, file, llama_cpp=clone)
    assert exported.file == file
    assert exported.num_bytes == file.stat().st_size > len(TEMPLATE)
    python, arguments, names = json.loads((clone / "seen.json").read_text())
    assert python == sys.executable
    folder, flag, outfile = arguments
    assert (folder, flag) == (str(model), "--outfile")
    assert Path(outfile).name == "model.gguf"
    assert Path(outfile).parent.parent == file.parent
    assert names == sorted(path.name for path in model.iterdir())
    assert [path.name for path in file.parent.iterdir()] == ["model.gguf"]


def test_a_clone_s_own_python_is_used(model: Path, tmp_path: Path) -> None:
    clone = llama_cpp(tmp_path / "llama.cpp")
    own = clone / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(sys.executable)
    export_gguf(model, tmp_path / "model.gguf", llama_cpp=clone)
    assert json.loads((clone / "seen.json").read_text())[0] == str(own)


def test_the_converter_on_the_path_is_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = llama_cpp(tmp_path / "bin", python=sys.executable)
    monkeypatch.setenv("PATH", str(folder))
    export_gguf(model, tmp_path / "model.gguf")
    assert (folder / "seen.json").exists()


def test_without_a_converter_it_says_how_to_get_one(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MergeError, match=f"{CONVERTER} is not on the PATH; ") as caught:
        export_gguf(model, tmp_path / "model.gguf")
    assert caught.value.hint == (
        "`git clone --depth 1 https://github.com/ggml-org/llama.cpp"
        " && python -m venv llama.cpp/.venv && llama.cpp/.venv/bin/pip install"
        " -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt`,"
        " then `--llama-cpp llama.cpp`"
    )
    with pytest.raises(MergeError, match=f"merged holds no {CONVERTER}; it must be a clone"):
        export_gguf(model, tmp_path / "model.gguf", llama_cpp=model)


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
        export_gguf(model, tmp_path / "model.gguf", llama_cpp=clone)
    assert {path.name for path in tmp_path.iterdir()} == {"merged", "llama.cpp"}


def test_a_model_of_two_chat_templates_is_refused(model: Path, tmp_path: Path) -> None:
    clone = llama_cpp(tmp_path / "llama.cpp")
    settings = model / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    with pytest.raises(MergeError, match="has two chat templates that differ; "):
        export_gguf(model, tmp_path / "model.gguf", llama_cpp=clone)
    named = [{"name": "tool_use", "template": ""}, {"name": "default", "template": TEMPLATE}]
    settings.write_text(json.dumps({"chat_template": named}))
    export_gguf(model, tmp_path / "model.gguf", llama_cpp=clone)


def test_a_folder_without_a_tokenizer_is_refused(model: Path, tmp_path: Path) -> None:
    (model / "tokenizer_config.json").unlink()
    clone = llama_cpp(tmp_path / "llama.cpp")
    with pytest.raises(MergeError, match=r"merged has no tokenizer_config\.json; "):
        export_gguf(model, tmp_path / "model.gguf", llama_cpp=clone)


def test_a_file_that_is_there_is_kept(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("mine")
    with pytest.raises(MergeError, match=r"model\.gguf is there already; "):
        export_gguf(model, file, llama_cpp=llama_cpp(tmp_path / "llama.cpp"))
    assert file.read_text() == "mine"


def test_a_file_that_is_called_like_a_gguf_file_in_the_making_is_kept(
    model: Path, tmp_path: Path
) -> None:
    mine = tmp_path / "partial-model.gguf"
    mine.write_text("mine")
    export_gguf(model, tmp_path / "model.gguf", llama_cpp=llama_cpp(tmp_path / "llama.cpp"))
    assert mine.read_text() == "mine"


def test_a_folder_that_is_no_model_and_no_run_is_refused(tmp_path: Path) -> None:
    clone = llama_cpp(tmp_path / "llama.cpp")
    with pytest.raises(CheckpointError, match="holds no finished run"):
        export_gguf(tmp_path, tmp_path / "model.gguf", llama_cpp=clone)
    assert {path.name for path in tmp_path.iterdir()} == {"llama.cpp"}
