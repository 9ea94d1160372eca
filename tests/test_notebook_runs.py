"""The two ways in which notebooks are executed: neither waits for a dead kernel, neither overlooks a wrong name."""

import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook
from notebooks import KernelDied, run_notebook

TESTS = Path(__file__).parent
DEADLY = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def notebook(tmp_path):
    """Writes a small notebook: notebook(source, …) → path. Its first cell has the parameter SCALE."""

    def write(*sources):
        (tmp_path / "notebook").mkdir()
        path = tmp_path / "notebook" / "small.ipynb"
        first = new_code_cell("SCALE = 'full'", metadata={"tags": ["parameters"]})
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(new_notebook(metadata=kernel, cells=[first, *map(new_code_cell, sources)]), path)
        return path

    return write


def by_nbval(path, *more):
    """pytest's output and seconds for one notebook, with this folder's conftest."""
    options = ["-p", "conftest", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(path.parent)]
    options += ["--nbval-lax", "--nbval-current-env", "--nbval-cell-timeout=120"]
    command = [sys.executable, "-m", "pytest", *options, *more, str(path)]
    began = time.monotonic()
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=120)
    return done, time.monotonic() - began


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


def test_nbval_names_the_cell_that_killed_the_kernel(notebook):
    done, seconds = by_nbval(notebook("1 + 1", DEADLY))
    assert done.returncode == 1
    assert "1 failed, 2 passed" in done.stdout
    assert "Cell 2" in done.stdout and "the kernel died while it ran this cell:\nimport os, signal" in done.stdout
    assert seconds < 40, "it waited for a dead kernel"


def test_nbval_keeps_a_notebook_in_one_worker(notebook):
    done, _ = by_nbval(notebook("a = 1", *["a += 1"] * 8, "assert a == 9"), "-n", "2")
    assert "11 passed" in done.stdout, done.stdout


def test_nbval_fails_where_an_unsolved_exercise_passes_or_does_not_help(notebook):
    path = notebook(
        "from labsupport.lesson.exercises import exercise\nexercise(1, 'a hint')(lambda: None)()",
        "def no():\n    raise AssertionError('why')\n\nexercise(2)(no)()",
        "exercise(3, 'a hint')(no)()",
    )
    book = nbformat.read(path, as_version=4)
    for number, cell in enumerate(book.cells[1:], 1):
        cell.execution_count = number
        cell.outputs = [
            nbformat.v4.new_output("display_data", {"application/vnd.labsupport.exercise+json": {"number": number}})
        ]
    nbformat.write(book, path)
    done, _ = by_nbval(path)
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert "exercise 1 passes although" in done.stdout and "exercise 2 fails without" in done.stdout
