"""In a real browser: JupyterLab runs lab 01 until it fails, its plot moves while the cell runs, and Stop ends an endless run."""

import contextlib
import re
import shutil
import time

import nbformat
import psutil
import pytest
from browser import ROOT, chromium, finished, open_notebook, open_page, start_cell, wait_for, wait_until_finished

PLOT = "svg[aria-label^='Live memory plot']"


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
            "from labsupport import expect_oom, run\n\ndef endless():\n    import time\n    while True:\n        time.sleep(0.1)\n\n"
            "result = run(endless)\nprint(result.outcome)\nexpect_oom(result)"
        )
    ]
    nbformat.write(endless, folder / "labs" / "endless.ipynb")
    return folder


@pytest.fixture
def page(server):
    with open_page(server) as page:
        yield page


def arms(server):
    """The processes of arms that the kernels of this server have started: all that a nursery has forked."""
    found = []
    for process in psutil.Process(server[0].pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if all(
                any("labsupport.ground.nursery" in part for part in p.cmdline()) for p in (process, process.parent())
            ):
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
        if (
            page.evaluate("document.activeElement.matches('button') && document.activeElement.textContent")
            == "Stop this run"
        ):
            break
    else:
        pytest.fail("Stop is not reached with the Tab key")
    began = time.monotonic()
    page.keyboard.press("Space")
    wait_until_finished(page, cell, 10)
    assert time.monotonic() - began < 8  # a second on an idle machine; ten would be a run that went on
    wait_for(lambda: not arms(server), 5, "the end of the arm")
    said = cell.locator(".jp-OutputArea").inner_text()
    assert "stopped" in said and '"endless" has no figures' in said and "Traceback" not in said


def test_lab_01_runs_and_its_plot_moves(page, server, course):
    """Up to its failing arm; what comes behind it is run by nbval."""
    for cell in open_notebook(page, server, course, "01_image_stacking.ipynb").all():
        start_cell(page, cell)
        if "run(" in cell.locator(".cm-content").inner_text():
            break
        wait_until_finished(page, cell, 180)
    seen = set()
    end = time.monotonic() + 120
    while not finished(cell) and time.monotonic() < end:
        for plot in cell.locator(PLOT).all():
            with contextlib.suppress(Exception):  # replaced by the next drawing between two questions
                label, line = plot.get_attribute("aria-label", timeout=500), plot.locator("polyline").last
                seen.add((label, line.get_attribute("points", timeout=500)))
        page.wait_for_timeout(300)
    wait_until_finished(page, cell, 180)
    assert len({label for label, _ in seen}) >= 3 and len({points for _, points in seen}) >= 3, "the plot did not move"
    assert any(re.search(r"budget [\d,.]+ MiB", label) for label, _ in seen)
    # What the moving plot leaves behind: a still picture with its description, and the error in words.
    assert cell.locator(PLOT).count() == 0
    assert cell.locator("img").first.is_visible()
    assert "no room for a tensor of shape" in cell.locator(".jp-OutputArea").inner_text()
    stderr = "[data-mime-type='application/vnd.jupyter.stderr']"
    assert page.locator(stderr).filter(has_text="Traceback").count() == 0
    wait_for(lambda: not arms(server), 5, "the end of all arms")
