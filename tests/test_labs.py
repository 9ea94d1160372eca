"""The labs as they are committed, and their solutions as they run. The labs themselves are run by nbval."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import build
import jupytext
import nbformat
import pytest
import reuse
from notebooks import run_notebook

from labsupport.lesson.claims import VERDICT_MIME, claims
from labsupport.lesson.exercises import EXERCISE_MIME
from labsupport.lesson.formula import FORMULA_MIME

ROOT = Path(__file__).parents[1]
LABS = sorted((ROOT / "labs").glob("[0-9]*.ipynb"))
SECTIONS = ["Predict", "Failure", "Fix", "Side by side", "Explain", "Verdict", "Exercises"]
# Folders of one machine; "/tmp/" alone may be advice to a reader.
PRIVATE = re.compile(r"(?<![\w.:/-])/(?:work|root|home)/|/tmp/(?:ipykernel|labsupport|pytest)")
for_each_lab = pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)


def tracked(folder):
    """The files of a folder that git knows, by their path in the repository."""
    command = ["git", "ls-files", "-z", "--", folder]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    return [name for name in names if name]


def outputs(book, mime):
    """The data of one MIME type in a notebook, in order."""
    return [o["data"][mime] for cell in book.cells for o in cell.get("outputs", []) if mime in o.get("data", {})]


def text(book):
    """All that a reader of the outputs sees as text."""
    streams = [o["text"] for cell in book.cells for o in cell.get("outputs", []) if o.output_type == "stream"]
    return "\n".join(streams + outputs(book, "text/plain") + outputs(book, "text/html"))


def assert_listed_claims_are_judged(book):
    listed = re.findall(r"C\d\d", re.search(r"\| Claims judged \|(.*)\|", book.cells[0].source)[1])
    judged = [facts["id"] for facts in outputs(book, VERDICT_MIME)]
    assert sorted(judged) == sorted(listed) and set(judged) <= claims().keys()


def test_every_claim_is_judged_by_one_lab():
    judged = [facts["id"] for path in LABS for facts in outputs(nbformat.read(path, as_version=4), VERDICT_MIME)]
    assert sorted(judged) == sorted(claims())


def test_each_source_has_its_lab_and_its_solution():
    stems = {path.stem for path in (ROOT / "tools" / "source").glob("[0-9]*.py")}
    solved = {path.stem for path in (ROOT / "labs" / "solutions").glob("*.ipynb")}
    assert stems == {path.stem for path in LABS} == solved


def test_a_learner_finds_only_what_a_learner_opens():
    """labs/ holds notebooks, their solutions and pictures, and is what the classroom copies."""
    for path in tracked("labs"):
        folder, name = Path(path).parts[1:-1], Path(path).name
        allowed = {(): r"(start_here|\d\d_\w+)\.ipynb", ("solutions",): r"\d\d_\w+\.ipynb", ("images",): r"\w+\.png"}
        assert folder in allowed and re.fullmatch(allowed[folder], name), f"{path} does not belong there"


def test_a_drifted_notebook_is_noticed(tmp_path):
    """--check on a copy in which one word of a source has changed, and with it the catalogue."""
    source = f"tools/source/{LABS[0].stem}.py"
    grader = f"labsupport/graders/{LABS[0].stem[3:]}.py"
    for name in ("tools/build.py", source, grader, f"labs/{LABS[0].name}", f"labs/solutions/{LABS[0].name}"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "data").mkdir()

    def build(*options):
        return subprocess.run([sys.executable, tmp_path / "tools/build.py", *options], capture_output=True, text=True)

    assert build().returncode == 0 and build("--check").returncode == 0, "after it has been written all is in step"
    (tmp_path / source).write_text((ROOT / source).read_text().replace("minute", "hour", 1))
    done = build("--check")
    assert (
        done.returncode != 0
        and f"data/labs.json, labs/{LABS[0].name}" in done.stderr
        and "run `make labs`" in done.stderr
    )


@for_each_lab
def test_committed_lab_is_complete(path):
    book = nbformat.read(path, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    prose = "\n\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")

    assert re.match(rf"# {path.stem[:2]} · .+", prose), "the title"
    for word in ("**Symptom:**", "**Afterwards you can**", "| Time |", "| Memory |", "| Claims judged |"):
        assert word in book.cells[0].source, f"the first cell has no {word}"
    sections = re.findall(r"^## (.+)$", prose, re.MULTILINE)
    assert [section for section in sections if section != "Advice, tested"] == SECTIONS

    parameters = [cell.source for cell in code if "parameters" in cell.metadata.get("tags", [])]
    assert len(parameters) == 1 and re.search(r'^SCALE = "quick"', parameters[0], re.MULTILINE)
    assert re.search(r"^GUESS_MIB = ", parameters[0], re.MULTILINE)
    assert not [cell.source for cell in code if "raises-exception" in cell.metadata.get("tags", [])]

    assert all(cell.execution_count for cell in code if cell.source.strip()), "committed without having been run"
    assert not re.search(r"!\[\s*\]\(", prose), "a picture without a text alternative"
    for cell in code:
        for output in cell.outputs:
            assert output.output_type != "error", output.get("evalue")
            if "image/png" in output.get("data", {}):
                described = output.metadata.get("image/png", {}).get("alt", "").strip()
                assert described, f"a picture without a text alternative is left by: … {cell.source[-200:]}"


@for_each_lab
def test_committed_lab_judges_its_claims_and_leaves_the_exercises_to_the_learner(path):
    book = nbformat.read(path, as_version=4)
    assert_listed_claims_are_judged(book)
    exercises = outputs(book, EXERCISE_MIME)
    assert 2 <= len(exercises) <= 3
    for facts in exercises:
        assert not facts["passed"] and facts["reason"] and facts["hints"], facts


@for_each_lab
def test_committed_sliders_move_on_a_page_without_a_kernel(path):
    """Each has its formula in the saved output; a function that uses more than plain values has none (formula.py)."""
    book = nbformat.read(path, as_version=4)
    calls = sum(cell.source.count("lab.explore(") for cell in book.cells if cell.cell_type == "code")
    assert len(outputs(book, FORMULA_MIME)) == calls


def source_of(path):
    return ROOT / "tools" / "source" / f"{path.stem}.py"


@for_each_lab
def test_each_exercise_has_another_right_answer_and_two_wrong_ones(path):
    answers = []
    for cell in jupytext.read(source_of(path)).cells:
        if "# BEGIN SOLUTION" in cell.source:
            answers.append([])
        if build.answer_kind(cell):
            answers[-1].append(build.answer_kind(cell))
            assert build.answer_kind(cell) == "right" or re.match("# says: .", cell.source), (
                f"what a wrong answer is told: {cell.source}"
            )
    assert len(answers) >= 2
    for kinds in answers:
        assert kinds.count("right") >= 1 and kinds.count("wrong") >= 2, kinds


@for_each_lab
def test_right_answers_pass_and_wrong_ones_are_told_why(path, tmp_path, monkeypatch):
    """The solution as committed, with other parameters; before each solution the answers that others may give.

    Its pictures are those of the lab, which nbval draws.
    """
    monkeypatch.setenv(reuse.NO_PICTURES, "1")
    assert build.in_step(build.notebook(source_of(path), solved=True), path.parent / "solutions" / path.name)
    with_answers = tmp_path / "answers" / path.name
    with_answers.parent.mkdir()
    nbformat.write(build.notebook(source_of(path), solved=True, answers=True), with_answers)
    book = run_notebook(with_answers, cwd=path.parent, SCALE="quick", GUESS_MIB=123.0)
    assert "You guessed 123 MiB" in text(book), "the parameter has no effect"
    says, told = None, []
    for cell in book.cells:
        if found := re.match(r"# says: (.+)", cell.source):
            says = found[1]
        for facts in outputs(type(book)(cells=[cell]), EXERCISE_MIME):
            if build.answer_kind(cell) != "wrong":
                told += [f"rejected, {facts}"] * (not facts["passed"])
            elif facts["passed"]:
                told.append(f"exercise {facts['number']} accepts the answer that should be told: {says}")
            elif not re.search(says, facts["reason"], re.IGNORECASE):
                told.append(f"exercise {facts['number']} tells {facts['reason']!r}, not {says!r}")
    assert not told, "\n".join(told)
    assert_listed_claims_are_judged(book)


def test_no_tracked_text_names_a_folder_of_one_machine():
    found = []
    for name in tracked("."):
        try:
            match = PRIVATE.search((ROOT / name).read_text())
        except (UnicodeDecodeError, FileNotFoundError):  # a picture, or deleted and not yet committed
            continue
        if match:
            found.append(f"{name}: {match.string[max(match.start() - 60, 0) : match.end() + 40]!r}")
    assert not found, "\n".join(found)
