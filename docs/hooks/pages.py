"""Pages of the site that are not files of docs/, and the links of all pages."""

from __future__ import annotations

import pathlib
import posixpath
import re
import sys

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]
from docs.hooks import links, markup, options, search  # noqa: E402

_NAMES = markup.known_names()
_FIRST_SCREEN = "<!-- the first screen of README.md -->"
_PICTURE = (  # below the heading
    "\n\n![The tokens of an answer, coloured by where they came from](docs/images/"
    "report_tokens.png){ .lead }\n\n"
)
_LAST = "Read on"  # the README's section that the site's navigation replaces
_LANGUAGES = {".py": "python", ".md": "markdown", ".json": "json", ".toml": "toml", ".txt": "text"}
_origins: dict[str, str] = {}  # the file of the repository that a generated page comes from


def _read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _is_file(path: str) -> bool:
    return (ROOT / path).is_file()


def readme() -> tuple[str, str]:
    """Returns the README's first screen, and its sections but for the list of documents."""
    first, *sections = re.split(r"^(?=## )", _read("README.md"), flags=re.MULTILINE)
    return first, "".join(x for x in sections if not x.startswith(f"## {_LAST}"))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages made of other files, and those of the sources that documents link to."""
    _origins.clear()
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))  # mkdocs has restored it; processes of options look here too

    def add(page: str, text: str, origin: str) -> None:
        _origins[page] = origin
        files.append(File.generated(config, page, content=text))

    add("tour.md", f"# Tour\n\n{readme()[1]}", "README.md")
    add("changelog.md", _read("CHANGELOG.md"), "CHANGELOG.md")
    add("workspace.md", _read("WORKSPACE.md"), "WORKSPACE.md")
    said = options.ask_all()
    for name in options.experiments():
        add(f"experiments/{name}.md", options.page(name, said[name]), f"experiments/{name}.py")
    add("experiments/index.md", options.index(), "experiments/index.md")
    add("reference/command_line.md", options.command_line(said), "spec_jax/__main__.py")
    texts = [
        (f"docs/{f.src_uri}", f.content_string)
        for f in files.documentation_pages()
        if f.src_uri not in _origins and f.src_uri.endswith(".md")
    ]
    texts += [(origin, _read(origin)) for origin in ("README.md", "CHANGELOG.md", "WORKSPACE.md")]
    sources = {path for origin, text in texts for path in links.found(text, origin)}
    for path in sorted(sources):
        page = links.page_of(path)
        if page.startswith("source/") and _is_file(path):
            language = _LANGUAGES.get(posixpath.splitext(path)[1], "text")
            text = f"# `{path}`\n\n````{{ .{language} linenums='1' }}\n{_read(path)}\n````\n"
            add(page, text, path)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Shows the README's first screen on the home page, and makes links to files links to pages.

    Whether the search finds a page, and how soon, is set here too.
    """
    uri = page.file.src_uri
    if uri in search.PAGES:
        page.meta["search"] = search.PAGES[uri]
    if uri.startswith("source/"):
        page.meta["search"] = {"exclude": True}
        return markdown
    own = links.rewrite(markdown, _origins.get(uri, f"docs/{uri}"), uri, _is_file)
    first = links.rewrite(readme()[0].replace("\n\n", _PICTURE, 1), "README.md", uri, _is_file)
    return markup.plain_pipes(own.replace(_FIRST_SCREEN, first))


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Draws formulas, and links names to the reference."""
    if page.file.src_uri.startswith("source/"):
        return html
    if page.file.src_uri.endswith(".ipynb"):  # its links are HTML already
        html = re.sub(r'href="([^":]+)\.(?:md|ipynb)([#"])', r'href="\1.html\2', html)
        html = markup.described(html)
    return markup.link_names(markup.formulas(markup.unsearched(html)), _NAMES)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Leaves out what would be fetched from other hosts."""
    return markup.without_mathjax(output)
