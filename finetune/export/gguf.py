"""Turns a model into one GGUF file, by llama.cpp's own converter.

Only llama.cpp's `convert_hf_to_gguf.py` knows the tensor names of each architecture in a GGUF file;
the `gguf` package reads and writes files and converts no model. So the converter is run as a
program, and its output is checked: a file without the chat template answers with gibberish and
gives no warning.

Its requirements pin transformers 4.57, which lacks the class that transformers 5 names for a plain
fast tokenizer, and accepts no list for `extra_special_tokens`. So it gets a copy of the folder,
with linked weights, whose tokenizer_config.json says the same in a form that both versions read.
The converter also refuses every tokenizer whose pre-tokenisation it does not know. This is tested,
with config and tokenizer alone, before anything is merged.
"""

import json
import mmap
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from finetune.data.chat_template import server_flags, template_kwargs_in
from finetune.errors import MergeError
from finetune.export.merge import (
    TOKENIZER_CONFIG,
    TOKENIZER_SETTINGS,
    Progress,
    base_and_tokenizer,
    copy_companions,
    merge_run,
    write_config,
)
from finetune.files.atomic import flush, require_free, workspace
from finetune.files.shards import INDEX, SINGLE

CONVERTER = "convert_hf_to_gguf.py"
_REPOSITORY = "https://github.com/ggml-org/llama.cpp"
_INSTALL = (
    f"`git clone --depth 1 {_REPOSITORY} && python -m venv llama.cpp/.venv"
    " && llama.cpp/.venv/bin/pip install"
    " -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt`,"
    " then `--llama-cpp llama.cpp`"
)
_MAGIC = b"GGUF"
# What the converter says when it fails -> the limit and the hint of our error.
_REFUSALS = (
    (
        "pre-tokenizer was not recognized",
        "llama.cpp splits text by rules of its own for each tokenizer, and has none for this one",
        "`sluice merge RUN_DIR --out DIR` writes what transformers and vLLM serve; a newer"
        " llama.cpp may know the tokenizer",
    ),
    (
        "Tokenizer class",
        "the transformers that it runs with must have the tokenizer's class",
        f"a newer llama.cpp with its own packages: {_INSTALL}",
    ),
    (
        "No module named",
        "it runs with packages of its own",
        _INSTALL,
    ),
    (
        "is not supported",
        "it converts the architectures that it has code for",
        f"a newer llama.cpp: {_INSTALL}",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A GGUF file."""

    file: Path  # where it is
    num_bytes: int  # its size
    notes: tuple[str, ...]  # what the user should know about it


def export_gguf(
    source: Path, file: Path, *, llama_cpp: Path | None = None, progress: Progress | None = None
) -> Exported:
    """Write a model as a GGUF file, chat template and all.

    Args:
        source: A finished run, which is first merged next to the file, or a merged model.
        file: A file that does not exist yet.
        llama_cpp: A clone of llama.cpp, whose own `.venv` is used if it has one; None uses the
            converter on the PATH.
        progress: Called with the progress of the merge.

    Raises:
        CheckpointError: `source` is neither a model nor a finished run.
        MergeError: There is no converter, it fails, or its output is not complete.
        ModelError: See `merge`.
    """
    require_free(file)
    command = find_converter(llama_cpp)
    with workspace(file) as work:
        _require_known(command, source, work)
        folder, notes = _model_of(source, work, progress)
        (work / "whole").mkdir()
        copy = readable_copy(folder, work / "whole" / folder.resolve().name)
        made = work / file.name
        _convert([*command, str(copy), "--outfile", str(made)], made, _template(folder))
        flush(made)
        require_free(file)
        made.rename(file)
        kwargs = template_kwargs_in(folder)
        notes += _tower_notes(folder, file)
    notes += server_flags(kwargs, file=str(file), programs=("llama.cpp", "Ollama"))
    return Exported(file=file, num_bytes=file.stat().st_size, notes=notes)


def find_converter(llama_cpp: Path | None) -> list[str]:
    """Return the command that runs llama.cpp's converter.

    Raises:
        MergeError: It is not there.
    """
    if llama_cpp is None:
        found = shutil.which(CONVERTER)
        if found is not None:
            return [found]
        raise MergeError(
            f"{CONVERTER} is not on the PATH",
            limit="llama.cpp's converter makes GGUF files; no package holds it",
            hint=_INSTALL,
        )
    script = llama_cpp / CONVERTER
    if not script.is_file():
        raise MergeError(
            f"{llama_cpp} holds no {CONVERTER}",
            limit="it must be a clone of llama.cpp",
            hint=_INSTALL,
        )
    own_python = llama_cpp / ".venv" / "bin" / "python"
    return [str(own_python) if own_python.exists() else sys.executable, str(script)]


def readable_copy(folder: Path, copy: Path) -> Path:
    """Link a model's files into a new folder; its tokenizer is one that transformers 4.57 reads.

    Args:
        folder: The model, which is left unchanged.
        copy: The folder to make.
    """
    copy.mkdir()
    for entry in folder.iterdir():
        (copy / entry.name).symlink_to(entry.resolve())
    settings = copy / TOKENIZER_CONFIG
    fields = TOKENIZER_SETTINGS.read(settings)
    if fields.get("tokenizer_class") == "TokenizersBackend" and (copy / "tokenizer.json").exists():
        fields["tokenizer_class"] = "PreTrainedTokenizerFast"  # one class under two names
    if isinstance(fields.get("extra_special_tokens"), list):
        tokens = [*fields.pop("additional_special_tokens", ()), *fields.pop("extra_special_tokens")]
        fields["additional_special_tokens"] = tokens
    settings.unlink()
    settings.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n")
    return copy


def _require_known(command: Sequence[str], source: Path, work: Path) -> None:
    """Have the converter write the vocabulary alone, from all files but the weights.

    A failure for a reason that is not listed, such as missing weights, is ignored here: the
    conversion itself will show whether it matters.

    Args:
        command: The converter.
        source: A run or a merged model.
        work: A folder for temporary files.

    Raises:
        MergeError: It does not know the tokenizer or the architecture, or lacks its packages.
    """
    bare = work / "bare"
    bare.mkdir()
    if _is_model(source):
        _template(source)
        copy_companions(source, source, bare)
    else:
        base, tokenizer = base_and_tokenizer(source)
        copy_companions(base, tokenizer, bare)
        write_config(base, bare, is_untied=False)
        _template(bare, named=tokenizer)
    copy = readable_copy(bare, work / "vocabulary")
    tried = subprocess.run(
        [*command, str(copy), "--vocab-only", "--outfile", str(work / "vocabulary.gguf")],
        check=False,
        capture_output=True,
        text=True,
        errors="replace",
    )
    lines = [line.strip() for line in (tried.stdout + tried.stderr).splitlines() if line.strip()]
    for mark, limit, hint in _REFUSALS:
        said = next((line for line in reversed(lines) if mark in line), None)
        if tried.returncode != 0 and said is not None:
            raise MergeError(f"{CONVERTER} refuses {source}: {said}", limit=limit, hint=hint)


def _model_of(source: Path, work: Path, progress: Progress | None) -> tuple[Path, tuple[str, ...]]:
    """Return a folder with a model, and notes; that of a run is made inside `work`."""
    if _is_model(source):
        return source, ()
    merged = merge_run(source, work / "merged" / source.resolve().name, progress=progress)
    return merged.folder, merged.notes


def _tower_notes(folder: Path, file: Path) -> tuple[str, ...]:
    """Return how the towers of a model come into the file of their own that llama.cpp wants.

    Source: llama.cpp's tools/mtmd/README.md; its converter leaves towers out without `--mmproj`,
    and those of Mistral whose names begin with `model.` with it too (ggml-org/llama.cpp#24235).
    """
    fields = json.loads((folder / "config.json").read_text())
    if not {"vision_config", "audio_config"} & fields.keys():
        return ()
    return (
        f"{file.name} holds the text model. Its images or sound need a second file, of the towers"
        f" that training left as in the base: `{CONVERTER} BASE_DIR --mmproj --outfile"
        f" mmproj-{file.name}`, then `llama-server -m {file.name} --mmproj mmproj-{file.name}`",
    )


def _is_model(source: Path) -> bool:
    return (source / INDEX).exists() or (source / SINGLE).exists()


def _template(folder: Path, *, named: Path | None = None) -> str | None:
    """Return the chat template of a model, None if it has none.

    Args:
        folder: Of the model.
        named: Its name in errors, if not its own.

    Raises:
        MergeError: The folder lacks what the converter reads, or says two different things.
    """
    settings = folder / TOKENIZER_CONFIG
    for file in (folder / "config.json", settings):
        if not file.exists():
            raise MergeError(
                f"{named or folder} has no {file.name}",
                limit="the converter reads the model's config and its tokenizer's",
                hint=f"copy {file.name} from the base model",
            )
    own = TOKENIZER_SETTINGS.read(settings).get("chat_template")
    jinja = folder / "chat_template.jinja"
    if not jinja.exists():
        return _default(own)
    try:
        template = jinja.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MergeError(
            f"{jinja} is no text: {error}",
            limit="a chat template is UTF-8",
            hint="restore it from a copy",
        ) from error
    if own is not None and _default(own) != template:
        raise MergeError(
            f"{named or folder} has two chat templates that differ",
            limit=f"transformers follows {jinja.name} and the converter {settings.name}",
            hint=f"remove `chat_template` from {(named or folder) / settings.name}",
        )
    return template


def _default(templates: str | Sequence[dict[str, str]] | None) -> str | None:
    """Return the default template, of one or of several with names."""
    if templates is None or isinstance(templates, str):
        return templates
    return next((t["template"] for t in templates if t["name"] == "default"), None)


def _convert(command: Sequence[str], made: Path, template: str | None) -> None:
    """Run the converter and check its output.

    Raises:
        MergeError: It failed, or made no GGUF file, or one without the template.
    """
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise MergeError(
            f"{CONVERTER} ended with {code}",
            limit="it must know the architecture and find its packages; its own words are above",
            hint=f"a newer llama.cpp with its own packages: {_INSTALL}",
        )
    if not made.exists() or made.stat().st_size == 0:
        raise MergeError(
            f"{CONVERTER} wrote no {made.name}",
            limit="it was given the file to write as --outfile",
            hint=f"a newer llama.cpp: {_INSTALL}",
        )
    with made.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        is_gguf = content[: len(_MAGIC)] == _MAGIC
        has_template = template is None or content.find(template.encode()) >= 0
    if not (is_gguf and has_template):
        problem = "lacks the model's chat template" if is_gguf else "is no GGUF file"
        raise MergeError(
            f"what {CONVERTER} wrote {problem}",
            limit="the file must answer in the form that was trained",
            hint=f"a newer llama.cpp: {_INSTALL}",
        )
