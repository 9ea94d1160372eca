"""The course as a site: `python tools/book.py [--serve]` makes build/book from the committed notebooks, and runs none.

Pages are the notebooks, each with its solutions folded at its end, and what README, CONTRIBUTING and the other texts of the
repository say; the start page searches by symptom in the browser. The site asks no other host for anything.
"""

import argparse
import contextlib
import functools
import html
import http.server
import inspect
import json
import re
import shutil
import sys
from pathlib import Path

import brython
import nbformat
from itables import options, to_html_datatable
from itables.javascript import generate_init_offline_itables_html
from report import verdicts
from sliders import sliders
from sphinx.cmd.build import build_main

import labsupport
from labsupport.learner import guide
from labsupport.lesson.catalogue import labs
from labsupport.lesson.claims import SIGNS, claims
from labsupport.lesson.formula import FORMULA_MIME

ROOT = Path(__file__).parents[1]
HERE, PAGES, SITE = ROOT / "tools" / "book", ROOT / "build" / "book-pages", ROOT / "build" / "book"
PORT = 8000
# Texts of the repository, by their page; a link to one of them becomes a link to its page.
TEXTS = {
    "tools/classroom/TEACHING.md": "teaching",
    "CONTRIBUTING.md": "contributing",
    "data/README.md": "data",
    "data/verdicts.md": "verdicts",
    "data/releases.md": "releases",
    "data/zoo.md": "zoo",
} | {f"tools/book/pages/{path.name}": path.stem for path in (HERE / "pages").glob("*.md")}
SEARCH = """\
## Which lab for which trouble

<label for="symptom">Your trouble: an error message, or what you would type into a search engine</label>
<input id="symptom" type="search" autocomplete="off">
<div id="found" role="status"></div>
<script src="_static/base-stemmer.js"></script><script src="_static/english-stemmer.js"></script>
<script>const SYMPTOMS = {data};</script>
"""


def lab_page(path):
    """A committed notebook with the solutions of its exercises folded at its end."""
    book = nbformat.read(path, as_version=4)
    solved = nbformat.read(path.parent / "solutions" / path.name, as_version=4)
    given = {cell.source for cell in book.cells}
    answers = [cell for cell in solved.cells if cell.cell_type == "code" and cell.source not in given]
    if answers:
        book.cells.append(nbformat.v4.new_markdown_cell("## Solutions\n\nTry the exercises in JupyterLab first."))
    for cell in answers:
        book.cells.append(nbformat.v4.new_code_cell(cell.source, metadata={"tags": ["hide-input"]}))
    for cell in book.cells:
        for output in cell.get("outputs", []):
            if FORMULA_MIME in output.get("data", {}):
                output["data"] = {"text/html": sliders(output["data"], cell.id)}
        if cell.cell_type == "markdown":
            cell.source = linked(cell.source, "labs", "../")
    return book


def linked(text, folder, up=""):
    """A text of the repository, read in this folder of it, with its links to what has a page here; others name the file.

    up: the way from the text's page to the folder of pages.
    """

    def there(match):
        words, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        target, hash, part = target.partition("#")
        path = (ROOT / folder / target).resolve()
        name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else target
        if name in TEXTS:
            return f"[{words}]({up}{TEXTS[name]}.md{hash}{part})"
        if name == "labs/start_here.ipynb":
            return f"[{words}]({up}index.md)"
        if re.fullmatch(r"labs/\d\d_\w+\.ipynb|labs/images/\w+\.png|data/recorded/\w+\.svg", name):
            return f"[{words}]({up}{name})"
        return f"`{name}`" if name.endswith(words) else f"{words} (`{name}`)"

    return re.sub(r"(?<!`)\[([^\]]*)\]\(([^)\s]+)\)", there, text)


