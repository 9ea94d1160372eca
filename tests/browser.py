"""JupyterLab in a real browser, for the tests that look at what a learner sees."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
import reuse
import roots

ROOT = Path(__file__).parents[1]
SWITCHES = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
SWITCHES += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]  # of axe-core
THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}
# Keep every cell in the page, also those that are scrolled out of sight.
SETTINGS = {"@jupyterlab/notebook-extension/tracker.jupyterlab-settings": '{"windowingMode": "none"}'}


def chromium():
    """The path of the system's browser. Without one the test is skipped; in CI, which installs one, it fails."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        missing = "no Chromium found: install Debian's package `chromium` to run the browser tests"
        pytest.fail(missing) if os.environ.get("CI") == "true" else pytest.skip(missing)
    return found


def wait_for(condition, seconds, what):
    """The first true value of condition(); fails after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.1)
    pytest.fail(f"{what}: not seen within {seconds} s")


@contextlib.contextmanager
def jupyterlab(folder):
    """(process, address, browser) of a JupyterLab of its own over `folder`, which sends no request to the outside."""
    browser = chromium()  # before the slow part
    for name, text in SETTINGS.items():
        file = folder / "settings" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    environment = {
        **os.environ,
        "JUPYTER_TOKEN": "browser-test",
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        roots.FOLDER: "",
        reuse.FOLDER: "",  # here every arm really runs: what moves on the page is what is tested
    }
    log = folder / "server.log"
    options = ["--no-browser", "--allow-root", "--ip=127.0.0.1", "--port=0", "--expose-app-in-browser"]
    options += ["--LabApp.news_url=", f"--ServerApp.root_dir={folder}"]
    command = [sys.executable, "-m", "jupyterlab", *options]
    with log.open("w") as stream:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=stream, stderr=stream)
    try:
        found = wait_for(lambda: re.search(r"http://127\.0\.0\.1:\d+/", log.read_text()), 60, "JupyterLab's address")
        yield process, found[0], browser
    finally:
        end(process)


def end(process):
    """End a server and all that it started, if it is still there."""
    family = []
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.terminate()
    psutil.wait_procs(family, timeout=10)
    for left in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.kill()


@contextlib.contextmanager
def launched(executable):
    """A browser without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, headless=True, args=SWITCHES)
        yield browser
        browser.close()


def shut_out(page, context=None, **options):
    """What axe-core finds in a page that shuts somebody out, a line each."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page, context, {"runOnly": RULES, **options}).response
    assert "color-contrast" in {rule["id"] for rule in found["passes"]}
    return [
        f"{rule['id']}: {node['html'][:300]} {node['failureSummary']}"
        for rule in found["violations"]
        for node in rule["nodes"]
    ]


@contextlib.contextmanager
def open_page(server):
    """A page in the browser of a jupyterlab()."""
    with launched(server[2]) as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 1600})
        page.set_default_timeout(60_000)
        yield page


def open_notebook(page, server, folder, name):
    """Open labs/NAME in a folder served by jupyterlab(); returns its code cells once all are there and the kernel too."""
    page.goto(f"{server[1]}lab/tree/labs/{name}?token=browser-test&reset")
    sources = nbformat.read(folder / "labs" / name, as_version=4).cells
    return code_cells(page, sum(cell.cell_type == "code" for cell in sources))


def code_cells(page, number):
    """The code cells of the notebook that a page opens, once all are there and the kernel too."""
    cells = page.locator(".jp-Notebook .jp-CodeCell")
    dialog = page.locator("dialog.jp-Dialog")
    for _ in range(3):
        wait_for(lambda: cells.count() == number, 60, f"{number} code cells")
        with contextlib.suppress(pytest.fail.Exception):
            wait_for(lambda: kernel_is_idle(page) or dialog.count(), 30, "an idle kernel")
            if not dialog.count():
                return cells
            assert "Select Kernel" in dialog.first.inner_text(), dialog.first.inner_text()
        # A page that is quicker than the server's list of kernels asks for one, and has none to offer; another connects to
        # its kernel and never hears that it is idle. A person would load it again.
        page.reload()
    pytest.fail("JupyterLab asks for a kernel, or does not hear of it, each time that the notebook is opened")


def kernel_is_idle(page):
    """The indicator alone says idle before there is a kernel, too."""
    named = page.locator(".jp-Toolbar-kernelName", has_text="Python 3")
    return named.count() and page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']").count()


def prompt(cell):
    return cell.locator(".jp-InputPrompt").inner_text().strip()


def start_cell(page, cell):
    """Run a cell as a person does; again if JupyterLab, still loading, did not take the keys."""
    for _ in range(3):
        cell.locator(".cm-content").click(timeout=10_000)
        page.keyboard.press("Control+Enter")
        end = time.monotonic() + 10  # a busy page takes its time, and keys pressed twice would run the cell twice
        while time.monotonic() < end:
            if prompt(cell) != "[ ]:":  # "[*]:" while it runs
                return
            page.wait_for_timeout(100)
    pytest.fail(f"the cell does not start; its prompt is {prompt(cell)!r}, {page.locator('dialog').all_inner_texts()}")


def finished(cell):
    return re.fullmatch(r"\[\d+\]:", prompt(cell))


def wait_until_finished(page, cell, seconds):
    end = time.monotonic() + seconds
    while not finished(cell):
        if time.monotonic() > end:
            status = page.locator(".jp-Notebook-ExecutionIndicator").first.get_attribute("data-status")
            dialogs = page.locator("dialog").all_inner_texts()
            state = f"prompt {prompt(cell)}, kernel {status}, {dialogs}"
            pytest.fail(f"not finished in {seconds} s; {state}:\n{cell.inner_text()}")
        page.wait_for_timeout(100)


def set_theme(page, theme):
    """Switch between "light" and "dark" as the Settings menu does."""
    page.evaluate("name => window.jupyterapp.commands.execute('apputils:change-theme', {theme: name})", THEMES[theme])
    page.wait_for_function("light => document.body.dataset.jpThemeLight === light", arg=str(theme == "light").lower())
    page.wait_for_selector("#jupyterlab-splash", state="detached")  # it covers everything while the theme loads


def run_cells_above(page, number):
    """Run the cells before the number-th and wait for them; raises what JupyterLab raises."""
    page.evaluate(
        """async number => {
            const panel = window.jupyterapp.shell.currentWidget;
            await panel.sessionContext.ready;
            panel.content.activeCellIndex = number;
            await window.jupyterapp.commands.execute('notebook:run-all-above');
        }""",
        number,
    )
