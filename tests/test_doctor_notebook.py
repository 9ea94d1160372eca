"""`python -m labsupport doctor train.ipynb`: the cells do what they do in Jupyter, and are named."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from labsupport.doctor.notebook import read
from labsupport.ground.folders import ArmSetupError

CELLS = [
    "import sys, pathlib\nimport tensorflow as tf\n!echo from the shell\nhere = pathlib.Path().resolve().name",
    "",
    "%%time\nkept = []\nweight = tf.Variable(tf.ones([256, 256]))\nhere",
    "raise KeyError('allowed')",
    "await __import__('asyncio').sleep(0, result=7)",
    "%%capture out\nfor step in range(40):\n    print('step')\n    with tf.GradientTape() as tape:\n"
    "        loss = tf.reduce_sum(weight ** 2)\n    kept.append(tape.gradient(loss, weight))\n",
    "import os, threading\nprint(len(out.stdout), __name__, sys.argv[0].endswith('ipykernel_launcher.py'), sys.path[0])\n"
    "print(get_ipython().execution_count, type(get_ipython()).__name__, file=sys.stderr)\nopen('written.txt', 'w').close()",
    "def load(name):\n    return {}[name]\n\nload('absent')",
    "print('never')",
]


def notebook():
    made = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_markdown_cell("# Title"), *map(nbformat.v4.new_code_cell, CELLS)]
    )
    made.cells[4].metadata["tags"] = ["raises-exception"]
    return made


def by_jupyter(folder):
    """The streams of the notebook, as nbclient runs it in a folder."""
    run = NotebookClient(notebook(), resources={"metadata": {"path": str(folder)}})
    with pytest.raises(CellExecutionError):
        run.execute()
    outputs = [output for cell in run.nb.cells for output in cell.get("outputs", [])]
    streams = "".join(
        output["text"] for output in outputs if output["output_type"] == "stream" and output["name"] == "stdout"
    )
    shown = [output["data"]["text/plain"] for output in outputs if "data" in output]
    return streams, shown


def test_cells_run_as_in_jupyter_and_are_named(tmp_path):
    bare, seen = (tmp_path / name / "n" for name in ("bare", "seen"))
    for folder in (bare, seen):
        folder.mkdir(parents=True)
    nbformat.write(notebook(), seen / "train.ipynb")
    before = (seen / "train.ipynb").read_bytes()
    doctor = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from labsupport.__main__ import main; sys.exit(main())"
    options = ["n/train.ipynb", "--budget", "64 MiB", "--json", "--lines", "--report", "report.json"]
    run = subprocess.Popen(
        [sys.executable, "-c", doctor, "doctor", *options],
        cwd=seen.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    streams, shown = by_jupyter(bare)
    out, err = run.communicate(timeout=300)
    without_times = lambda text: [line for line in text.splitlines() if not line.startswith(("CPU times", "Wall time"))]
    assert set(without_times(out)) == {*without_times(streams), *shown}, err
    assert run.returncode == 1 and "never" not in out
    assert "Cell In[7], line 2, in load(name)" in err and "KeyError: 'absent'" in err and "\x1b[" not in err
    # Nothing but what the cells themselves wrote.
    assert sorted(path.name for path in seen.iterdir()) == ["train.ipynb", "written.txt"]
    assert (seen / "train.ipynb").read_bytes() == before
    told = json.loads((seen.parent / "report.json").read_text())
    assert told["error"] == "KeyError: 'absent' at cell 7, line 2: return {}[name]"
    (suspect,) = told["suspects"]
    assert suspect["kind"] == "retained tensors" and any("kept holds" in words for words in suspect["evidence"])
    assert any("GradientTape (cell 5, line 4): 40 steps" in words for words in told["growth"])
    assert any("(cell 5, line 6: kept.append(tape.gradient(loss, weight)))" in row for row in told["lines"])


def test_what_is_no_notebook_in_python_is_refused(tmp_path):
    other = nbformat.v4.new_notebook(metadata={"kernelspec": {"language": "R", "name": "ir", "display_name": "R"}})
    nbformat.write(other, tmp_path / "r.ipynb")
    (tmp_path / "no.ipynb").write_text("print(1)")
    for name, words in (("r.ipynb", "a notebook in R"), ("no.ipynb", "cannot be read as a notebook")):
        with pytest.raises(ArmSetupError, match=words):
            read(tmp_path / name)


def test_an_interrupt_ends_the_cell_and_the_report_tells_what_was_seen(tmp_path):
    cells = [
        "import tensorflow as tf\nkept = []\nstep = tf.function(lambda x: x * 2)",
        "while True:\n    kept.append(step(tf.ones([64, 256])))\n    if len(kept) == 70:\n        print('begun', flush=True)",
        "print('never')",
    ]
    nbformat.write(nbformat.v4.new_notebook(cells=[*map(nbformat.v4.new_code_cell, cells)]), tmp_path / "train.ipynb")
    command = [sys.executable, "-m", "labsupport", "doctor", "train.ipynb", "--report", "report.txt"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    run = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert run.stdout.readline() == b"begun\n"
    run.send_signal(signal.SIGINT)
    assert run.communicate(timeout=60)[0] == b"" and run.returncode == 1
    report = (tmp_path / "report.txt").read_text()
    assert "what was seen until then" in report and "retained tensors" in report and "kept holds" in report, report
