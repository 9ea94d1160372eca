"""Arms that misbehave: what they do to their pipe, their streams, their folder and their parent never reaches the notebook."""

import ctypes
import json
import linecache
import os
import resource
import signal
import stat
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

from labsupport import measure, run
from labsupport.ground import folders, result
from labsupport.ground.record import Cause


@pytest.fixture(autouse=True)
def nothing_left():
    """After every test: no process, no open file."""
    before = left_behind.descriptors()
    yield
    assert left_behind.processes() == []
    assert left_behind.descriptors() == before


# --- folders


def test_only_folders_with_our_own_mark_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    gone = {"pid": 2**22 + 1, "started": 0.0}  # beyond the largest process id of Linux
    users = tmp_path / "labsupport-2024-notes"
    users.mkdir()
    (users / "thesis.txt").write_text("years of work")
    marked = tmp_path / "labsupport-old"
    marked.mkdir()
    (marked / ".labsupport-arm.json").write_text(json.dumps(gone))
    damaged = tmp_path / "labsupport-damaged"
    damaged.mkdir()
    (damaged / ".labsupport-arm.json").write_text("{")
    (tmp_path / "labsupport-link").symlink_to(marked)
    me = psutil.Process()
    busy = tmp_path / "labsupport-busy"
    busy.mkdir()
    (busy / ".labsupport-arm.json").write_text(json.dumps({"pid": me.pid, "started": me.create_time()}))
    new = folders.temporary_folder()
    assert (users / "thesis.txt").read_text() == "years of work"
    assert not marked.exists() and damaged.exists() and busy.exists() and (new / "tmp").is_dir()
    assert stat.S_IMODE(new.stat().st_mode) == 0o700, "nobody else may look into it"
    folders.remove_folder(new)


def test_what_is_no_utf_8_and_paths_that_are_no_text_go_to_the_arm_as_they_are(tmp_path, monkeypatch):
    folder = tmp_path / os.fsdecode(b"\xff")
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path, str(folder)])
    monkeypatch.setenv("ODD", os.fsdecode(b"\xff"))
    source = ["'\ud800" + 200_000 * "a" + "'\n"]
    monkeypatch.setitem(linecache.cache, "<a cell>", (1, None, source, "<a cell>"))

    def seen():
        assert linecache.getlines("<a cell>") == source
        return os.environb[b"ODD"], os.getcwdb(), [os.fsencode(place) for place in sys.path[-2:]]

    assert measure(seen).value == (b"\xff", os.fsencode(folder), [os.fsencode(tmp_path), os.fsencode(folder)])


def test_a_working_folder_is_gone_when_its_process_has_ended():
    script = "from labsupport import working_folder; print(working_folder())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).name == "tmp" and not Path(done.stdout.strip()).parent.exists()


def test_another_user_s_folder_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / "labsupport-theirs"
    folder.mkdir()
    (folder / ".labsupport-arm.json").write_text(json.dumps({"pid": 2**22 + 1, "started": 0.0}))
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    folders.remove_folder(folders.temporary_folder())
    assert folder.exists()


@pytest.mark.parametrize("trouble", ["no folder", "no room", "current folder deleted"])
def test_where_no_folder_can_be_made_the_cure_is_told(trouble, tmp_path):
    script = {
        "no folder": "import tempfile; tempfile.tempdir = '/no/such/folder'",
        "no room": "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
        "current folder deleted": "import os; os.rmdir(os.getcwd())",
    }[trouble]
    (tmp_path / "here").mkdir()
    code = f"import sys\nfrom labsupport import ArmSetupError, run\n{script}\ntry:\n    run(print)\nexcept ArmSetupError as error:\n    print(error)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "here", env=environment, capture_output=True, text=True, check=True
    )
    assert "set TMPDIR" in done.stdout or "change to another" in done.stdout, done.stdout


# --- the pipe


@pytest.mark.parametrize(
    "written, cause",
    [(b"garbage " * 9, Cause.GARBLED), (b"arm1\xff\x00\x00\x00half", Cause.TIMEOUT)],
    ids=["garbage", "half a record"],
)
def test_what_an_arm_writes_into_our_pipe_neither_hangs_nor_raises(written, cause):
    def writing():
        for number in range(3, 30):
            try:
                if stat.S_ISFIFO(os.fstat(number).st_mode):
                    os.write(number, written)
            except OSError:
                pass
        ctypes.PyDLL(None).sleep(1000)  # with the GIL held

    result = run(writing, timeout=25)
    assert result.error.cause is cause


def test_what_an_arm_forks_does_not_speak_for_it():
    def forking():
        statuses = []
        for end in (lambda: sys.exit(5), lambda: 1 / 0, lambda: None):
            pid = os.fork()
            if not pid:
                return end()  # unwinds to where the arm's own value is sent
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return statuses

    assert measure(forking).value == [5, 1, 0]


