"""labsupport installed from a wheel, far from the repository, does all that it does within it."""

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LEAK = """
import tensorflow as tf
kept = []
@tf.function
def train_step(x):
    return x + 1
for _ in range(40):
    kept.append(train_step(tf.ones([256, 1024])))
"""
CHECKED = """
def test_growth(assert_no_growth):
    assert_no_growth(lambda: None, n=8)

def test_budget(memory_budget):
    import tensorflow as tf
    with memory_budget("8 MiB") as spent:
        tf.ones([1024, 1024])
    assert 3.9 < spent.peak_mib < 4.5

def test_what_grows_is_named(assert_no_growth):
    import tensorflow as tf
    assert_no_growth(lambda kept=[]: kept.append(tf.ones([256, 256])), n=8)
"""
CELLS = """
%load_ext labsupport
get_ipython().run_cell_magic("memory", "a label", "import tensorflow as tf; t = tf.ones([1024, 1024])")
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The Python of an environment that has the wheel, and beside it all that this one has but labsupport."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv")
    python = folder / "venv" / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    # Not by a path file: then TensorFlow would lie outside of this environment's libraries, as the person's own code does.
    (site,) = folder.glob("venv/lib/python*/site-packages")
    for installed in Path(sysconfig.get_path("purelib")).iterdir():
        if "labsupport" not in installed.name and installed.suffix != ".pth":
            (site / installed.name).symlink_to(installed)
    return python


@pytest.fixture
def asked(python, tmp_path):
    """asked(*words) → what the Python of that environment has to say in a folder of its own."""
    hidden = ("PYTHONPATH", "PYTEST_ADDOPTS", "TF_CPU_ALLOCATOR_USE_BFC")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    env |= {"LABSUPPORT_LEDGER": "off", "IPYTHONDIR": str(tmp_path / "ipython")}

    def ask(*words):
        command = [str(python), *words]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)

    return ask


def test_it_is_the_wheel_that_is_asked_and_it_has_its_data(python, asked):
    code = """
import json, labsupport
from labsupport.ground.files import notebook_file
from labsupport.learner.guide import table
from labsupport.lesson.catalogue import labs, see_lab
from labsupport.lesson.claims import claims
print(json.dumps([labsupport.__file__, len(claims()), len(labs()), table("retracing"), see_lab("leaks_over_epochs"), str(notebook_file("leaks_over_epochs"))]))
"""
    done = asked("-c", code)
    assert done.returncode == 0, done.stderr
    place, claims, labs, table, seen, notebook = json.loads(done.stdout)
    assert Path(place).is_relative_to(python.parents[1])
    known = tomllib.loads((ROOT / "data" / "claims.toml").read_text())
    assert claims == len(known) and labs == len(list((ROOT / "labs").glob("[0-9]*.ipynb")))
    assert "Retracing: a graph for every call" in table
    assert seen == 'see lab 09, "What leaks over epochs"' and notebook == "None"


def test_find_lab_and_the_cell_magic_in_ipython(asked, tmp_path):
    (tmp_path / "cells.ipy").write_text(CELLS + "from labsupport import find_lab\nfind_lab('OOM')\n")
    done = asked("-m", "IPython", "--no-banner", "--colors=NoColor", "cells.ipy")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "%%memory: a label" in done.stdout and "tensors: peak over the level before" in done.stdout, done.stdout
    assert "Run this cell to search the table below" in done.stdout, done.stdout


def test_the_doctor_examines_a_script(asked, tmp_path):
    (tmp_path / "leak.py").write_text(LEAK)
    done = asked("-m", "labsupport", "doctor", "leak.py", "--exit-code", "--budget", "128 MiB", "--html", "page.html")
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stderr.split())
    assert "retained tensors" in said and 'see lab 09, "What leaks over epochs"' in said, done.stdout
    page = (tmp_path / "page.html").read_text()
    assert "retained tensors" in page and "@media (prefers-color-scheme:dark)" in page


def test_a_verdict_follows_from_its_figures(asked):
    code = """
from labsupport.lesson.claims import VerdictError, claims, verdict
known = claims()["C01"]
figures = {name: value for name, value in known["runs"][0].items() if name != "run"}
verdict("C01", "holds", **figures)
try:
    verdict("C01", "holds", **figures | {"eager_died": False})
except VerdictError as error:
    print(error)
"""
    done = asked("-c", code)
    assert done.returncode == 0, done.stderr
    assert "holds" in done.stdout and 'the figures say "partly"' in done.stdout


def test_pytest_has_its_fixtures(asked, tmp_path):
    (tmp_path / "test_it.py").write_text(CHECKED)
    done = asked("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py")
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert 'see lab 09, "What leaks over epochs"' in " ".join(done.stdout.split()), done.stdout
