"""Takes a picture of a run's report.html in a browser, such as those that the documents show.

    PYTHONPATH=tests python -m support.page_picture RUN/report.html docs/images/report.png
    PYTHONPATH=tests python -m support.page_picture RUN/report.html OTHER.png --tokens=4,17

The first one shows the top of the page. The second one shows where the tokens came from: those of
row 4 of the strips, with what the target thought of token 17, both counted from 0.
"""

from __future__ import annotations

import argparse
import pathlib
import tempfile
from collections.abc import Sequence

from support.browser import browse

WIDTH = 1240
_TOKENS = """
for (const part of document.querySelectorAll("header, nav, main > :not(#tokens)")) {
  part.remove();
}
const press = (element, key) => element.dispatchEvent(
  new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }));
document.querySelectorAll("#tv-cells [aria-checked]")[ROW].click();
const text = document.getElementById("tv-text");
press(text, "Home");
for (let i = 0; i < TOKEN; i++) press(text, "ArrowRight");
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", type=pathlib.Path)
    parser.add_argument("picture", type=pathlib.Path)
    parser.add_argument("--height", type=int, default=1120, help="in pixels")
    parser.add_argument("--tokens", metavar="ROW,TOKEN", help="shows the tokens alone")
    args = parser.parse_args(arguments)
    text = args.page.read_text(encoding="utf-8")
    if args.tokens:
        row, token = map(int, args.tokens.split(","))
        script = _TOKENS.replace("ROW", str(row)).replace("TOKEN", str(token))
        text = text.replace("</body>", f"<script>{script}</script></body>")
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder) / "page.html"
        copy.write_text(text, encoding="utf-8")
        browse(
            copy.as_uri(),
            pathlib.Path(folder) / "home",
            f"--window-size={WIDTH},{args.height}",
            "--hide-scrollbars",
            f"--screenshot={args.picture.resolve()}",
        )


if __name__ == "__main__":
    main()
