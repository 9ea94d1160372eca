"""`python -m labsupport doctor`, as somebody uses it in a terminal."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from labsupport.__main__ import main


def doctor(folder, script, *words, wait=True, name="train.py"):
    """Write a script into a folder and start the doctor on it there."""
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(script)
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(Path(__file__).parents[1]), "COLUMNS": "200"}
    command = [sys.executable, "-m", "labsupport", "doctor", name, "--budget", "64 MiB", *words]
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored, as a shell leaves it in the background, it would be inherited
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    if wait:
        process.out, process.err = process.communicate(timeout=600)  # a hang, also on a busy machine
    return process


def test_a_script_runs_as_python_would_run_it(tmp_path):
    (tmp_path / "names.txt").write_text("cat")
    (tmp_path / "helper.py").write_text("def double(n):\n    return 2 * n\n")
    script = """
        import argparse, sys
        from helper import double
        parser = argparse.ArgumentParser()
        parser.add_argument("--epochs", type=int)
        if __name__ == "__main__":
            print("epochs", double(parser.parse_args().epochs), open("names.txt").read(), __file__)
            sys.exit()
    """
    run = doctor(tmp_path, "\n".join(line[8:] for line in script.splitlines()), "--", "--epochs", "3")
    assert run.returncode == 0, run.err
    assert run.out == f"epochs 6 cat {tmp_path / 'train.py'}\n"  # Python itself makes the path absolute
    assert "there is nothing to tell" in run.err


def test_a_suspect_is_told_by_the_exit_status_that_is_asked_for(tmp_path):
    script = (
        "import tensorflow as tf\nf = tf.function(lambda x, k: x * k)\nfor k in range(20):\n    f(tf.ones([4]), k)\n"
    )
    run = doctor(tmp_path, script, "--exit-code", "--json", "--annotate", "--report", "report.json")
    assert (run.returncode, run.out) == (1, "") and "doctor" not in run.err
    assert "::warning file=train.py,line=2::retracing: tf.function <lambda> (train.py:2) was traced 20 times" in run.err
    told = json.loads((tmp_path / "report.json").read_text())
    (suspect,) = told["suspects"]
    assert suspect["kind"] == "retracing" and "lab 10" in suspect["read"] and "20 times" in suspect["evidence"][0]
    assert told["figures"]["peak"] > 0 and told["cause"] is None


def test_asked_for_lines_it_names_those_that_held_most_at_the_peak(tmp_path):
    script = "import tensorflow as tf\nkept = []\nwhile True:\n    x = tf.ones([512, 512])\n    kept.append(x * 2)\n"
    run = doctor(tmp_path, script, "--lines")
    # While TensorFlow waits nothing is logged; that it waits is said all the same, before it has failed.
    assert 0 < run.err.index("computes nothing just now") < run.err.index("no room for a tensor")
    assert "MiB held by the script (train.py, line 5: kept.append(x * 2))" in run.err
    # What TensorFlow's profiler writes of itself is not the script's.
    assert "rofiler" not in run.out + run.err


@pytest.mark.parametrize(
    ("ending", "status", "words"),
    [
        ("raise ValueError('no such file')", 1, "ValueError: no such file at train.py, line 2"),
        ("import sys; sys.exit(3)", 3, "it ended with exit status 3"),
        ("import os; print('working', flush=True); os._exit(5)", 5, "it ended with exit status 5"),
        (
            "import os; os.kill(os.getpid(), 9)",
            -9,
            "exit status 137\nits process was ended by SIGKILL, by itself or by somebody else",
        ),
    ],
)
def test_a_script_that_fails_ends_as_it_does_by_itself(tmp_path, ending, status, words):
    run = doctor(tmp_path, f"def load():\n    {ending}\n\nload()\n")
    assert run.returncode == status
    report = run.err.partition("doctor: train.py")[2]
    assert words in report and "for another reason than memory" in report
    assert "✔" not in report and "died of memory" not in report


def test_what_looks_like_markup_is_shown_as_it_is(tmp_path):
    run = doctor(tmp_path, "raise ValueError('[/bold] [red]no[/x]')", name="[/x][b].py")
    assert run.returncode == 1
    assert "doctor: starting [/x][b].py" in run.err and "doctor: x][b].py" in run.err
    assert run.err.count("ValueError: [/bold] [red]no[/x]") == 2  # by Python, and in the report


ODD = """
class Odd(type):
    __module__ = property(lambda cls: 1 / 0)

