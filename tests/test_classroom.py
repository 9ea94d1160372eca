"""A real hub on this machine with two learners in a browser: both run the labs at once, and neither can harm the other."""

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from browser import ROOT, chromium, code_cells, end, finished, launched, start_cell, wait_for, wait_until_finished
from traitlets.config import PyFileConfigLoader

from labsupport.lesson.claims import SIGNS, VERDICT_MIME

CLASSROOM = ROOT / "tools" / "classroom"
LIMIT = "3 GiB"  # what TEACHING.md recommends
LABS = sorted((ROOT / "labs").glob("[0-9]*.ipynb"))


def environment(folder, spawner="local"):
    ours = {"CLASSROOM_SPAWNER": spawner, "CLASSROOM_FOLDER": str(folder), "CLASSROOM_MEMORY": LIMIT}
    return {**os.environ, "PYTHONPATH": str(ROOT), **ours}


def hub_command(*more):
    return [sys.executable, "-m", "jupyterhub", "-f", str(CLASSROOM / "jupyterhub_config.py"), *more]


def free_ports(number):
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)]
        return [s.getsockname()[1] for s in sockets]


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """(address, folder, process) of a hub with the learners ada and bob, with all of the class's settings but the ports."""
    chromium()  # before the slow part
    folder = tmp_path_factory.mktemp("classroom")
    (folder / "learners.txt").write_text("teacher\nada\nbob\n")
    public, hub_port, proxy_port = free_ports(3)
    address = f"http://127.0.0.1:{public}"
    proxy = f"--ConfigurableHTTPProxy.api_url=http://127.0.0.1:{proxy_port}"
    command = hub_command(f"--JupyterHub.hub_port={hub_port}", proxy)
    log = folder / "log"
    with log.open("w") as stream:
        env = {**environment(folder), "CLASSROOM_ADDRESS": address}
        process = subprocess.Popen(command, cwd=folder, env=env, stdout=stream, stderr=stream)
    try:
        wait_for(lambda: "JupyterHub is now running" in log.read_text() or process.poll() is not None, 60, "the hub")
        assert process.poll() is None, log.read_text()
        yield address, folder, process
    finally:
        end(process)


@pytest.fixture(scope="module")
def browser():
    with launched(chromium()) as browser:
        yield browser


@pytest.fixture(scope="module")
def learners(hub, browser):
    """{name: page} of two learners who have logged in, each in a browser of their own; their servers start at the same time."""
    pages = {}
    for name in ("ada", "bob"):
        page = browser.new_context(viewport={"width": 1200, "height": 1400}).new_page()
        page.set_default_timeout(120_000)
        page.goto(f"{hub[0]}/hub/login?next=/hub/home")
        page.fill("#username_input", name)
        page.fill("#password_input", f"{name}'s own password")
        page.click("#login_submit")
        page.wait_for_url("**/hub/home")
        page.click("#start", no_wait_after=True)
        pages[name] = page
    for name, page in pages.items():
        page.wait_for_url(f"**/user/{name}/lab/tree/course/labs/start_here.ipynb")
        course = hub[1] / "homes" / name / "course"
        assert sorted(path.name for path in course.iterdir()) == ["data", "labs"], "nothing of tools/ is for learners"
        assert (course / "data" / "claims.toml").exists()
    return pages


def status_of(page, address):
    """The status of what this learner's browser is answered in the end."""
    return page.context.request.get(address).status


def open_cells(page, hub, name, *sources):
    """Put a notebook with these cells into a learner's copy of the course, and open it; returns the code cells.

    A first cell has been answered by then: on a busy machine JupyterLab may lose what it sends to a kernel that only begins.
    """
    book = nbformat.v4.new_notebook(metadata=nbformat.read(LABS[0], as_version=4).metadata)
    book.cells = [nbformat.v4.new_code_cell(source) for source in ("0", *sources)]
    nbformat.write(book, hub[1] / "homes" / name / "course" / "labs" / "small.ipynb")
    page.goto(f"{hub[0]}/user/{name}/lab/tree/course/labs/small.ipynb?reset")
    for _ in range(3):
        first, *cells = code_cells(page, len(book.cells)).all()
        start_cell(page, first)
        until = time.monotonic() + 60
        while not finished(first) and time.monotonic() < until:
            page.wait_for_timeout(100)
        if finished(first):
            return cells
        page.reload()
    pytest.fail("the kernel answers nothing")


