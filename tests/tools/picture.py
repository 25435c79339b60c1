"""Takes the README's picture: the page of `sluice studio` as it opens. It takes chromium.

python -m tests.tools.picture
"""

import tempfile
from pathlib import Path

from finetune.recipe.recipe import recipes_dir
from tests.studios import browser, served

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "plan.png"
WIDTH, HEIGHT = 1280, 900


def main() -> None:
    """Write the picture."""
    PICTURE.parent.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        served(Path(folder), recipes_dir() / "shapes") as studio,
        browser() as started,
    ):
        page = started.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(f"http://127.0.0.1:{studio.port}/{studio.token}/")
        page.wait_for_selector("body[data-complete]", state="attached", timeout=120_000)
        page.screenshot(path=PICTURE)


if __name__ == "__main__":
    main()
