"""The two ways in which notebooks are executed: neither waits for a dead kernel, neither overlooks a wrong name."""

import functools
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from notebooks import KernelDied, run_notebook

TESTS = Path(__file__).parent
DEADLY = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"


def written(path, *sources):
    """A small notebook, whose first cell has the parameter SCALE."""
    path.parent.mkdir(exist_ok=True)
    first = new_code_cell("SCALE = 'full'", metadata={"tags": ["parameters"]})
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(new_notebook(metadata=kernel, cells=[first, *map(new_code_cell, sources)]), path)
    return path


@pytest.fixture
def notebook(tmp_path):
    """notebook(source, …) → path of a small one."""
    return functools.partial(written, tmp_path / "notebook" / "small.ipynb")


@pytest.fixture(scope="module")
def by_nbval(tmp_path_factory):
    """What pytest says of three notebooks, with this folder's conftest and two workers."""
    folder = tmp_path_factory.mktemp("nbval")
    written(folder / "deadly.ipynb", "1 + 1", DEADLY)
    written(folder / "counts.ipynb", "a = 1", *["a += 1"] * 8, "assert a == 9")
    exercises = written(
        folder / "exercises.ipynb",
        "from labsupport.lesson.exercises import exercise\nexercise(1, 'a hint')(lambda: None)()",
        "def no():\n    raise AssertionError('why')\n\nexercise(2)(no)()",
        "exercise(3, 'a hint')(no)()",
    )
    book = nbformat.read(exercises, as_version=4)
    for number, cell in enumerate(book.cells[1:], 1):
        cell.execution_count = number
        cell.outputs = [
            nbformat.v4.new_output("display_data", {"application/vnd.labsupport.exercise+json": {"number": number}})
        ]
    nbformat.write(book, exercises)
    options = (
        f"-p conftest -p no:cacheprovider -c /dev/null --rootdir={folder} -rA -n 2 --nbval-lax --nbval-current-env"
    )
    # A cell may take longer than all of it: who waits for a dead kernel is noticed.
    options = [*options.split(), "--nbval-cell-timeout=600"]
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout
    return done.stdout


def outcomes(said, name):
    """{outcome: cells of the notebook of this name}."""
    return Counter(re.findall(rf"^(PASSED|FAILED) \S*{name}\.ipynb::", said, re.MULTILINE))


def test_papermill_passes_parameters(notebook, tmp_path):
    book = run_notebook(notebook("print(SCALE)"), tmp_path, SCALE="quick")
    assert book.cells[-1].outputs[0]["text"] == "quick\n"


def test_papermill_refuses_an_unknown_parameter_before_it_runs(notebook, tmp_path):
    with pytest.raises(ValueError, match="small.ipynb has no parameter SCAEL; it has SCALE"):
        run_notebook(notebook("raise SystemError('it ran')"), tmp_path, SCAEL="quick")


def test_papermill_names_the_cell_that_killed_the_kernel(notebook, tmp_path):
    began = time.monotonic()
    with pytest.raises(KernelDied, match=r"small.ipynb died in this cell:\nimport os, signal"):
        run_notebook(notebook("1 + 1", DEADLY, "2 + 2"), tmp_path, SCALE="quick")
    assert time.monotonic() - began < 30


def test_nbval_names_the_cell_that_killed_the_kernel(by_nbval):
    assert outcomes(by_nbval, "deadly") == {"PASSED": 2, "FAILED": 1}, by_nbval
    assert "Cell 2" in by_nbval and "the kernel died while it ran this cell:\nimport os, signal" in by_nbval


def test_nbval_keeps_a_notebook_in_one_worker(by_nbval):
    assert outcomes(by_nbval, "counts") == {"PASSED": 11}, by_nbval


def test_nbval_fails_where_an_unsolved_exercise_passes_or_does_not_help(by_nbval):
    assert outcomes(by_nbval, "exercises") == {"PASSED": 2, "FAILED": 2}, by_nbval
    assert "exercise 1 passes although" in by_nbval and "exercise 2 fails without" in by_nbval
