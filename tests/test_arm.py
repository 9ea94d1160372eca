"""Arms: known bytes are measured as such, every way to fail is told clearly, and nothing is left behind.

Functions that run in an arm are defined inside the tests: so they travel by value, as a notebook's do.
"""

import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from labsupport import ArmSetupError, expect_oom, phase, reading, run
from labsupport.ground.budget import MIB


def wait_for(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not so within {seconds} s"
        time.sleep(0.05)


def folders(pid):
    return list(Path(tempfile.gettempdir()).glob(f"labsupport-{pid}-*"))


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture(autouse=True)
def nothing_left():
    """After every test: no process and no folder of an arm."""
    yield
    assert psutil.Process().children(recursive=True) == []
    assert folders(os.getpid()) == []


# --- what is measured


def test_known_bytes_of_tensors_in_phases():
    def tensors():
        import tensorflow as tf

        with phase("64 MiB"):
            kept = tf.ones([64, 2**18])
        with phase("three of them"):
            tf.stack([kept, kept])
        return reading().tensors_mib, float(kept[0, 0])

    # Far more budget than needed: a chunk is split only where twice the size or 128 MiB are left (core/framework/
    # bfc_allocator.cc in TensorFlow); otherwise the whole chunk counts.
    result = run(tensors, budget="1 GiB").need()
    now, one = result.value
    first, second = result.phases
    assert one == 1.0 and now == pytest.approx(64, abs=2)
    assert (first.name, second.name) == ("64 MiB", "three of them")
    assert first.peak / MIB == pytest.approx(64, abs=2) and first.held / MIB == pytest.approx(64, abs=2)
    assert second.peak / MIB == pytest.approx(192, abs=2) and second.held / MIB == pytest.approx(64, abs=2)
    assert result.peak_mib == pytest.approx(192, abs=2)
    assert result.end_mib < 2, "the function has returned: its tensors are gone"
    assert 0 <= first.start <= first.end <= second.start <= second.end <= result.seconds
    assert max(size for _, size in result.tensors) <= result.figures["peak"], "a sample above the exact peak"


def test_known_bytes_of_python_held_too_briefly_for_a_sampler():
    def objects():
        len(b"x" * 300_000_000)  # made and dropped in one expression, while the GIL is held

    result = run(objects).need()
    assert result.process_peak_mib == pytest.approx(300e6 / MIB, rel=0.05)
    assert result.process_end_mib < 30
    assert result.peak_mib < 1, "TensorFlow's allocator does not see Python objects"


def test_an_arm_is_a_process_of_its_own_with_everything_brought_back(tmp_path):
    def facts(array):
        import tensorflow as tf

        print("to the notebook" + "." * 300_000)
        print("to the log" * 300_000, file=sys.stderr)  # more than a pipe holds: it must not block
        try:
            read = input()
        except EOFError:
            read = "end of file"
        return os.getpid(), tempfile.gettempdir(), os.environ["MARK"], len(tf.config.list_logical_devices("CPU")), read, array * 2

    sent = np.arange(4_000_000)
    result = run(facts, sent, env={"MARK": "set"}, logical_devices=2, label="facts").need()
    pid, folder, mark, devices, read, doubled = result.value
    assert pid != os.getpid() and not alive(pid)
    assert not Path(folder).exists(), "its temporary folder is still there"
    assert (mark, devices, read) == ("set", 2, "end of file")
    assert np.array_equal(doubled, sent * 2)
    assert result.output.startswith("to the notebook") and len(result.output) > 300_000
    assert str(result).startswith("facts: finished after ")


def test_what_cannot_be_read_is_unavailable_never_zero():
    def nothing():
        pass

    # TensorFlow's plain allocator keeps no statistics.
    result = run(nothing, env={"TF_CPU_ALLOCATOR_USE_BFC": "0", "TF_ENABLE_ONEDNN_OPTS": "0"}).need()
    assert (result.peak_mib, result.end_mib, result.tensors) == (None, None, [])
    assert "Tensors: peak unavailable, at the end unavailable" in str(result)


# --- out of memory


def test_out_of_memory_is_real_and_told_in_words():
    def greedy():
        import tensorflow as tf

        kept = [tf.ones([4, 2**18]) for _ in range(10)]
        with phase("the second"):
            more = tf.ones([48, 2**18])  # this line
        return kept, more

    result = run(greedy, budget="64 MiB", label="greedy")
    error = expect_oom(result)
    assert (result.outcome, error.kind, result.value) == ("OOM", "oom", None)
    assert "[48, 262144], float = 48.0 MiB, with 40.0 MiB in use of a budget of 64.0 MiB" in error.message
    place, line, source = error.frames[-1]
    assert place == "tests/test_arm.py" and source == "more = tf.ones([48, 2**18])  # this line"
    assert "ResourceExhaustedError" in error.traceback and "bfc_allocator" in error.log
    assert 40 <= result.peak_mib <= 64 and result.phases[0].name == "the second", "the figures until then are kept"
    assert "this line" in error._repr_html_() and "<details>" in error._repr_html_()
    with pytest.raises(RuntimeError, match='the arm "greedy" did not finish: Out of memory'):
        result.need()


def test_numpy_beyond_the_outside_budget_is_a_memory_error():
    def greedy():
        return float(np.ones(2**28).sum())  # 2 GiB

    result = run(greedy, outside="512 MiB")
    assert expect_oom(result).kind == "memory"
    assert "Out of memory outside TensorFlow's allocator" in result.error.message
    assert result.error.frames[-1][2].startswith("return float(np.ones(2**28)")
    assert result.process_peak_mib < 600


def test_an_expected_failure_that_does_not_come_fails():
    def modest():
        return 1

    def wrong():
        raise KeyError("not memory")

    with pytest.raises(AssertionError, match='"modest" was expected to run out of memory, but it finished with a peak of 0.0 MiB'):
        expect_oom(run(modest, budget="64 MiB"))
    with pytest.raises(AssertionError, match="but: KeyError: 'not memory' at .*test_arm.py, line .*raise KeyError"):
        expect_oom(run(wrong, budget="64 MiB"))


# --- what cannot be sent, started or brought back


@pytest.mark.parametrize(
    "attempt, message",
    [
        (lambda: run(3), "run\\(\\) needs a function and its arguments, not int: write run\\(f, x\\), not run\\(f\\(x\\)\\)"),
        (lambda: run(lambda lock: 1, threading.Lock(), label="locked"), "locked cannot be sent .* create that inside the function"),
        (lambda: run(lambda a, b: 1, 1, label="add"), "add does not take these arguments: missing a required argument: 'b'"),
        (lambda: run(print, budget="lots"), "'lots' is not a size"),
        (lambda: run(print, budget="-5 MiB"), "'-5 MiB' is not a size"),
        (lambda: run(print, budget="900000 GiB"), "more than this machine has"),
        (lambda: run(print, outside="much"), "'much' is not a size"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(attempt, message):
    began = time.monotonic()
    with pytest.raises(ValueError, match=message):  # ArmSetupError and BudgetError are ValueErrors
        attempt()
    assert time.monotonic() - began < 1


def test_a_full_disk(monkeypatch):
    def write():
        with open("/dev/full", "w") as file:  # a device on which every write finds the disk full
            file.write("x" * 10_000)

    result = run(write)
    assert (result.error.kind, result.outcome) == ("exception", "error")
    assert "No space left on device" in result.error.message

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(ArmSetupError, match="No space left on device.*free some disk space or set TMPDIR"):
        run(write)


def test_a_value_that_cannot_be_sent_back_keeps_the_figures():
    def lock():
        import tensorflow as tf

        tf.ones([64, 2**18])
        print("so far so good")
        return threading.Lock()

    result = run(lock)
    assert (result.error.kind, result.value) == ("unpicklable", None)
    assert "its return value (lock) cannot be sent back" in result.error.message
    assert "return numbers, strings or NumPy arrays" in result.error.message
    assert result.peak_mib == pytest.approx(64, abs=2) and result.output == "so far so good\n"


def test_a_value_that_cannot_be_read_here_keeps_the_figures():
    def odd():
        class Odd:
            def __reduce__(self):
                return int, ("no number",)  # pickles well; int("no number") fails where it is unpickled

        return Odd()

    result = run(odd)
    assert (result.error.kind, result.value) == ("unpicklable", None)
    assert "return numbers, strings or NumPy arrays" in result.error.message
    assert result.peak_mib is not None


# --- ends


@pytest.mark.parametrize(
    "end, message",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "died of SIGKILL: .* out-of-memory killer"),
        (lambda: os.abort(), "died of SIGABRT"),
        (lambda: os._exit(7), "ended by itself with exit code 7"),
    ],
    ids=["killed", "aborted", "exited"],
)
def test_an_arm_that_dies(end, message):
    def dying():
        print("last words", flush=True)
        with phase("before"):
            pass
        end()

    result = run(dying, timeout=20)
    assert result.error.kind == "killed"
    assert pytest.raises(RuntimeError, result.need).match(message)
    assert result.output == "last words\n" and result.phases[0].name == "before", "what it reported before is kept"


def test_an_arm_that_hangs():
    def hanging():
        sum(range(10**12))  # holds the GIL, so that no thread of the arm could end it

    began = time.monotonic()
    result = run(hanging, timeout=10)
    assert result.error.kind == "timeout" and "ended after 10 s; give run() a longer timeout" in result.error.message
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("own_session", [False, True])
def test_an_arm_that_starts_processes(own_session):
    def starting():
        return subprocess.Popen(["sleep", "1000"], start_new_session=own_session).pid

    result = run(starting).need()
    wait_for(lambda: not alive(result.value), 2)


def test_interrupting_ends_the_arm(tmp_path):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in the background has it ignored

    def endless():
        (tmp_path / "pid").write_text(str(os.getpid()))
        while True:
            time.sleep(0.1)

    def interrupt():
        wait_for((tmp_path / "pid").exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run(endless)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_when_the_kernel_is_killed_the_arm_dies_too_and_its_folder_is_swept_later(tmp_path):
    script = tmp_path / "kernel.py"
    script.write_text(
        "import os, subprocess, sys\nfrom labsupport import run\n"
        "def endless(out):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        "    open(out + '.new', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "    os.rename(out + '.new', out)\n"
        "    sum(range(10**12))\n"  # holds the GIL
        "run(endless, sys.argv[1])\n"
    )
    kernel = subprocess.Popen([sys.executable, script, tmp_path / "pids"])
    wait_for((tmp_path / "pids").exists)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(map(alive, pids)) and folders(kernel.pid)
    kernel.kill()
    kernel.wait()
    wait_for(lambda: not any(map(alive, pids)), 2)

    def nothing():
        pass

    run(nothing)
    assert folders(kernel.pid) == []
