"""`export`: a run or a merged model as a GGUF file, and what answers with it."""

from pathlib import Path

from finetune.data.chat_template import serving
from finetune.export.gguf import Exported, export_gguf, require_source
from finetune.export.llama_cpp import programs_for
from finetune.export.ollama import MODELFILE, export_ollama
from finetune.report.screen import Working


def exported(
    source: Path,
    form: str,
    *,
    out: Path | None,
    llama_cpp: Path | None,
    is_for_ollama: bool,
    working: Working,
) -> tuple[str, ...]:
    """Write a model as a GGUF file, and return what there is to say of it.

    Args:
        source: A finished run, or a merged model.
        form: The form of the weights, as llama.cpp names it.
        out: The file to write, or the folder for Ollama; None names it after the source.
        llama_cpp: The folder of llama.cpp; None looks where it usually is.
        is_for_ollama: Whether a Modelfile is written too.
        working: Shows the progress of a merge.

    Raises:
        SluiceError: See `require_source`, `programs_for` and `export_gguf`.
    """
    require_source(source)
    programs = programs_for(form, llama_cpp)
    folder = source.resolve()
    name = folder.parent.name if folder.name == "model" else folder.name
    file_name = f"{name}-{programs.form}.gguf"
    with working("Writing weights", "bytes") as progress:
        if is_for_ollama:
            to = out or Path(f"{name}-ollama")
            made = export_ollama(source, to, file_name, programs, progress=progress)
        else:
            made = export_gguf(source, out or Path(file_name), programs, progress=progress)
    answering = served_by(made, name=name, is_for_ollama=is_for_ollama)
    return (*made.notes, f"GGUF: {made.file}", *answering)


def served_by(exported: Exported, *, name: str, is_for_ollama: bool) -> tuple[str, ...]:
    """Return the commands that answer with a GGUF file.

    Source: lmstudio.ai/docs/advanced/sideload, read in 2026.

    Args:
        exported: The file.
        name: The name that the model gets.
        is_for_ollama: Whether a Modelfile is next to it.
    """
    file, kwargs = exported.file, exported.template_kwargs
    lines = serving(kwargs, file=str(file), name=name, programs=("llama.cpp", "Ollama"))
    llama, ollama = lines
    if is_for_ollama:
        program, _, run = ollama.partition(" ")
        ollama = f"{program} `ollama create {name} -f {file.parent / MODELFILE}`, then {run}"
    studio = f"LM Studio: `lms import {file}`, or the file in ~/.lmstudio/models/sluice/{name}/"
    return (llama, *((ollama,) if is_for_ollama else ()), studio)
