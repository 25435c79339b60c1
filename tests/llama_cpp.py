"""A clone of llama.cpp whose programs write down what they were given."""

import stat
import sys
from pathlib import Path

from finetune.export.llama_cpp import CONVERTER, QUANTIZER

# Writes down what it was given, and a file as a converter would; MODE is what goes wrong.
FAKE = """
import json, sys
from pathlib import Path
folder, *options, outfile = sys.argv[1:]
here = Path(__file__).parent
settings = json.loads((Path(folder) / "tokenizer_config.json").read_text())
if "--vocab-only" in options:
    names = sorted(file.name for file in Path(folder).iterdir())
    (here / "vocabulary.json").write_text(json.dumps([settings, names]))
    if MODE.startswith("refuses"):
        sys.exit(f"Traceback ...\\n{MODE}\\n")
    sys.exit(MODE == "wants weights")
(here / "seen.json").write_text(json.dumps([sys.executable, folder, options, sorted(
    file.name for file in Path(folder).iterdir()), settings]))
if MODE == "fails":
    sys.exit("a tensor has no name")
template = (Path(folder) / "chat_template.jinja").read_bytes()
content = {"lacks": b"GGUF\\3", "other": b"ggjt" + template}.get(MODE, b"GGUF\\3" + template)
if MODE != "writes nothing":
    Path(outfile).write_bytes(content + b"weights")
"""
# Stands in for the converter: writes the arguments that it got.
QUANTIZES = """#!{python}
import sys
from pathlib import Path
plain, made, form = sys.argv[1:]
content = Path(plain).read_bytes() + form.encode()
Path(made).write_bytes(content if {works} else b"GGUF")
"""


def llama_cpp(folder: Path, mode: str = "works", *, python: str = "") -> Path:
    folder.mkdir()
    shebang = f"#!{python}\n" if python else ""
    script = folder / CONVERTER
    script.write_text(f"{shebang}MODE = {mode!r}\n{FAKE}")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return folder


def with_quantizer(clone: Path, *, works: bool = True) -> Path:
    program = clone / "build" / "bin" / QUANTIZER
    program.parent.mkdir(parents=True)
    program.write_text(QUANTIZES.format(python=sys.executable, works=works))
    program.chmod(0o755)
    return clone