class Closed(metaclass=Odd):
    __class__ = property(lambda self: 1 / 0)
    def __getattribute__(self, name):
        raise RuntimeError(name)

odd = [Closed(), Closed]
closed = Closed()
"""
STEPS = """
for step in range(5):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight ** 2)
    tape.gradient(loss, weight)
print("all steps ran")
"""


def test_odd_objects_do_not_reach_the_script(tmp_path):
    """A variable half made is met while its array is copied; a Cython function and a class that refuses every question are held by name."""
    start = "import numpy as np, tensorflow as tf\nfrom h5py.h5f import is_hdf5\n"
    run = doctor(tmp_path, start + ODD + "weight = tf.Variable(np.ones((512, 512), 'float32'))\n" + STEPS)
    assert run.returncode == 0 and "all steps ran" in run.out, run.out + run.err
    assert "No suspect" in run.err


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["absent.py"], "there is no script absent.py"),
        (["train.py", "--budget", "lots"], 'such as "256 MiB"'),
        (["train.py", "--budget", "1 MiB"], "too small"),
        (["train.py", "--epochs", "3"], "goes after --"),
        (["train.py", "--devices", "0"], "give 1 or more"),
    ],
)
def test_what_cannot_be_done_is_said_at_once(tmp_path, monkeypatch, capsys, words, advice):
    (tmp_path / "train.py").write_text("print('ran')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["labsupport", "doctor", *words])
    with pytest.raises(SystemExit) as end:
        main()
    shown = capsys.readouterr()
    assert end.value.code == 2
    assert advice in shown.err
    assert "ran" not in shown.out


def test_what_keras_does_is_seen_where_tensorflow_is_imported_first(tmp_path):
    """TensorFlow imports Keras itself then, before it is loaded."""
    script = (
        "import tensorflow as tf, keras\nmodel = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\nmodel.evaluate(tf.ones([8, 4]), tf.ones([8, 1]), batch_size=1, verbose=0)\n"
    )
    run = doctor(tmp_path, script, "--json", "--report", "report.json")
    assert run.returncode == 0, run.err
    told = json.loads((tmp_path / "report.json").read_text())
    assert [sentence[:27] for sentence in told["growth"]] == ["evaluate(), tf.function mul"], told["growth"]


def test_another_backend_of_keras_is_said_to_be_out_of_sight(tmp_path):
    """Neither is installed here: the file that Keras' backend is kept in stands for it."""
    run = doctor(
        tmp_path, "import sys, types\nsys.modules['keras.src.backend.config'] = types.SimpleNamespace(_BACKEND='jax')"
    )
    assert run.returncode == 0 and "Keras on jax" in run.err and "cannot see" in run.err and "✔" not in run.err


def test_ctrl_c_ends_the_script_and_leaves_nothing_behind(tmp_path):
    script = "import os, subprocess, time\nhelper = subprocess.Popen(['sleep', '300'])\nprint('pids', os.getpid(), helper.pid, flush=True)\ntime.sleep(300)\n"
    run = doctor(tmp_path, script, wait=False)
    try:
        line = run.stdout.readline()
        assert line.startswith("pids"), run.stderr.read()
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=30) == -signal.SIGINT
        assert "what was seen until then" in run.stderr.read()
    finally:
        run.kill()
        run.communicate()
    ends = time.monotonic() + 10
    pids = [int(word) for word in line.split()[1:]]
    while (
        any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids)
        and time.monotonic() < ends
    ):
        time.sleep(0.1)
    assert not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py"]
