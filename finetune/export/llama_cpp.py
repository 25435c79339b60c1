"""The two programs of llama.cpp that make GGUF files: where they are, or how to get them.

No package holds them. A folder that is named, by `--llama-cpp` or by SLUICE_LLAMA_CPP, is a clone
of the repository or an unpacked release, and is looked into alone. Otherwise the PATH comes first,
then the folders where clones usually are.

The converter writes four of the forms itself. The others are made of its file by the quantiser.
Those that lose a model without an importance matrix (iq1, iq2, iq3) are left out.

Source: llama.cpp's convert_hf_to_gguf.py (`--outtype`) and tools/quantize/quantize.cpp
(QUANT_OPTIONS), at 0c1e5709.
"""

import difflib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from finetune.env import LLAMA_CPP, llama_cpp_dir
from finetune.errors import ConfigError, MergeError

CONVERTER, QUANTIZER = "convert_hf_to_gguf.py", "llama-quantize"
CONVERTED = ("f32", "f16", "bf16", "q8_0")
QUANTIZED = (
    *("q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0"),
    *("iq4_nl", "iq4_xs", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k", "q2_k_s"),
)
_REPOSITORY = "https://github.com/ggml-org/llama.cpp"
INSTALL = (
    f"`git clone --depth 1 {_REPOSITORY} && python -m venv llama.cpp/.venv"
    " && llama.cpp/.venv/bin/pip install"
    " -r llama.cpp/requirements/requirements-convert_hf_to_gguf.txt`,"
    " then `--llama-cpp llama.cpp`"
)
_BUILD = (
    "`cmake -S llama.cpp -B llama.cpp/build && cmake --build llama.cpp/build --target"
    f" {QUANTIZER}`, then `--llama-cpp llama.cpp`; or `--gguf q8_0`, which needs the converter"
    " alone"
)
_BUILT = ("build/bin", "bin", ".")  # where a build, an installation or a release has programs


@dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """What makes a GGUF file of some form."""

    form: str  # the form of the weights, in small letters
    converter: tuple[str, ...]  # the command that converts
    quantizer: str | None  # the program that quantises; None if the converter writes the form

    @property
    def outtype(self) -> str:
        """What the converter is to write: the form, or 16 bits to be quantised."""
        return self.form if self.quantizer is None else "auto"


def programs_for(form: str, llama_cpp: Path | None) -> Programs:
    """Return the programs that make a form.

    Args:
        form: Its name, as llama.cpp has it.
        llama_cpp: The folder to look into; None looks where they usually are.

    Raises:
        ConfigError: No form has this name.
        MergeError: One of the programs is not there.
    """
    name = form.lower()
    if name not in (*CONVERTED, *QUANTIZED):
        forms = (*CONVERTED, *QUANTIZED)
        near = [one for one in forms if one.startswith(name) and one.endswith("k_m")]
        near += difflib.get_close_matches(name, forms, n=1) or ["q4_k_m"]
        is_file = name.endswith(".gguf")
        raise ConfigError(
            f"--gguf {form}",
            limit=f"it is the form of the weights: {', '.join(forms)}",
            hint=f"`--gguf q4_k_m --out {form}`" if is_file else f"`--gguf {near[0]}`",
        )
    llama_cpp = llama_cpp or llama_cpp_dir()
    converter = _converter(llama_cpp)
    return Programs(
        form=name,
        converter=converter,
        quantizer=None if name in CONVERTED else _quantizer(llama_cpp, near=converter[-1]),
    )


def _folders() -> Iterator[Path]:
    yield from (Path("llama.cpp"), Path.home() / "llama.cpp", Path("/opt/llama.cpp"))


def _converter(llama_cpp: Path | None) -> tuple[str, ...]:
    """Return the command that runs the converter; a clone's `.venv` runs it if there is one."""
    if llama_cpp is None and (found := shutil.which(CONVERTER)) is not None:
        return (found,)
    for folder in _folders() if llama_cpp is None else (llama_cpp,):
        script, own_python = folder / CONVERTER, folder / ".venv" / "bin" / "python"
        if script.is_file():
            return (str(own_python) if own_python.exists() else sys.executable, str(script))
    if llama_cpp is None:
        raise MergeError(
            f"{CONVERTER} is not on the PATH",
            limit=f"llama.cpp's converter makes GGUF files; {LLAMA_CPP} is not set, and no clone is"
            f" at {', '.join(map(str, _folders()))}",
            hint=INSTALL,
        )
    raise MergeError(
        f"{llama_cpp} holds no {CONVERTER}", limit="it must be a clone of llama.cpp", hint=INSTALL
    )


def _quantizer(llama_cpp: Path | None, *, near: str) -> str:
    """Return the program that quantises.

    Args:
        llama_cpp: The folder to look into; None looks where it usually is.
        near: The converter, next to whose folder a build may be.
    """
    clone = Path(near).parent
    folders = (clone, *_folders()) if llama_cpp is None else (llama_cpp,)
    for folder in folders:
        for place in _BUILT:
            if (file := folder / place / QUANTIZER).is_file():
                return str(file)
    if found := shutil.which(QUANTIZER):
        return found
    raise MergeError(
        f"{QUANTIZER} is neither on the PATH nor built in {folders[0]}",
        limit="llama.cpp's quantiser makes all forms but f32, f16, bf16 and q8_0",
        hint=_BUILD,
    )
