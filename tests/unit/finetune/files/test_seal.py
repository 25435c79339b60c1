import json
from typing import Any

import pytest
import yaml

from finetune.files.manifest import is_sealed_json, is_sealed_yaml, sealed_json, sealed_yaml

YAML = "train:\n  lr: 0.1\n  steps: 6\nreport:\n  samples: 4\n"
VALUES = {"loss": 0.25, "rows": [1, 2]}


def test_sealed_files_say_what_they_said() -> None:
    assert yaml.safe_load(sealed_yaml(YAML)) == yaml.safe_load(YAML)
    found = json.loads(sealed_json(json.dumps(VALUES, indent=1)))
    assert {name: found[name] for name in VALUES} == VALUES


def test_files_of_older_versions_have_no_seal() -> None:
    assert is_sealed_yaml(YAML)
    assert is_sealed_json(json.dumps(VALUES))


def test_yaml_that_is_cut_off_is_not_as_it_was_sealed() -> None:
    sealed = sealed_yaml(YAML)
    assert is_sealed_yaml(sealed)
    for num_kept in range(len(sealed)):
        left = sealed[:num_kept]
        assert not is_sealed_yaml(left) or not yaml.safe_load(left)


@pytest.mark.parametrize("bit", range(7))
def test_a_flipped_bit_is_seen_or_changes_nothing(bit: int) -> None:
    sealed = sealed_yaml(YAML)
    for at in range(len(sealed)):
        changed = sealed[:at] + chr(ord(sealed[at]) ^ (1 << bit)) + sealed[at + 1 :]
        assert not is_sealed_yaml(changed) or read_yaml(changed) in (None, yaml.safe_load(YAML))
    content = sealed_json(json.dumps(VALUES, indent=1))
    for at in range(len(content)):
        changed = content[:at] + chr(ord(content[at]) ^ (1 << bit)) + content[at + 1 :]
        assert not is_sealed_json(changed) or read_json(changed) in (None, json.loads(content))


def read_yaml(text: str) -> object:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return None


def read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
