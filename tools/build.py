"""Make the notebooks from tools/source: `python tools/build.py [--check] [--execute] [NAME ...]`.

From one percent script come the lab, where everything between `# BEGIN SOLUTION` and `# END SOLUTION` is
replaced by `# your code here`, and labs/solutions/NAME.ipynb with the solution in place (not for the start page).
From all of them comes data/labs.json: what each lab says about itself, for labsupport where it runs without them.
--execute runs each lab so that it is committed with its figures; --check only tells what is out of step.
"""

import argparse
import json
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
LABS, SOURCES, CATALOGUE = ROOT / "labs", ROOT / "tools" / "source", ROOT / "data" / "labs.json"
SOLUTION = re.compile(r"^([ \t]*)# BEGIN SOLUTION\n(.*?)^[ \t]*# END SOLUTION\n?", re.DOTALL | re.MULTILINE)
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


def answer_kind(cell):
    """The tag of a cell that is an answer for the tests, or grades one: "right" or "wrong"; None for any other."""
    return next((tag for tag in cell.metadata.get("tags", []) if tag in ("right", "wrong")), None)


def _with_answers(cells):
    """The cells with each exercise's answers put before its solution, each followed by the exercise's grading cell."""
    found = []
    for cell in cells:
        if answer_kind(cell):
            solution = max(place for place, before in enumerate(found) if SOLUTION.search(before.source + "\n"))
            grading = nbformat.from_dict({**found[-1], "metadata": cell.metadata})
            found[solution:solution] = [cell, grading]
        else:
            found.append(cell)
    return found


def _what_next(source):
    """The last line of a lab: a reader who comes to its end with Shift+Enter is led on, and no empty cell opens."""
    later = [other for other in sorted(SOURCES.glob("[0-9]*.py")) if other.name > source.name]
    links = [f"[Lab {other.stem[:2]}, {_title(other)}]({other.stem}.ipynb)" for other in later[:1]]
    return "**Next:** " + " · ".join([*links, "[all labs](start_here.ipynb)"])


def _title(source):
    return re.search(r"^# # \d\d · (.+)$", source.read_text(), re.MULTILINE)[1]


def notebook(source, solved, answers=False):
    """The notebook of a percent script, without outputs; its cell ids are the same every time.

    answers: with the right and wrong answers that only the tests run, each graded as the learner's would be.
    """
    book = jupytext.read(source)
    book.metadata = nbformat.from_dict(KERNEL)
    book.cells = _with_answers(book.cells) if answers else [cell for cell in book.cells if not answer_kind(cell)]
    if not solved and source.stem[0].isdigit():
        book.cells.append(nbformat.v4.new_markdown_cell(_what_next(source)))
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = nbformat.from_dict({key: value for key, value in cell.metadata.items() if key in ("tags",)})
        instead = (lambda match: match[2]) if solved else (lambda match: f"{match[1]}...  # your code here\n")
        cell.source = SOLUTION.sub(instead, cell.source + "\n").rstrip("\n")
    return book


def in_step(book, path):
    """Whether the committed notebook has the cells of this one; outputs do not count."""
    if not path.exists():
        return False
    facts = lambda b: [(c.id, c.cell_type, c.source, c.metadata.get("tags")) for c in b.cells]
    return facts(nbformat.read(path, as_version=4)) == facts(book)


def keep_outputs(book, path):
    """Take over what the committed notebook's last run left, if its code is the same and only text has changed."""
    if not path.exists():
        return
    committed = nbformat.read(path, as_version=4)
    kept, code = ([cell for cell in b.cells if cell.cell_type == "code"] for b in (committed, book))
    if [cell.source for cell in kept] == [cell.source for cell in code]:
        book.metadata = committed.metadata
        for cell, before in zip(code, kept):
            cell.outputs, cell.execution_count = before.outputs, before.execution_count


def without_markup(book):
    """Drop from every picture its copy as HTML, which only JupyterLab needs; see bundle() in labsupport/showing/words.py."""
    for cell in book.cells:
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output["data"].pop("text/html", None)


def execute(book):
    """Run a lab in labs/ as its reader would; an error ends the build with the cell's traceback."""
    nobody = (
        Path(tempfile.gettempdir()) / "labs-build-no-ledger.jsonl"
    )  # never written: a committed page shows nobody's work
    os.environ["LABSUPPORT_LEDGER"] = str(nobody)
    NotebookClient(book, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(LABS)}}).execute()
    # A box or slider without its kernel would look alive; its text says to run the cell.
    book.metadata.pop("widgets", None)
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # when it ran says nothing and changes in every build
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
    without_markup(book)


def described(source):
    """What a lab says of itself in its first cell, and the numbers of its exercises, from its percent script and its graders."""
    text, grader = source.read_text(), ROOT / "labsupport" / "graders" / f"{source.stem[3:]}.py"
    first = re.sub(r"^# ?", "", text.split("# %%")[1], flags=re.MULTILINE)

    def part(pattern):
        return re.sub(r"[*`]", "", " ".join(re.search(pattern, first, re.DOTALL)[1].split()))

    return {
        "title": part(r"# \d\d · (.+?)\n"),
        "symptom": part(r"\*\*Symptom:\*\*(.+?)\n\n"),
        "time": part(r"\| Time \|(.+?)\|"),
        "claims": re.findall(r"C\d\d", part(r"\| Claims judged \|(.+?)\|")),
        "exercises": [int(number) for number in re.findall(r"^@exercise\(\s*(\d)", grader.read_text(), re.MULTILINE)],
    }


def catalogue():
    """The text of data/labs.json."""
    sources = sorted(SOURCES.glob("[0-9]*.py"))
    labs = {source.stem[3:]: {"number": source.stem[:2], **described(source)} for source in sources}
    names = {source.stem[3:]: set(re.findall(r"\b(?:tf|keras)(?:\.\w+)+", source.read_text())) for source in sources}
    used = Counter(name for found in names.values() for name in found)
    # Of TensorFlow's names those that one or two labs use: they tell what a lab is about.
    for slug, found in names.items():
        labs[slug]["names"] = sorted(name for name in found if used[name] <= 2)
    return json.dumps(labs, indent=1, ensure_ascii=False) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="such as 01_image_stacking; all if none")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a notebook is out of step")
    parser.add_argument("--execute", action="store_true", help="run each lab and keep its outputs")
    options = parser.parse_args()
    sources = sorted(SOURCES.glob("*.py"))
    unknown = set(options.names) - {source.stem for source in sources}
    if unknown:
        parser.error(f"no such lab: {', '.join(sorted(unknown))}; there are {', '.join(s.stem for s in sources)}")
    stale = [] if CATALOGUE.exists() and CATALOGUE.read_text() == catalogue() else [CATALOGUE]
    if stale and not options.check:
        CATALOGUE.write_text(catalogue())
    for source in sources:
        if options.names and source.stem not in options.names:
            continue
        folders = [(LABS, False)] + [(LABS / "solutions", True)] * ("# BEGIN SOLUTION" in source.read_text())
        for folder, solved in folders:
            path, book = folder / f"{source.stem}.ipynb", notebook(source, solved)
            if options.execute and not options.check and not solved:
                print(f"running {source.stem} …", flush=True)
                execute(book)
            elif in_step(book, path):
                continue
            elif not solved:
                keep_outputs(book, path)
            stale.append(path)
            if not options.check:
                nbformat.write(book, path)
    if stale and options.check:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"out of step with tools/source: {names}; run `make labs`")


if __name__ == "__main__":
    main()
