"""How the tests run side by side, and what nbval needs on top to run the labs."""

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections import Counter
from pathlib import Path
from queue import Empty
from unittest import mock

import nbval.kernel
import psutil
import pytest
import reuse
import roots
from browser import jupyterlab
from nbval.kernel import RunningKernel
from nbval.plugin import IPyNbCell
from xdist.scheduler import LoadScopeScheduling

from labsupport.ground.budget import machine_memory
from labsupport.lesson.exercises import EXERCISE_MIME

os.environ["LABSUPPORT_LEDGER"] = "off"  # tests and the kernels that they start write to nobody's ledger
_LOOK_SECONDS = 1
_LONG = ("test_trying.py", "_told_why[22_capstone]", "reported[constant_in_graph]")  # a minute or more each
_SLOWEST = 20  # files that are listed with their seconds
_ONE_WORKER = 3 * 2**30  # a kernel and an arm with TensorFlow each, and the largest budget in the tests


@pytest.fixture
def shown(monkeypatch):
    """What was displayed, as a list of MIME bundles."""
    bundles = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: bundles.append(data))
    return bundles


def pytest_xdist_auto_num_workers(config):
    """For `-n auto`. Three more than cores, since an arm that runs out of memory sleeps for ten seconds."""
    free = min(psutil.virtual_memory().available, machine_memory())
    return max(1, min((os.cpu_count() or 1) + 3, free // _ONE_WORKER))


class TogetherWhereTheyBelong(LoadScopeScheduling):
    """Every test goes to the next free worker, but what shares a kernel, a server or one measured baseline stays together.

    In place of xdist_group marks, which xdist 3.8 ignores under pytest 9.2 (pytest-xdist issue 1386). Groups with
    the most tests start first, which are the notebooks.
    """

    def _split_scope(self, nodeid):
        file = nodeid.split("::")[0]
        together = (
            ".ipynb",
            "test_book.py",
            "test_browser.py",
            "test_capstone.py",
            "test_classroom.py",
            "test_looks.py",
            "test_notebook_runs.py",
        )
        return file if file.endswith(together) else nodeid


def pytest_xdist_make_scheduler(config, log):
    return TogetherWhereTheyBelong(config, log)


def pytest_collection_modifyitems(items):
    """What takes minutes begins before other tests of its size, or the run would end with it alone.

    Of the doctor's tests every second sleeps for ten seconds, as long as TensorFlow waits before an error. In the order of
    their names all workers would sleep at once, so they are mixed with each other and with the answers, which compute.
    """
    places = {}

    def order(item):
        file = item.path.name
        mixed = file in ("test_cases.py", "test_doctor.py") or "_told_why[" in item.name
        place = places.setdefault("mixed" if mixed else file, len(places))
        return not any(long in item.nodeid for long in _LONG), place, hashlib.md5(item.name.encode()).digest() * mixed

    items.sort(key=order)


def pytest_configure(config):
    if not hasattr(config, "workerinput"):  # the workers and their kernels inherit both variables
        folder = Path(tempfile.mkdtemp(prefix="labs-tests-"))
        startup = folder / "ipython" / "profile_default" / "startup"
        startup.mkdir(parents=True)
        (startup / "00-reuse.py").write_text(reuse.STARTUP)
        (folder / "arms").mkdir()
        (folder / "traces").mkdir()
        os.environ |= {"IPYTHONDIR": str(folder / "ipython"), reuse.FOLDER: str(folder / "arms")}
        config.roots = roots.plant(folder)
    roots.share_kernels()
    # A conftest's hooks see only the items of its own folder; as a plugin they see the notebooks in labs/ too.
    config.pluginmanager.register(NotebookRuns())


@pytest.fixture(autouse=True)
def environment_as_before():
    """What a test sets, as by lab.load_tensorflow(), its worker's later kernels would inherit, and so have no root in common."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="module", autouse=True)
def nurseries_from_the_roots(request):
    """But not where a test asks what its arms leave behind: what a root has forked is no child of this process."""
    with contextlib.nullcontext() if hasattr(request.module, "left_behind") else roots.shared_nurseries():
        yield


@pytest.fixture(scope="module")
def server(course):
    """jupyterlab() over the folder that a module's own fixture `course` has filled."""
    with jupyterlab(course) as server:
        yield server


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        for root in config.roots:
            root.kill()
            root.wait()
        shutil.rmtree(Path(os.environ.pop(reuse.FOLDER)).parent, ignore_errors=True)


def pytest_terminal_summary(terminalreporter):
    """Where the time went, how many arms ran, and the doctor's table: what the trouble was, and what it named first."""
    ran, again = reuse.count()
    if ran:
        terminalreporter.line(f"{ran} arms ran in notebooks, {again} took the result of an equal one")
    seconds = Counter()
    for report in (report for group in terminalreporter.stats.values() for report in group):
        if hasattr(report, "nodeid"):
            seconds[report.nodeid.split("::")[0]] += getattr(report, "duration", 0)
    terminalreporter.section("seconds, by file")
    for file, took in seconds.most_common(_SLOWEST):
        terminalreporter.line(f"{took:6,.0f} {file}")
    reports = [report for group in ("passed", "failed") for report in terminalreporter.stats.get(group, [])]
    pairs = Counter(tuple(value) for report in reports for name, value in report.user_properties if name == "doctor")
    if pairs:
        terminalreporter.section("doctor: trouble → named first, runs")
        for (trouble, named), number in sorted(pairs.items()):
            terminalreporter.line(f"{trouble:25} → {named:25} {number:3}" + ("" if trouble == named else "  WRONG"))
    harm = [value for report in reports for name, value in report.user_properties if name == "harm"]
    if harm:
        terminalreporter.section(f"do no harm: what differs under the doctor, {len(harm)} scripts")
        for name, differs in harm:
            terminalreporter.line(f"{name:45} {differs}")


class NotebookRuns:
    """Checks that the exercises of an unsolved lab fail, and helpfully."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        result = yield
        if isinstance(item, IPyNbCell):
            committed, now = _exercises(item.cell.outputs), _exercises(item.test_outputs)
            assert [e["number"] for e in now] == [e["number"] for e in committed], (
                "other exercises than in the committed notebook"
            )
            for facts in now:
                assert not facts["passed"], f"exercise {facts['number']} passes although nobody has solved it"
                assert facts["reason"] and facts["hints"], (
                    f"exercise {facts['number']} fails without telling why, or without a hint"
                )
        return result


def _exercises(outputs):
    return [output["data"][EXERCISE_MIME] for output in outputs if EXERCISE_MIME in output.get("data", {})]


# nbval waits for a dead kernel until the cell's time is up. Look every second whether it lives.
_get_message, _execute = RunningKernel.get_message, RunningKernel.execute_cell_input


def _get_message_or_die(self, stream, timeout=None):
    end = time.monotonic() + (float("inf") if timeout is None else timeout)
    while True:
        try:
            return _get_message(self, stream, timeout=min(_LOOK_SECONDS, max(end - time.monotonic(), 0)))
        except Empty:
            if not self.is_alive():
                raise RuntimeError(
                    f"the kernel died while it ran this cell:\n{getattr(self, 'running', '(starting)')}"
                ) from None
            if time.monotonic() >= end:
                raise


def _execute_and_remember(self, cell_input, allow_stdin=None):
    self.running = cell_input
    return _execute(self, cell_input, allow_stdin=allow_stdin)


nbval.kernel.pformat = lambda message: message  # for a log that nobody reads: half a second a notebook
RunningKernel.get_message, RunningKernel.execute_cell_input = _get_message_or_die, _execute_and_remember
