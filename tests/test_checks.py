"""The checks for other people's tests, run as they run them: by pytest in a repository that has nothing of this one."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from labsupport import assert_no_growth, memory_budget
from labsupport.ground.budget import BudgetError

EXAMPLE = Path(__file__).parent / "example_project"
PLANTED = """
import gc

import keras
import pytest
import tensorflow as tf

gc.freeze()  # each count would look through all that these hold, which took most of these tests
import train


@pytest.mark.parametrize("leak", ["gradients", "arrays", "iterator", "retrace", "function", "fit"])
def test_leak(leak, assert_no_growth, monkeypatch):
    monkeypatch.setattr(train, "LEAK", leak)
    monkeypatch.setattr(train, "kept", [])  # TensorFlow takes up to a minute to give up an iterator that was kept for long
    assert_no_growth(train.step, n=8)


def test_budget(memory_budget):
    gc.collect()
    scattered = [tf.zeros([size, 1024]) for size in range(100, 2100, 50)]
    del scattered[::2]  # holes of every size in the allocator's pool
    for rows in (1024, 1536, 24_000):
        with memory_budget("100 MiB") as spent:
            wanted = tf.zeros([rows, 1024])
        assert spent.before_mib > 10
        assert rows / 256 <= spent.peak_mib < rows / 256 * 1.1
        del wanted


def test_budget_nested(memory_budget):
    with memory_budget("100 MiB") as outer:
        tf.zeros([4096, 1024])
        with memory_budget("8 MiB") as inner:
            tf.zeros([1024, 1024])
    assert 4 <= inner.peak_mib < 5 and 16 <= outer.peak_mib < 18


def test_budget_leaves_errors_alone(memory_budget):
    with pytest.raises(ZeroDivisionError):
        with memory_budget("1 MiB") as spent:
            tf.zeros([1024, 1024])
            1 / 0
    assert spent.peak_mib >= 4


def test_wide(memory_budget):
    kept = tf.ones([512, 1024])
    with memory_budget("8 MiB"):
        tf.zeros([4096, 1024])
"""


def outcomes(folder, *arguments, **environment):
    """{test: report of its failure, or ""} of a pytest run in the example."""
    report = folder / "report.xml"
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTEST_", "TF_CPU_ALLOCATOR", "LEAK"))
    }
    path = os.pathsep.join([str(EXAMPLE.parents[1]), str(EXAMPLE), *filter(None, [os.environ.get("PYTHONPATH")])])
    plugin = [
        "-p",
        "labsupport.doctor.pytest_plugin",
        "-p",
        "no:labsupport",
    ]  # whether or not this environment knows the entry point
    finished = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *plugin,
            "-p",
            "no:nbval",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
            *map(str, arguments),
        ],
        cwd=EXAMPLE,
        env={**inherited, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=400,
    )
    cases = ElementTree.parse(report).iter("testcase")
    found = {
        case.get("name"): "".join(part.text for part in case if part.tag in ("failure", "error")) for case in cases
    }
    assert found, finished.stdout + finished.stderr
    return found


def test_the_example_passes_and_each_planted_leak_is_named(tmp_path):
    planted = tmp_path / "test_planted.py"
    planted.write_text(PLANTED)
    found = outcomes(tmp_path, planted, "test_memory.py")
    failed = {name: message for name, message in found.items() if message}
    assert failed.keys() == {
        *(f"test_leak[{leak}]" for leak in ("gradients", "arrays", "iterator", "retrace", "function", "fit")),
        "test_wide",
    }
    for leak, wanted in {
        "gradients": ["tensors: ", "1 × float32 (128, 128)", "lab 09", "train.kept ("],
        "arrays": ["arrays: ", "1 × float32 (64, 128)", "lab 09", "train.kept ("],
        "iterator": ["pipelines: ", "1 × OwnedIterator", "lab 04", "train.kept ("],
        "retrace": ["graphs: 1 more (1 × train_step)", "lab 10"],
        "function": ["graphs: 1 more (1 × train_step)", "lab 10", "train.kept (4 items"],
        "fit": ["variables: ", "3 × float32 (128, 128)", "lab 11"],
    }.items():
        message = failed[f"test_leak[{leak}]"]
        assert all(part in message for part in wanted), message
        assert "train.history" not in message and "train.cache" not in message, message
    assert all(kind not in failed["test_leak[retrace]"] for kind in ("tensors: ", "arrays: ", "variables: ")), failed[
        "test_leak[retrace]"
    ]
    assert "tensors peaked at 16.0 MiB, over the budget of 8.0 MiB" in failed["test_wide"]
    assert "kept in test_wide() 2.0 MiB" in failed["test_wide"]
    assert re.search(r"of that \d+\.0 MiB .*test_planted.py, line \d+: ", failed["test_wide"])


def test_a_budget_that_cannot_be_checked_does_not_pass(tmp_path):
    found = outcomes(tmp_path, "test_memory.py", "-k", "fits", TF_CPU_ALLOCATOR_USE_BFC="0")
    assert "cannot be checked: TensorFlow's allocator on CPU:0 counts only large blocks" in found["test_an_epoch_fits"]
    assert "TF_CPU_ALLOCATOR_USE_BFC=1" in found["test_an_epoch_fits"]


def test_wrong_use_says_what_to_write():
    with pytest.raises(TypeError, match=r"write assert_no_growth\(step\), not assert_no_growth\(step\(\)\)"):
        assert_no_growth(None)
    with pytest.raises(ValueError, match="n is 3: give at least 8 calls"):
        assert_no_growth(lambda: None, n=3)
    with pytest.raises(BudgetError, match="512 is not a size"):
        with memory_budget(512):
            pass
