"""In a real browser: JupyterLab runs lab 01, its plot moves while the cell runs, and Stop ends an endless run."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import nbformat
import psutil
import pytest

ROOT = Path(__file__).parents[1]
SWITCHES = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PLOT = "svg[aria-label^='Live memory plot']"
STOP = "button:has-text('Stop this run')"


def chromium():
    """The path of the system's browser. Without one the test is skipped; in CI, which installs one, it fails."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        missing = "no Chromium found: install Debian's package `chromium` to run the browser tests"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    return found


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """A copy of what the labs need, so that JupyterLab saves nothing into the committed notebooks."""
    folder = tmp_path_factory.mktemp("course")
    (folder / "labs").mkdir()
    (folder / "data").symlink_to(ROOT / "data")
    lab = nbformat.read(ROOT / "labs" / "01_image_stacking.ipynb", as_version=4)
    for cell in lab.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    nbformat.write(lab, folder / "labs" / "01_image_stacking.ipynb")
    endless = nbformat.v4.new_notebook(metadata=lab.metadata)
    endless.cells = [
        nbformat.v4.new_code_cell(
            "from labsupport import run\n\ndef endless():\n    import time\n    while True:\n        time.sleep(0.1)\n\n"
            "run(endless).outcome"
        )
    ]
    nbformat.write(endless, folder / "labs" / "endless.ipynb")
    return folder


@pytest.fixture(scope="module")
def server(course):
    """(process, address, browser) of a JupyterLab of its own, which sends no request to the outside."""
    browser = chromium()  # before the slow part
    # Keep every cell in the page, also those that are scrolled out of sight; do not ask about news.
    settings = course / "settings" / "@jupyterlab"
    for name, text in {"notebook-extension/tracker": '{"windowingMode": "none"}', "apputils-extension/notification": '{"fetchNews": "false"}'}.items():
        file = settings / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(text)
    environment = {
        **os.environ,
        "JUPYTER_TOKEN": "browser-test",
        "JUPYTERLAB_SETTINGS_DIR": str(course / "settings"),
        "JUPYTER_CONFIG_DIR": str(course / "config"),
        "JUPYTER_RUNTIME_DIR": str(course / "runtime"),
    }
    log = course / "server.log"
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0",
        "--LabApp.news_url=", f"--ServerApp.root_dir={course}",
    ]  # fmt: skip
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=course, env=environment, stdout=stream, stderr=stream)
    try:
        address = wait_for(lambda: re.search(r"http://127\.0\.0\.1:\d+/", log.read_text()), 60, "JupyterLab's address")[0]
        yield process, address, browser
    finally:
        family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
        process.terminate()
        psutil.wait_procs(family, timeout=10)
        for left in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


@pytest.fixture
def page(server):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=server[2], headless=True, args=SWITCHES)
        page = browser.new_page(viewport={"width": 1200, "height": 1600})
        page.set_default_timeout(60_000)
        yield page
        browser.close()


def wait_for(condition, seconds, what):
    """The first true value of condition(); fails after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    pytest.fail(f"{what}: not seen within {seconds} s")


def open_notebook(page, server, course, name):
    """Open a notebook of the course; returns its code cells once all are there and the kernel too."""
    page.goto(f"{server[1]}lab/tree/labs/{name}?token=browser-test&reset")
    sources = nbformat.read(course / "labs" / name, as_version=4).cells
    number = sum(cell.cell_type == "code" for cell in sources)
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    wait_for(lambda: cells.count() == number, 60, f"{number} code cells")
    page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status='idle']")
    return cells


def prompt(cell):
    return cell.locator(".jp-InputPrompt").inner_text().strip()


def start_cell(page, cell):
    """Run a cell as a person does; again if JupyterLab, still loading, did not take the keys."""
    for _ in range(20):
        assert not page.locator("dialog.jp-Dialog").count(), page.locator("dialog.jp-Dialog").first.inner_text()
        cell.locator(".cm-content").click(timeout=10_000)
        page.keyboard.press("Control+Enter")
        page.wait_for_timeout(1500)
        if prompt(cell) != "[ ]:":  # "[*]:" while it runs
            return
    pytest.fail(f"the cell does not start; its prompt is {prompt(cell)!r}")


def finished(cell):
    return re.fullmatch(r"\[\d+\]:", prompt(cell))


def wait_until_finished(page, cell, seconds):
    end = time.monotonic() + seconds
    while not finished(cell):
        if time.monotonic() > end:
            status = page.locator(".jp-Notebook-ExecutionIndicator").first.get_attribute("data-status")
            dialogs = page.locator("dialog").all_inner_texts()
            pytest.fail(f"not finished in {seconds} s; prompt {prompt(cell)}, kernel {status}, {dialogs}:\n{cell.inner_text()}")
        page.wait_for_timeout(100)


def arms(server):
    """The processes of arms that the kernels of this server have started."""
    found = []
    for process in psutil.Process(server[0].pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "labsupport.child" in process.cmdline():
                found.append(process)
    return found


def test_without_a_browser_it_skips_but_never_in_ci(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CI", "false")
    with pytest.raises(pytest.skip.Exception, match="install Debian's package `chromium`"):
        chromium()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="install Debian's package `chromium`"):
        chromium()


def test_stop_ends_an_endless_run(page, server, course):
    (cell,) = open_notebook(page, server, course, "endless.ipynb").all()
    start_cell(page, cell)
    page.wait_for_selector(PLOT)
    assert arms(server), "the plot is there, but no process of an arm"
    for _ in range(20):  # the button can be reached without a mouse
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('button') && document.activeElement.textContent") == "Stop this run":
            break
    else:
        pytest.fail("Stop is not reached with the Tab key")
    began = time.monotonic()
    page.keyboard.press("Space")
    wait_until_finished(page, cell, 10)
    assert time.monotonic() - began < 3
    assert not arms(server)
    assert "stopped" in cell.locator(".jp-OutputArea").inner_text()


def test_lab_01_runs_and_its_plot_moves(page, server, course):
    failing = None
    for cell in open_notebook(page, server, course, "01_image_stacking.ipynb").all():
        start_cell(page, cell)
        if failing is None and "run(" in cell.locator(".cm-content").inner_text():
            failing = cell
            seen = set()
            end = time.monotonic() + 120
            while not finished(cell) and time.monotonic() < end:
                for plot in cell.locator(PLOT).all():
                    with contextlib.suppress(Exception):  # replaced by the next drawing between two questions
                        seen.add((plot.get_attribute("aria-label", timeout=500), plot.locator("polyline").last.get_attribute("points", timeout=500)))
                page.wait_for_timeout(300)
            assert len({label for label, _ in seen}) >= 3 and len({points for _, points in seen}) >= 3, "the plot did not move"
            assert any(re.search(r"budget [\d,.]+ MiB", label) for label, _ in seen)
        wait_until_finished(page, cell, 180)
        assert cell.locator("[data-mime-type='application/vnd.jupyter.stderr']").filter(has_text="Traceback").count() == 0
    # What the moving plot leaves behind: a still picture with its description, and the error in words.
    assert failing.locator(PLOT).count() == 0
    assert failing.locator("img").first.is_visible()
    assert "no room for a tensor of shape" in failing.locator(".jp-OutputArea").inner_text()
    assert page.get_by_text("Exercise 2: not yet.").count() == 1
    assert not arms(server)
