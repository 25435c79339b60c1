import os
from pathlib import Path

import pytest
from pydantic import BaseModel

from finetune.errors import ModelError
from finetune.files.atomic import JsonFile


class Pair(BaseModel):
    number: int
    words: list[str] = []


PAIR = JsonFile(holds=Pair, error=ModelError, limit="it holds a pair", hint="write it again")


def refusal(file: Path) -> str:
    with pytest.raises(ModelError) as caught:
        PAIR.read(file)
    assert (caught.value.limit, caught.value.hint) == ("it holds a pair", "write it again")
    assert len(caught.value.what) < 400 + len(str(file))
    assert caught.value.what.startswith(f"{file} cannot be read: ")
    return caught.value.what.removeprefix(f"{file} cannot be read: ")


def test_what_is_read_is_what_was_written_and_more(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"number": 1, "later": [1]}')
    assert PAIR.read(file) == {"number": 1, "later": [1]}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "it is not JSON: Expecting value"),
        (b'{"number": 1', "it is not JSON: Expecting"),
        (b"\xff\xfe\x00", "it is not JSON: "),
        ('{"number": 1}'.encode("utf-16"), "it is not JSON: 'utf-8' codec can't decode"),
        (b"[" * 100_000, "it is not JSON: maximum recursion depth"),
        (b'{"number": ' + b"9" * 5000 + b"}", "it is not JSON: Exceeds the limit"),
        (b"[]", "it holds [], and should be an object"),
        (b"{}", "number is missing"),
        (b'{"number": "1"}', 'number is "1", and should be a valid integer'),
        (b'{"number": true}', "number is true, and should be a valid integer"),
        (b'{"number": 1, "words": ["a", 2]}', "words.1 is 2, and should be a valid string"),
        (b'{"number": 1, "words": "' + b"a" * 9999 + b'"}', "words is "),
    ],
)
def test_what_is_wrong_is_named_with_its_place(content: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(content)
    assert refusal(file).startswith(why)


def test_what_is_no_plain_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    folder, pipe, link = tmp_path / "folder", tmp_path / "pipe", tmp_path / "link"
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to("link")
    assert refusal(folder) == refusal(pipe) == refusal(Path("/dev/zero")) == "it is no file"
    assert refusal(tmp_path / "none") == "No such file or directory"
    assert refusal(link) == "Too many levels of symbolic links"


def test_a_file_too_large_to_be_one_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    with file.open("wb") as stream:
        stream.truncate(2**31)
    assert refusal(file) == "it has 2,147,483,648 bytes"
