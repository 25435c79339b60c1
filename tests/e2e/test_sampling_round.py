"""The guide's round of GRPO: its script against a server, and the rows that it writes."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from finetune.data.dataset import load_rows
from finetune.recipe.sections import DataSection
from tests.doubles import tiny_tokenizer

GUIDE = Path(__file__).parents[2] / "docs/guides/preferences.md"
ASKED: list[dict[str, object]] = []
LOCK = threading.Lock()


class Server(BaseHTTPRequestHandler):
    """Answers in capitals every other time, and now and then with what no row may hold."""

    def do_POST(self) -> None:
        assert self.path == "/v1/chat/completions"
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with LOCK:
            number = len(ASKED)
            ASKED.append(asked)
        prompt = asked["messages"][0]["content"]
        answer = "YES" if number % 2 and prompt != "dull" else f"no {number}"
        reason = "length" if number % 8 == 3 else "stop"
        if number % 8 == 5:
            answer = " "
        message = {"role": "assistant", "content": answer}
        said = json.dumps({"choices": [{"message": message, "finish_reason": reason}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@contextmanager
def served() -> Iterator[str]:
    """Run the server on a free port of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Server) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_the_guides_script_writes_rows_that_are_read(tmp_path: Path) -> None:
    ASKED.clear()
    (script,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), flags=re.M | re.S)
    prompts, rows = tmp_path / "prompts.txt", tmp_path / "round.jsonl"
    prompts.write_text("first\ndull\nlast\n")
    with served() as url:
        for shown, used in (
            ('"http://127.0.0.1:8000"', repr(url)),
            ('Path("prompts.txt")', f"Path({str(prompts)!r})"),
            ('Path("round.jsonl")', f"Path({str(rows)!r})"),
        ):
            assert script.count(shown) == 1
            script = script.replace(shown, used)
        exec(compile(script, str(GUIDE), "exec"), {})
    assert [one["model"] for one in ASKED] == ["policy"] * 24
    assert {one["temperature"] for one in ASKED} == {1.0}
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["prompt"] for row in written] == ["first", "last"]  # "dull" had equal rewards
    for row in written:
        assert len(row["completions"]) == 6  # of 8: one was cut, one was empty
        assert row["rewards"] == [float(answer == "YES") for answer in row["completions"]]
    found = load_rows(
        DataSection(path=str(rows)),
        tiny_tokenizer(),
        seq_len=64,
        seed=0,
        cache_dir=tmp_path / "cache",
        formats=("sampled",),
    )
    values = [one.value for one in found.train]
    assert values == [value for row in written for value in row["rewards"]]
