"""The static page, built and opened: it plans in the browser what the command plans."""

from pathlib import Path

import pytest

from tests.bench.bench_studio import compared, website
from tests.studios import browser
from tests.tools.site import write_site


@pytest.mark.browser
@pytest.mark.network
def test_the_static_page_plans_what_the_command_plans(tmp_path: Path) -> None:
    with browser() as started:
        write_site(tmp_path / "site")
        page = started.new_page()
        problems: list[str] = []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        with website(tmp_path / "site") as address:
            loaded: list[str] = []
            page.on("request", lambda request: loaded.append(request.url))
            page.goto(address)
            page.wait_for_selector("#headline.good", timeout=120_000)
            assert compared(page, 4).startswith("4 plans equal")
        assert not problems
        own = (address, "data:", "blob:")
        assert [url for url in loaded if not url.startswith(own)] == []