def output(cell):
    return cell.locator(".jp-OutputArea").inner_text()


def first_run_of_lab_01():
    """The source of lab 01 up to and with its first measured run, as one cell."""
    book = nbformat.read(ROOT / "labs" / "01_image_stacking.ipynb", as_version=4)
    cells = [cell.source for cell in book.cells if cell.cell_type == "code"]
    last = next(number for number, source in enumerate(cells) if "= lab.run(" in source)
    return "\n".join(cells[: last + 1])


TOO_MUCH = """
import numpy as np
from labsupport import run
for attempt in (lambda: np.ones(2**29), lambda: run(print, budget="3 GiB"), lambda: run(print, budget="2 GiB", outside="64 MiB", quiet=True).ok):
    try:
        print("got", attempt())
    except Exception as error:
        print(type(error).__name__, error)
"""
GOES_ON = """
import time
end, steps = time.monotonic() + 1, 0
while time.monotonic() < end or not open("../stop").read():
    steps += 1
    time.sleep(0.05)
print("steps", steps, "peak", failure.peak_mib)
"""


def test_two_learners_measure_at_the_same_time_and_one_who_takes_too_much_harms_nobody(hub, learners):
    ada, bob = learners.values()
    (hub[1] / "homes" / "bob" / "course" / "stop").write_text("")
    lab = first_run_of_lab_01()
    adas, bobs = open_cells(ada, hub, "ada", lab, TOO_MUCH), open_cells(bob, hub, "bob", lab, GOES_ON)
    start_cell(ada, adas[0])
    start_cell(bob, bobs[0])
    wait_until_finished(ada, adas[0], 180)
    wait_until_finished(bob, bobs[0], 180)
    for cell in (adas[0], bobs[0]):
        assert "no room for a tensor of shape" in output(cell)

    start_cell(bob, bobs[1])
    start_cell(ada, adas[1])
    wait_until_finished(ada, adas[1], 60)
    said = output(adas[1])
    assert re.search(r"MemoryError Unable to allocate 4\.00 GiB", said), said
    assert re.search(r"BudgetError a budget of 3,072\.0 MiB is more than .* 3,072\.0 MiB", said), said
    assert "got True" in said, f"what fits must run on in the same kernel: {said}"
    (hub[1] / "homes" / "bob" / "course" / "stop").write_text("now")
    wait_until_finished(bob, bobs[1], 20)
    assert re.search(r"steps \d+ peak \d+", output(bobs[1])), output(bobs[1])


def test_learners_reach_their_own_server_and_files_alone(hub, learners):
    address, folder, _ = hub
    for path in ("lab", "api/contents/course", "files/course/labs/small.ipynb"):
        assert status_of(learners["bob"], f"{address}/user/bob/{path}") == 200
    for path in ("api/contents/course", "api/kernels", "files/course/labs/small.ipynb"):
        assert status_of(learners["bob"], f"{address}/user/ada/{path}") == 403
    assert learners["bob"].goto(f"{address}/user/ada/lab").status == 403
    learners["bob"].goto(f"{address}/user/bob/lab")

    ours = ROOT / "labs" / LABS[1].name
    theirs = [folder / "homes" / name / "course" / "labs" / LABS[1].name for name in ("ada", "bob")]
    committed = ours.read_bytes()
    answer = learners["bob"].evaluate(
        """async path => (await fetch(path, {method: 'DELETE', headers: {'X-XSRFToken': document.cookie.match(/_xsrf=([^;]*)/)[1]}})).status""",
        f"/user/bob/api/contents/course/labs/{LABS[1].name}",
    )
    assert answer == 204
    assert ours.read_bytes() == committed and theirs[0].exists() and not theirs[1].exists()


