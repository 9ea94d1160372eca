"""Arms: known bytes are measured as such, every way to fail is told clearly, and nothing is left behind.

Functions that run in an arm are defined inside the tests: so they travel by value, as a notebook's do.
"""

import ctypes
import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import left_behind
import numpy as np
import psutil
import pytest
from browser import wait_for

from labsupport import ArmSetupError, expect_finished, expect_oom, measure, phase, reading, run
from labsupport.ground.arm import crashed_at
from labsupport.ground.budget import MIB
from labsupport.ground.record import Cause
from labsupport.ground.result import Stopped, place


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


@pytest.fixture(autouse=True)
def nothing_left():
    """After every test: no process and no new folder. A lab whose cells another test ran here keeps its own until the worker ends."""
    before = left_behind.folders(os.getpid())
    yield
    assert left_behind.processes() == []
    assert left_behind.folders(os.getpid()) == before


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
    result = measure(tensors, budget="1 GiB")
    now, one = result.value
    first, second = result.phases
    assert one == 1.0 and now == pytest.approx(64, abs=2)
    assert (first.name, second.name) == ("64 MiB", "three of them")
    assert (first.level_mib, first.peak_mib, first.held_mib, first.added_mib) == pytest.approx((0, 64, 64, 64), abs=2)
    assert (second.peak_mib, second.rise_mib, second.held_mib) == pytest.approx((192, 128, 64), abs=2)
    assert result.phase("three of them") is second
    assert result.peak_mib == pytest.approx(192, abs=2)
    assert result.end_mib < 2, "the function has returned: its tensors are gone"
    assert 0 <= first.start <= first.end <= second.start <= second.end <= result.seconds
    assert max(size for _, size in result.tensors) <= result.figures["peak"], "a sample above the exact peak"


def test_known_bytes_of_python_held_too_briefly_for_a_sampler():
    def objects():
        len(b"x" * 300_000_000)  # made and dropped in one expression, while the GIL is held

    result = measure(objects)
    assert result.process_peak_mib == pytest.approx(300e6 / MIB, rel=0.05)
    assert result.process_end_mib < 30
    assert result.peak_mib < 1, "TensorFlow's allocator does not see Python objects"


def test_an_arm_is_a_process_of_its_own_with_everything_brought_back():
    def facts(array):
        import tensorflow as tf

        print("to the notebook" + "." * 300_000)
        print("to the log" * 300_000, file=sys.stderr)  # more than a pipe holds: it must not block
        try:
            read = input()
        except EOFError:
            read = "end of file"
        return (
            os.getpid(),
            tempfile.gettempdir(),
            os.environ["MARK"],
            len(tf.config.list_logical_devices("CPU")),
            read,
            array * 2,
        )

    sent = np.arange(4_000_000)
    result = measure(facts, sent, env={"MARK": "set"}, logical_devices=2, label="facts")
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
    result = measure(nothing, env={"TF_CPU_ALLOCATOR_USE_BFC": "0", "TF_ENABLE_ONEDNN_OPTS": "0"})
    assert (result.peak_mib, result.end_mib, result.tensors) == (None, None, [])
    assert "Tensors: peak unavailable, at the end unavailable" in str(result)


def test_a_budget_is_one_region_or_grows_and_the_allocator_tells_which():
    def eight_mib():
        import tensorflow as tf

        tf.ones([8, 2**18])

    tell = {"TF_CPP_VMODULE": "bfc_allocator=1"}
    one = measure(eight_mib, budget="64 MiB", env=tell)
    grown = measure(eight_mib, budget="64 MiB", env={**tell, "TF_FORCE_GPU_ALLOW_GROWTH": "true"})
    assert one.reserved_mib == 64
    # Regions begin at 2 MiB and double until one holds what is asked for.
    assert 8 <= max(grown.regions) / MIB <= grown.reserved_mib < 32
    assert measure(eight_mib, budget="64 MiB").reserved_mib is None, "nobody asked the allocator to tell"


# --- out of memory


def test_out_of_memory_is_real_and_told_in_words():
    def greedy():
        import tensorflow as tf

        kept = [tf.ones([4, 2**18]) for _ in range(10)]
        with phase("the second"):
            more = tf.ones([48, 2**18])  # this line
        return kept, more

    result = run(greedy, budget="64 MiB", label="greedy")
    expect_oom(result)
    error = result.error
    assert (result.outcome, error.cause, result.value) == ("OOM", Cause.OOM, None)
    assert result.wanted == 48 * MIB and result.dumps == [40 * MIB]
    assert "[48, 262144], float = 48.0 MiB, with 40.0 MiB in use of a budget of 64.0 MiB" in error.message
    line = error.frames[-1]
    assert (line.place, line.function) == ("tests/test_arm.py", "greedy")
    assert line.source == "more = tf.ones([48, 2**18])  # this line"
    assert "ResourceExhaustedError" in error.traceback and "bfc_allocator" in error.log
    assert 40 <= result.peak_mib <= 64 and result.phases[0].name == "the second", "the figures until then are kept"
    with pytest.raises(RuntimeError, match='the arm "greedy" did not finish: Out of memory'):
        expect_finished(result)


