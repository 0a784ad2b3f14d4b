"""The Python of the documents runs, block after block, as a reader would type it."""

import ast
import pathlib
import re

import pytest
from conformance.rounds import run_of

import spec_jax
from spec_jax.config import METHODS
from spec_jax.drafters import registry

ROOT = pathlib.Path(__file__).resolve().parents[1]
CERTIFIED = ("README.md", "docs/write_a_drafter.md", "docs/write_a_rule.md")  # they certify, too
PAGES = (
    *CERTIFIED,
    "docs/audit.md",
    "docs/bring_a_model.md",
    "docs/decode.md",
    "docs/evaluate.md",
    "docs/observe.md",
    "docs/processors.md",
    "docs/scale.md",
    "docs/write_a_family.md",
)


def blocks(name):
    """The python blocks of a document, each after as many empty lines as stand before it."""
    text = (ROOT / name).read_text(encoding="utf-8")
    found = list(re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE))
    assert found, f"{name} has no python block"
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


def anchors(file):
    """The anchors of a document's headings, as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    kept = (re.sub(r"[^\w\- ]", "", re.sub(r"\]\([^)]*\)", "", line).lower()) for line in lines)
    return {line.strip().replace(" ", "-") for line in kept}


def run(name, trees):
    """Runs the blocks in one namespace; a traceback shows the document's own lines."""
    namespace = {"__name__": "document"}
    for tree in trees:
        exec(compile(tree, str(ROOT / name), "exec"), namespace)


@pytest.fixture
def forget_kinds():
    before = set(METHODS)
    yield
    for name in set(METHODS) - before:
        registry.unregister(name)


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_imports_exists(name):
    trees = [ast.parse(block) for block in blocks(name)]
    for tree in trees:
        tree.body = [x for x in tree.body if isinstance(x, ast.Import | ast.ImportFrom)]
    run(name, trees)


def certify_in_part(rule):
    """A certificate of rounds of two drafts; docs/write_a_rule.md certifies such a rule whole."""
    part = run_of(rule)
    part._enumerate(part.main, 2)
    return part.certificate(None)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", PAGES)
def test_a_page_runs(name, capsys, forget_kinds, monkeypatch):
    if name == "README.md":
        monkeypatch.setattr(spec_jax, "certify", certify_in_part)
    run(name, blocks(name))
    out = capsys.readouterr().out
    printed = re.findall(r"^  Largest error (\S+),", out, re.MULTILINE)
    assert bool(printed) == (name in CERTIFIED)
    assert max(map(float, printed), default=0.0) < 1e-6  # errors of the certificates
    assert "No certificate" not in out


@pytest.mark.exhaustive
def test_prompts_that_a_newcomer_copies_give_text_to_read():
    """A prompt after which a model of this size repeats one word is not shown, see ``0, 0, 0``."""
    pages = [(ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/decode.md")]
    texts = "".join([*pages, spec_jax.SpeculativeDecoder.stream.__doc__])
    shown = set(re.findall(r'"(?:def|class|import) [^"\n]*"', texts))
    prompts = sorted(map(ast.literal_eval, shown))
    assert "def binary_search(" in prompts
    decoder = spec_jax.SpeculativeDecoder(spec_jax.load_model("zoo/target"))
    for prompt, row in zip(prompts, decoder.generate(prompts, 64)):
        words = row.text.split()
        assert len(set(words)) > len(words) / 3, prompt + row.text


def test_every_paper_that_the_code_names_is_among_the_references():
    paper = re.compile(r"\b\d{4}\.\d{5}\b")
    listed = set(paper.findall((ROOT / "docs" / "references.md").read_text(encoding="utf-8")))
    folders = ("spec_jax", "experiments", "configs")
    for file in (file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        named = {x for x in paper.findall(text) if re.search(rf"arXiv\W+{x}|arXiv\s+{x}", text)}
        assert named <= listed, f"{file.relative_to(ROOT)}: {sorted(named - listed)}"


# The site's first page leads to pages that its build makes, and the build checks it.
WRITTEN = sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "index.md"})


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.stem)
def test_links_of_a_page_lead_somewhere(path):
    text = re.sub(r"(?ms)^```.*?^```$", "", path.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith("http"):
            continue
        name, _, anchor = link.partition("#")
        file = (path.parent / name) if name else path
        assert file.exists(), link
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), link