def test_jupyterlab_asks_no_learner_about_news(hub, learners):
    """Its question would stand over the lab. JupyterLab tells the default that it goes by."""
    setting = "lab/api/settings/@jupyterlab/apputils-extension:notification"
    answer = learners["bob"].context.request.get(f"{hub[0]}/user/bob/{setting}").json()
    assert answer["schema"]["properties"]["fetchNews"]["default"] == "false", "set up by `make`: tools/overrides.json"


def test_nobody_comes_in_without_the_password_or_the_list(hub, learners, browser):
    for name, password in (("ada", "not ada's password"), ("mallory", "a long enough password")):
        page = browser.new_context().new_page()
        page.goto(f"{hub[0]}/hub/login")
        page.fill("#username_input", name)
        page.fill("#password_input", password)
        page.click("#login_submit")
        page.get_by_text("Invalid username or password").wait_for()
        assert status_of(page, f"{hub[0]}/user/ada/api/contents") == 403
        page.goto(f"{hub[0]}/user/ada/lab")
        assert "/hub/login" in page.url


def test_all_ends_with_the_hub(hub, learners):
    """The last test of the hub: it stops it."""
    _, _, process = hub
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    commands = " ".join(word for member in family for word in member.cmdline())
    assert commands.count("jupyterhub.singleuser") >= 2
    assert "ipykernel_launcher" in commands and "configurable-http-proxy" in commands
    process.terminate()
    # Mostly 3 s. A server that hangs is interrupted, after 30 s terminated, after 60 killed (jupyterhub/spawner.py: LocalProcessSpawner).
    _, left = psutil.wait_procs(family, timeout=90)
    assert not left


GUIDE = (CLASSROOM / "TEACHING.md").read_text()


def test_all_learners_of_a_server_stand_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "learners.txt").write_text("teacher")
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    config = PyFileConfigLoader("jupyterhub_config.py", str(CLASSROOM)).load_config()
    line = Path(config.Spawner.environment["LABSUPPORT_LINE"])
    assert line.stat().st_mode & 0o7777 == 0o1777  # all may write there, and remove only what is theirs


@pytest.mark.parametrize("path", LABS, ids=lambda path: path.stem)
def test_the_guide_says_of_each_lab_what_the_lab_says(path):
    """Minutes from its title table; figure and verdicts from its committed outputs."""
    book = nbformat.read(path, as_version=4)
    begin = f"| [{path.stem[:2]}](../../labs/{path.name}) | "
    (row,) = [line.split(" | ") for line in GUIDE.splitlines() if line.startswith(begin)]
    _, minutes, _, _, recorded, verdicts, _ = row
    title = book.cells[0].source.replace("an hour", "60")
    assert minutes == re.search(r"(\d+) to work through", title)[1]
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    measured = re.findall(r"No guess was made; measured were ([\d,.]+) MiB", printed)
    near = [float(figure.replace(",", "")) == pytest.approx(float(recorded), rel=0.1) for figure in measured]
    assert any(near), f"the lab's figures are {measured}"
    judged = [output["data"][VERDICT_MIME] for output in outputs if VERDICT_MIME in output.get("data", {})]
    signs = sorted(f"{facts['id']} {SIGNS[facts['verdict']]}" for facts in judged)
    assert verdicts == (" ".join(signs) or "–")


def test_the_guides_links_and_its_files_are_there():
    links = re.findall(r"\]\(([^)]+)\)", GUIDE)
    files = [link for link in links if not link.startswith("https://")]
    assert len(files) > 30 and not [file for file in files if not (CLASSROOM / file).exists()]
    for name in ("tools/classroom/Dockerfile", "tools/classroom/jupyterhub_config.py", ".binder", "labs/solutions"):
        assert name in GUIDE and (ROOT / name).exists()


@pytest.mark.parametrize(
    "spawner, names, message",
    [
        ("kubernetes", "ada", "set it to systemd, docker or local"),
        ("local", "", "learners.txt is missing or empty: write one login name a line"),
    ],
)
def test_a_hub_that_cannot_start_says_what_to_do(tmp_path, spawner, names, message):
    (tmp_path / "learners.txt").write_text(names)
    done = subprocess.run(
        hub_command(), cwd=tmp_path, env=environment(tmp_path, spawner), capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0 and message in done.stderr