def test_numpy_beyond_the_outside_budget_is_a_memory_error():
    def greedy():
        return float(np.ones(2**28).sum())  # 2 GiB

    result = run(greedy, outside="512 MiB")
    expect_oom(result)
    assert result.error.cause is Cause.MEMORY
    assert "Out of memory outside TensorFlow's allocator" in result.error.message
    assert result.error.frames[-1].source.startswith("return float(np.ones(2**28)")
    assert result.process_peak_mib < 600


@pytest.mark.parametrize("library, cause", [("numpy", Cause.MEMORY), ("tensorflow", Cause.OOM)])
def test_what_runs_out_inside_a_generator_of_a_pipeline_is_told_as_outside_of_it(library, cause):
    def greedy():
        import tensorflow as tf

        def rows():
            yield np.ones(2**28)[:1] if library == "numpy" else tf.ones(2**28)[:1]  # 2 GiB, 1 GiB

        return len(list(tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([1]))))

    assert run(greedy, budget="64 MiB", outside="512 MiB").error.cause is cause


def test_an_expected_failure_that_does_not_come_fails():
    def modest():
        return 1

    def wrong():
        raise KeyError("not memory")

    with pytest.raises(
        AssertionError, match='"modest" was expected to run out of memory, but it finished with a peak of'
    ):
        expect_oom(run(modest, budget="64 MiB"))
    with pytest.raises(AssertionError, match="but: KeyError: 'not memory' at .*test_arm.py, line .*raise KeyError"):
        expect_oom(run(wrong, budget="64 MiB"))


# --- what cannot be sent, started or brought back


@pytest.mark.parametrize(
    "attempt, message",
    [
        (
            lambda: run(3),
            "run\\(\\) needs a function and its arguments, not int: write run\\(f, x\\), not run\\(f\\(x\\)\\)",
        ),
        (
            lambda: run(lambda lock: 1, threading.Lock(), label="locked"),
            "locked cannot be sent .* create that inside the function",
        ),
        (
            lambda: run(lambda a, b: 1, 1, label="add"),
            "add does not take these arguments: missing a required argument: 'b'",
        ),
        (lambda: run(print, budget="lots"), "'lots' is not a size"),
        (lambda: run(print, budget="-5 MiB"), "'-5 MiB' is not a size"),
        (lambda: run(print, budget="900000 GiB"), "more than this machine has"),
        (lambda: run(print, outside="much"), "'much' is not a size"),
        (lambda: run(print, outside="100000 GiB"), "more than this machine has"),
        (lambda: run(print, budget="15.99 MiB"), "a budget of 15.99 MiB is too small"),
        (lambda: run(print, timeout=None), "timeout is None: give a number of seconds"),
        (lambda: run(print, timeout="5"), "timeout is '5': give a number of seconds"),
        (lambda: run(print, env={"A": 1}), "names and values are text"),
        (lambda: run(print, env={"A": "1\0"}), "text without null characters"),
        (lambda: run(print, env={"A=B": "1"}), "names have no ="),
        (lambda: run(print, env={"": "1"}), "names and values are text"),
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
    assert (result.error.cause, result.outcome) == (Cause.ERROR, "error")
    assert "No space left on device" in result.error.message

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    with pytest.raises(ArmSetupError, match="No space left on device.*free some disk space or set TMPDIR"):
        run(write)


def test_a_value_that_cannot_come_back_keeps_the_figures_and_runs_nothing_here(tmp_path):
    def evil():
        import tensorflow as tf

        class Evil:
            def __reduce__(self):
                return os.mkdir, (str(tmp_path / "made"),)

        tf.ones([64, 2**18])
        print("so far so good")
        return {"one": [Evil()]}

    result = run(evil)
    assert (result.error.cause, result.value) == (Cause.NO_VALUE, None)
    assert "its return value['one'][0] is a Evil; return numbers, text, NumPy arrays" in result.error.message
    assert result.peak_mib == pytest.approx(64, abs=2) and result.output == "so far so good\n"
    assert not (tmp_path / "made").exists(), "an object's code was run"


# --- ends


@pytest.mark.parametrize(
    "end, cause, words",
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), Cause.KILLED, "died of SIGKILL: somebody ended it"),
        (lambda: os.killpg(0, signal.SIGTERM), Cause.KILLED, "died of SIGTERM"),
        (lambda: os.abort(), Cause.CRASH, "died of SIGABRT: compiled code crashed"),
        (lambda: os._exit(7), Cause.EXIT, "ended by itself with exit code 7"),
    ],
    ids=["killed", "terminated", "aborted", "exited"],
)
def test_an_arm_that_dies(end, cause, words):
    def dying():
        print("last words", flush=True)
        with phase("before"):
            pass
        end()

    result = run(dying)
    assert result.error.cause is cause and words in result.error.message
    assert not result.error.cause.of_memory, "nothing says that memory ran out"
    assert result.output == "last words\n" and result.phases[0].name == "before", "what it reported before is kept"


