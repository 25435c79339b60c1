"""Turns a model into one GGUF file, by llama.cpp's own converter and quantiser.

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
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.data.chat_template import template_kwargs_in
from finetune.errors import MergeError
from finetune.export.llama_cpp import CONVERTER, INSTALL, QUANTIZER, Programs
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
from finetune.run.run_dir import RunDir

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
        f"a newer llama.cpp with its own packages: {INSTALL}",
    ),
    (
        "No module named",
        "it runs with packages of its own",
        INSTALL,
    ),
    (
        "is not supported",
        "it converts the architectures that it has code for",
        f"a newer llama.cpp: {INSTALL}",
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A GGUF file."""

    file: Path  # where it is
    num_bytes: int  # its size
    notes: tuple[str, ...]  # what the user should know about it
    template_kwargs: Mapping[str, bool]  # what a server must give the chat template


def require_source(source: Path) -> None:
    """Refuse what is neither a model nor a finished run.

    Raises:
        CheckpointError: It is neither, or the run has trained the model's own weights.
    """
    if not _is_model(source):
        RunDir(source).require_adapter()


def export_gguf(
    source: Path, file: Path, programs: Programs, *, progress: Progress | None = None
) -> Exported:
    """Write a model as a GGUF file, chat template and all.

    Args:
        source: A finished run, which is first merged next to the file, or a merged model.
        file: A file that does not exist yet.
        programs: Programs of llama.cpp for the form of its weights.
        progress: Called with the progress of the merge.

    Raises:
        CheckpointError: `source` is neither a model nor a finished run.
        MergeError: A program fails, or its output is not complete.
        ModelError: See `merge`.
    """
    require_free(file)
    with workspace(file) as work:
        made, _ = convert(source, work, file.name, programs, progress=progress)
        require_free(file)
        made.file.rename(file)
    return replace(made, file=file)


def convert(
    source: Path, work: Path, name: str, programs: Programs, *, progress: Progress | None
) -> tuple[Exported, Path]:
    """Make a GGUF file in a folder for temporary files; see `export_gguf`.

    Args:
        source: A finished run or a merged model.
        work: The folder, in which a run is also merged.
        name: The name of the file.
        programs: Programs of llama.cpp for the form of its weights.
        progress: Called with the progress of the merge.

    Returns:
        The file, and the folder of its model, which is in `work` too if a run was merged.
    """
    _require_known(programs.converter, source, work)
    folder, notes = _model_of(source, work, progress)
    (work / "whole").mkdir()
    copy = readable_copy(folder, work / "whole" / folder.resolve().name)
    made, template = work / name, _template(folder)
    first = made if programs.quantizer is None else work / "first.gguf"
    options = ("--outtype", programs.outtype, "--outfile", str(first))
    _make(CONVERTER, [*programs.converter, str(copy), *options], first, template)
    if programs.quantizer is not None:
        command = [programs.quantizer, str(first), str(made), programs.form.upper()]
        _make(QUANTIZER, command, made, template)
        first.unlink()
    flush(made)
    exported = Exported(
        file=made,
        num_bytes=made.stat().st_size,
        notes=notes + _tower_notes(folder, name),
        template_kwargs=template_kwargs_in(folder),
    )
    return exported, folder


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


def _tower_notes(folder: Path, name: str) -> tuple[str, ...]:
    """Return how the towers of a model come into the file of their own that llama.cpp wants.

    Source: llama.cpp's tools/mtmd/README.md; its converter leaves towers out without `--mmproj`,
    and those of Mistral whose names begin with `model.` with it too (ggml-org/llama.cpp#24235).
    """
    fields = json.loads((folder / "config.json").read_text())
    if not {"vision_config", "audio_config"} & fields.keys():
        return ()
    return (
        f"{name} holds the text model. Its images or sound need a second file, of the towers"
        f" that training left as in the base: `{CONVERTER} BASE_DIR --mmproj --outfile"
        f" mmproj-{name}`, then `llama-server -m {name} --mmproj mmproj-{name}`",
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


def _make(program: str, command: Sequence[str], made: Path, template: str | None) -> None:
    """Run a program and check the file that it makes.

    Raises:
        MergeError: It failed, or made no GGUF file, or one without the template.
    """
    code = subprocess.run(command, check=False).returncode
    if code != 0:
        raise MergeError(
            f"{program} ended with {code}",
            limit="it must know the architecture and find its packages; its own words are above",
            hint=f"a newer llama.cpp with its own packages: {INSTALL}",
        )
    if not made.exists() or made.stat().st_size == 0:
        raise MergeError(
            f"{program} wrote no {made.name}",
            limit="it was given the file to write",
            hint=f"a newer llama.cpp: {INSTALL}",
        )
    with made.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        is_gguf = content[: len(_MAGIC)] == _MAGIC
        has_template = template is None or content.find(template.encode()) >= 0
    if not (is_gguf and has_template):
        problem = "lacks the model's chat template" if is_gguf else "is no GGUF file"
        raise MergeError(
            f"what {program} wrote {problem}",
            limit="the file must answer in the form that was trained",
            hint=f"a newer llama.cpp: {INSTALL}",
        )
