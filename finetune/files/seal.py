"""Text files that end with the SHA-256 of what is above their last line.

A recipe has the seal in a comment, which any YAML reader skips, and announces it in its first line,
so that a truncated file is detected. A JSON object has it as its last entry: truncated, it is not
JSON, and if the entry's name is damaged it still ends with a hash. A file without a seal is of an
older version, or was changed on purpose.
"""

import hashlib
import re

_YAML_HEAD = "# Written by a run, with a hash in its last line: copy it to change it.\n"
_YAML_MARK = "# SHA-256 of the lines above: "
_JSON_MARK = ',\n "sha256": "'
_JSON_HASH = re.compile(r'"[0-9a-f]{64}"\s*}\s*$')


def sealed_yaml(text: str) -> str:
    """Return YAML with its seal, as a last line."""
    content = _YAML_HEAD + text
    return f"{content}{_YAML_MARK}{_digest(content)}\n"


def has_yaml_seal(text: str) -> bool:
    """Return whether YAML has a seal, or a part of it."""
    return _YAML_MARK in text or text.startswith(_YAML_HEAD)


def is_sealed_yaml(text: str) -> bool:
    """Return whether YAML matches its seal, or has none."""
    content, _, seal = text.rpartition(_YAML_MARK)
    return not has_yaml_seal(text) or seal == f"{_digest(content)}\n"


def sealed_json(text: str) -> str:
    """Return a JSON object, written over several lines, with its seal as its last entry."""
    content = text.rstrip().removesuffix("\n}")
    return f'{content}{_JSON_MARK}{_digest(content)}"\n}}\n'


def is_sealed_json(text: str) -> bool:
    """Return whether a JSON object matches its seal, or has none."""
    content, mark, seal = text.rpartition(_JSON_MARK)
    has_seal = mark or _JSON_HASH.search(text)
    return not has_seal or seal == f'{_digest(content)}"\n}}\n'


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
