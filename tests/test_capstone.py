"""The capstone's checker: a solution with one fault put back is found out, by that fault's name and no other."""

import linecache
from pathlib import Path

import nbformat
import pytest

import labsupport
from labsupport import ArmResult, measure
from labsupport.lesson import capstone

LABS = Path(__file__).parents[1] / "labs"
# The function of the solution that is put back to its faulty form, and the fault that this leaves.
HALVES = {
    "image_dataset": "eager stack",
    "decode": "float64",
    "make_pipeline": "decoded buffer",
    "evaluate": "giant batch",
    "train_epoch": "history",
    "learning_rate": "retracing",
    "search": "model per trial",
}
BUDGETS = {"generous": "256 MiB", "tight": "56 MiB"}


def script(put_back=None):
    """The names of the solved notebook's script; put_back: the function that stays as it was before the fix."""
    import keras
    import numpy as np
    import tensorflow as tf

    book = nbformat.read(LABS / "solutions" / "19_capstone.ipynb", as_version=4)
    names = {"__name__": "capstone", "SCALE": "quick", "lab": labsupport, "keras": keras, "np": np, "tf": tf}
    was = None
    for cell in book.cells:
        tags = cell.metadata.get("tags", [])
        if "script" in tags or "fix" in tags:
            # A file name of its own for each variant: AutoGraph reads the source, as in a notebook.
            file = f"<capstone {put_back} {cell.id}>"
            linecache.cache[file] = (len(cell.source), None, cell.source.splitlines(keepends=True), file)
            was = names.get(put_back)
            exec(compile(cell.source, file, "exec"), names)
    if put_back:
        names[put_back] = was
    return names


def measure_all(scripts, files, labels):
    return {name: capstone.measure(pieces, files, labels) for name, pieces in scripts.items()}


@pytest.fixture(scope="module")
def measured():
    """{the function put back, or None: {fault: figure}}, all measured in one process: differences of exact counters."""
    files = sorted(str(path) for path in (LABS.parent / "data" / "photos").glob("*.jpg"))[:128]
    scripts = {name: capstone.script_functions(script(name)) for name in (None, *HALVES)}
    return measure(measure_all, scripts, files, [i % 16 for i in range(len(files))], timeout=600).value


def report(figures, accuracy=0.7, peak=50 * 2**20):
    """A report on a script with these figures that finished within the tight budget."""
    result = ArmResult("script", 56 * 2**20, True, value=accuracy, figures={"peak": peak})
    return capstone.Report(BUDGETS, 0.6, {"56 MiB": result}, figures)


def test_the_solution_has_no_fault_left(measured):
    found = report(measured[None])
    assert found.faults == [], found.frame.to_string()
    assert found.missing("tight") == found.missing("generous", forgive_faults=True) == ""


@pytest.mark.parametrize("put_back", HALVES)
def test_a_half_solution_fails_with_the_fault_left_named(put_back, measured):
    found = report(measured[put_back])
    assert found.faults == [HALVES[put_back]], found.frame.to_string()
    assert f"left: {HALVES[put_back]} (lab " in found.missing("tight")
    assert found.missing("generous", forgive_faults=True) == ""


def test_every_fault_that_the_checker_knows_is_planted():
    assert set(HALVES.values()) == set(capstone.FAULTS)


def test_a_script_that_learns_less_or_needs_more_passes_no_budget(measured):
    assert "learns less" in report(measured[None], accuracy=0.2).missing("generous", forgive_faults=True)
    large = report(measured[None])
    large.runs = {"256 MiB": ArmResult("script", 256 * 2**20, True, value=0.7, figures={"peak": 100 * 2**20})}
    assert large.missing("generous") == ""
    assert "peak of 100 MiB does not fit into 56 MiB" in large.missing("tight")


def test_a_script_that_cannot_be_measured_is_told_why():
    broken = capstone.script_functions(script())
    broken["image_dataset"] = lambda files, labels: 1 / 0
    broken["main"] = lambda files, labels: 0.7
    found = capstone.check_script(broken, ["a file"], [0], {"generous": "256 MiB"}, accuracy=0.7)
    assert "could not be measured: ZeroDivisionError" in found.missing("generous", forgive_faults=True)
    assert found.faults == []