def test_large_values_come_back_although_the_budget_outside_is_used_up():
    def large():
        return np.ones(900 * 2**17)

    value = measure(large, outside="1 GiB").value
    assert value.nbytes == 900 * 2**20 and value.min() == 1


def test_interrupting_while_arguments_are_sent_leaves_nothing():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    argument = np.zeros(2**26)  # 512 MiB
    # The second is for one that came while Python ran a destructor, where exceptions are ignored.
    timers = [threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)) for seconds in (2, 20)]
    for timer in timers:
        timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(lambda array: time.sleep(100), argument)
    for timer in timers:
        timer.cancel()


# --- the process


def test_streams_that_are_gone_and_texts_that_cannot_be_made():
    def odd():
        class Odd(Exception):
            def __str__(self):
                raise ValueError

        sys.stdout = None
        sys.stderr.close()
        raise Odd

    error = run(odd).error
    assert error.cause is Cause.ERROR and error.message == "Odd: its text cannot be shown"


def test_a_long_text_is_cut_and_surrogates_are_shown():
    def long():
        raise ValueError("\ud800" + "x" * 40_000_000)

    error = run(long).error
    assert error.message.startswith("ValueError: \\ud800xxx") and len(error.message) < 10_000


def test_endless_recursion_under_a_raised_limit_is_told():
    def recurse(limit):
        def again(number):
            return again(number + 1)

        sys.setrecursionlimit(limit)
        again(0)

    error = run(recurse, 5_000).error
    assert error.cause is Cause.ERROR and "nested calls: endless recursion?" in error.message
    assert "endless" not in run(recurse, 1_500).error.message  # about Python's own limit, whose error says it already


def test_endless_output_at_the_end_does_not_hold_the_result_up():
    def writing():
        def loop():
            while True:
                print("x" * 1000)

        threading.Thread(target=loop, daemon=True).start()
        time.sleep(0.5)
        return "done"

    result = run(writing, quiet=True)
    assert result.value == "done" and result.output.startswith("… (the beginning was cut)") and len(result.output) < 3e6


def test_arguments_larger_than_the_budget_outside_say_so():
    result = run(lambda array: array.sum(), np.zeros(700 * 2**17), outside="512 MiB")
    assert result.error.cause is Cause.MEMORY and "its arguments, when they were unpacked" in result.error.message


def test_a_function_that_cannot_be_read_there_says_so(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def function():\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    monkeypatch.undo()
    result = run(only_here.function)
    assert result.error.cause is Cause.SETUP and "only_here" in result.error.message


def test_arguments_are_no_part_of_what_an_arm_leaves():
    result = measure(lambda array: None, np.ones(2**23))  # 64 MiB
    assert abs(result.process_end_mib) < 16 and result.process_peak_mib < 16


def test_errors_that_the_function_caught_are_counted():
    def careful():
        import tensorflow as tf

        for _ in range(2):
            try:
                tf.ones([2**26])
            except tf.errors.ResourceExhaustedError:
                pass

    assert len(measure(careful, budget="64 MiB").dumps) == 2


def test_shared_pages_count_once():
    def forking():
        array = np.ones(2**26)  # 512 MiB
        pids = []
        for _ in range(8):
            pid = os.fork()
            if not pid:
                array.sum()
                time.sleep(100)
            pids.append(pid)
        time.sleep(2)
        return len(pids)

    # Eight resident sets of 512 MiB, all of the same pages: summed they would be beyond every budget here.
    assert measure(forking, budget="256 MiB", outside="1 GiB").value == 8


def test_an_arm_is_the_first_that_the_system_ends_when_memory_runs_out():
    def adjusted():
        return Path("/proc/self/oom_score_adj").read_text().strip(), Path(
            f"/proc/{os.getppid()}/oom_score_adj"
        ).read_text().strip()

    before = Path("/proc/self/oom_score_adj").read_text().strip()
    assert measure(adjusted).value == ("1000", before)


def test_it_stays_a_limit_for_root_too():
    limits = measure(lambda: resource.getrlimit(resource.RLIMIT_DATA), budget="256 MiB", outside="512 MiB").value
    assert limits[0] < 2 * 2**30


@pytest.mark.parametrize("folder, own", [("my-packages", True), ("site-packages", False)])
def test_a_folder_of_libraries_is_told_from_one_of_a_similar_name(folder, own, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path / folder)
    result.libraries.cache_clear()
    assert result.is_own(str(tmp_path / folder / "train.py")) is own
    assert not result.is_own(np.__file__) and not result.is_own(os.__file__)
    assert result.is_own("Cell In[4]") and result.is_own("train.py")
    result.libraries.cache_clear()
