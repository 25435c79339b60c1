"""Who is refused, and that no name leads out of the folder."""

from pathlib import Path

import pytest

from finetune.studio.guard import inside, new_token, refusal

TOKEN = "right"
OWN = {"host": "127.0.0.1:8765"}


@pytest.mark.parametrize(
    "headers",
    [
        OWN,
        {"host": "localhost:8765"},
        OWN | {"origin": "http://127.0.0.1:8765"},
        OWN | {"sec-fetch-site": "same-origin"},
        OWN | {"sec-fetch-site": "none"},
    ],
)
def test_the_page_itself_and_a_typed_address_are_let_in(headers) -> None:
    assert refusal(headers, "/right/", token=TOKEN, port=8765) is None


@pytest.mark.parametrize(
    ("headers", "path", "why"),
    [
        ({}, "/right/", "Host"),
        ({"host": "evil.example:8765"}, "/right/", "Host"),
        ({"host": "127.0.0.1"}, "/right/", "Host"),
        ({"host": "127.0.0.1:8766"}, "/right/", "Host"),
        ({"host": "127.0.0.1:8765.evil.example"}, "/right/", "Host"),
        (OWN | {"origin": "http://evil.example"}, "/right/", "another site"),
        (OWN | {"origin": "null"}, "/right/", "another site"),
        (OWN | {"origin": "https://127.0.0.1:8765"}, "/right/", "another site"),
        (OWN | {"sec-fetch-site": "cross-site"}, "/right/", "another site"),
        (OWN | {"sec-fetch-site": "same-site"}, "/right/", "another site"),
        (OWN, "/", "token"),
        (OWN, "/wrong/", "token"),
        (OWN, "/rightly/", "token"),
        (OWN, "/r\u00e4ght/", "token"),
        (OWN, "//right/", "token"),
    ],
)
def test_others_are_refused(headers, path, why) -> None:
    assert why in str(refusal(headers, path, token=TOKEN, port=8765))


def test_tokens_are_long_and_differ() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 32


def test_no_name_leads_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    (folder / "a").mkdir(parents=True)
    (tmp_path / "other").mkdir()
    (folder / "link").symlink_to(tmp_path / "other")
    (folder / "near").symlink_to(folder / "a")
    assert inside(folder, "a") == (folder / "a").resolve()
    assert inside(folder, "near") == (folder / "a").resolve()
    for name in ("../other", "a/../../other", "link", "link/x", "/etc", "", ".", "a\0b"):
        assert inside(folder, name) is None, name