def test_an_oom_that_keras_made_a_type_error_of_is_one():
    def nested():
        import keras

        class Head(keras.layers.Layer):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(4096)

            def call(self, x):
                return self.dense(x)

        Head()(keras.Input((4096,)))

    error = run(nested, budget="96 MiB").error
    assert error.cause is Cause.OOM and "no room for a tensor of shape [4096, 4096]" in error.message


def test_a_crash_right_after_the_allocator_ran_out_is_a_death_of_memory():
    def crashing():
        import tensorflow as tf

        try:
            tf.ones([2**26])
        except tf.errors.ResourceExhaustedError:
            os.kill(os.getpid(), signal.SIGSEGV)  # as TensorFlow 2.21 does in oneDNN kernels

    result = run(crashing, budget="64 MiB")
    assert result.error.cause is Cause.CRASH_OUT and result.error.cause.of_memory
    assert len(result.dumps) == 1 and result.wanted == 256 * MIB


def test_an_arm_that_hangs():
    def hanging():
        ctypes.PyDLL(None).sleep(1000)  # with the GIL held, so that no thread of the arm could end it

    began = time.monotonic()
    result = run(hanging, timeout=30)
    assert (
        result.error.cause is Cause.TIMEOUT and "ended after 30 s; give run() a longer timeout" in result.error.message
    )
    assert time.monotonic() - began < 40


@pytest.mark.parametrize("how", ["returns", "exits", "is killed", "becomes a daemon"])
def test_nothing_that_an_arm_started_survives_it(how, tmp_path):
    def starting():
        # A session of its own and no environment: neither a process group nor a variable would find it.
        pids = [subprocess.Popen(["sleep", "1000"], start_new_session=True, env={}).pid]
        if how == "becomes a daemon" and os.fork():
            os._exit(0)
        (tmp_path / "pids").write_text(" ".join(map(str, [*pids, os.getpid()])))
        if how == "exits":
            os._exit(0)
        if how == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "becomes a daemon":
            os.setsid()
            time.sleep(1000)

    run(starting)
    if how != "becomes a daemon" or (tmp_path / "pids").exists():  # ended before it could write is as good
        assert not any(alive(int(pid)) for pid in (tmp_path / "pids").read_text().split())


def test_interrupting_ends_the_arm(tmp_path):
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell that starts the tests in the background has it ignored

    def endless():
        (tmp_path / "pid").write_text(str(os.getpid()))
        while True:
            time.sleep(0.1)

    def interrupt():
        wait_for((tmp_path / "pid").exists, 120, "the arm's number")
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(Stopped, match='you interrupted "endless"') as caught:
        run(endless)
    assert caught.value._render_traceback_() == [str(caught.value)], "a notebook shows a sentence, not our inside"
    assert not alive(int((tmp_path / "pid").read_text()))


def test_when_the_kernel_is_killed_the_arm_dies_too_and_its_folder_is_swept_later(tmp_path):
    script = tmp_path / "kernel.py"
    script.write_text(
        "import ctypes, os, subprocess, sys\nfrom labsupport import run\n"
        "def endless(out):\n"
        "    child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    open(out + '.new', 'w').write(f'{os.getpid()} {child.pid}')\n"
        "    os.rename(out + '.new', out)\n"
        "    ctypes.PyDLL(None).sleep(1000)\n"  # with the GIL held
        "run(endless, sys.argv[1])\n"
    )
    kernel = subprocess.Popen([sys.executable, script, tmp_path / "pids"])
    wait_for((tmp_path / "pids").exists, 120, "the arm's number and its child's")
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert all(map(alive, pids)) and left_behind.folders(kernel.pid)
    kernel.kill()
    kernel.wait()
    wait_for(lambda: not any(map(alive, pids)), 2, "the end of the arm and of its child")

    def nothing():
        pass

    run(nothing)
    assert left_behind.folders(kernel.pid) == []


def test_files_of_python_and_of_packages_are_named_without_the_folders_of_a_machine():
    import multiprocessing.pool

    import keras

    assert place(multiprocessing.pool.__file__) == "multiprocessing/pool.py"
    assert place(keras.__file__) == "keras/__init__.py"


def test_a_crash_is_told_by_the_thread_that_crashed_or_by_the_main_one():
    other = 'Thread 0x01 (most recent call first):\n  File "other.py", line 3 in wait\n'
    main = 'Thread 0x02 (most recent call first):\n  File "train.py", line 9 in step\n  File "train.py", line 12 in <module>\n'
    assert [line.number for line in crashed_at(f"Segmentation fault\n\n{other}\n{main}")] == [12, 9]
    assert [line.number for line in crashed_at(f"Segmentation fault\n\nCurrent t{other[1:]}\n{main}")] == [3]
    assert (
        crashed_at("Segmentation fault\n\nCurrent thread 0x03 (most recent call first):\n  <no Python frame>\n") == []
    )