def start_page():
    """The README with the search in it, and without its last section, which names files."""
    first, *parts = re.split(r"^(?=## )", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    search = SEARCH.replace("{data}", json.dumps(guide.as_data(), ensure_ascii=False, separators=(",", ":")))
    return "\n".join([linked(first, "."), search, *(linked(part, ".") for part in parts[:-1]), contents()])


def ledger():
    """The page of verdicts: a table that sorts and filters."""
    import pandas as pd

    rows = []
    for path in sorted((ROOT / "labs").glob("[0-9]*.ipynb")):
        for entry in verdicts(path):
            link = f'<a href="labs/{path.stem}.html">{path.stem[:2]}</a>'
            verdict = f"{SIGNS[entry['verdict']]} {entry['verdict']}"
            words = [verdict, claims()[entry["id"]]["claim"], entry["because"]]
            rows.append([entry["id"], *map(html.escape, words), link])
    table = pd.DataFrame(sorted(rows), columns=["", "verdict", "claim", "why", "lab"])
    shown = {
        "connected": False,
        "display_logo_when_loading": False,
        "allow_html": True,
        "showIndex": False,
        "paging": False,
        "maxBytes": 0,
        "classes": "display",
    }
    library = generate_init_offline_itables_html(options.dt_bundle)
    return f"# All verdicts\n\n```{{raw}} html\n{library}\n{to_html_datatable(table, **shown)}\n```\n"


def reference():
    """The page of what `import labsupport` offers, from its docstrings."""
    told = ["# Functions of a lab"]
    for name in labsupport.__all__:
        offered = getattr(labsupport, name)
        told += [f"## {name}"] * callable(offered)
        if inspect.isfunction(offered):
            told.append(f"```python\n{name}{inspect.signature(offered)}\n```")
        told += [inspect.getdoc(offered)] * callable(offered)
    return "\n\n".join(told)


def write_pages():
    """Write what Sphinx reads into PAGES, and take away the site of before."""
    for old in (PAGES, SITE):
        shutil.rmtree(old, ignore_errors=True)
    (PAGES / "labs").mkdir(parents=True)
    (PAGES / "_static").mkdir()
    shutil.copy(HERE / "conf.py", PAGES)
    for name in ("book.css", "symptoms.js", "formulas.js", "chip.svg"):
        shutil.copy(HERE / name, PAGES / "_static")
    shutil.copy(Path(brython.__file__).parent / "data" / "brython.js", PAGES / "_static")
    for pictures in ("labs/images", "data/recorded"):
        shutil.copytree(ROOT / pictures, PAGES / pictures)
    for path in sorted((ROOT / "labs").glob("[0-9]*.ipynb")):
        nbformat.write(lab_page(path), PAGES / "labs" / path.name)
    for name, page in TEXTS.items():
        (PAGES / f"{page}.md").write_text(linked((ROOT / name).read_text(), Path(name).parent))
    (PAGES / "verdicts.md").write_text(ledger())
    (PAGES / "reference.md").write_text(reference())
    (PAGES / "index.md").write_text(start_page())


def contents():
    """What stands beside each page: the labs in reading order, then the rest."""
    listed = "\n".join(f"labs/{lab.name}" for lab in labs().values())
    rest = {
        "Labs": f"labs\n{listed}",
        "Verdicts": "verdicts\nreleases",
        "Tools": "begin\ndoctor\nfits\nzoo\nchecks\nreference\nprogress",
        "For teachers and makers": "teaching\nclassroom\ncontributing\nci\ndata",
    }
    return "\n".join(
        f"```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n" for caption, pages in rest.items()
    )


def serve():
    """Show the site on this machine alone, until Ctrl-C."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=SITE)
    with http.server.ThreadingHTTPServer(("localhost", PORT), handler) as server:
        print(f"http://localhost:{PORT}, until Ctrl-C")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--serve", action="store_true", help=f"show it afterwards at http://localhost:{PORT}")
    asked = parser.parse_args()
    write_pages()
    if status := build_main(["-q", "-W", "--keep-going", "-j", "auto", str(PAGES), str(SITE)]):
        sys.exit(status)
    print(f"{SITE / 'index.html'}: open it in a browser")
    if asked.serve:
        serve()


if __name__ == "__main__":
    main()
