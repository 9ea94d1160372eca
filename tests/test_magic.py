"""The cell magic %%memory, in a real kernel."""

import re

import nbformat
import pytest
import roots
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from labsupport import load_ipython_extension


@pytest.fixture(autouse=True)
def kernels_load_tensorflow_themselves(monkeypatch):
    monkeypatch.delenv(roots.FOLDER)


UNREADY = ["import tensorflow as tf\n%load_ext labsupport", "%%memory\nt = tf.ones([1024, 1024])", "%%memory\nt = None"]
CELLS = [
    "%load_ext labsupport",
    "%%memory arrays alone\nimport time\nimport numpy as np\nx = np.ones(2**20)\ntime.sleep(3.2)\nx.shape",
    "%%memory\nimport tensorflow as tf\nt = tf.ones([1024, 1024])\nlarger = tf.ones([2048, 1024])\ndel larger",
    "%%memory trace\n@tf.function\ndef double(x): return 2 * x\nfor n in range(3): double(n)\nt * 2",
    "%%memory fails\nkept = [tf.ones([1024, 1024])]\n1 / 0",
]


class Client(NotebookClient):
    def process_message(self, message, cell, cell_index):
        if message["msg_type"] == "update_display_data":
            updates.append((cell_index, message["content"]["data"]["text/plain"]))
        return super().process_message(message, cell, cell_index)


updates = []


def figures(cell):
    """{row: text} of what %%memory shows under a cell, its title and its notes among them."""
    (text,) = [o.data["text/plain"] for o in cell.outputs if o.output_type == "display_data" and o.data["text/plain"]]
    title, *lines = text.splitlines()
    return {
        "title": title,
        "text": text,
        **{name.strip(): value.strip() for name, _, value in (line.strip().partition("  ") for line in lines)},
    }


def mib(text):
    return float(text.split(" MiB")[0].split()[-1])


def test_a_cell_is_measured():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    client = Client(notebook, timeout=180, kernel_name="python3")
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):  # so that "run all" stops
        client.execute()
    _, arrays, tensors, traced, failed = notebook.cells

    seen = figures(arrays)
    assert seen["title"] == "%%memory: arrays alone" and "TensorFlow does not run" in seen["tensors"]
    assert seen["held by"] == "x 8.0 MiB"
    assert any(o.output_type == "execute_result" for o in arrays.outputs)
    assert any(index == 1 and "arrays alone runs, 2 s" in text for index, text in updates), "no sign of progress"
    assert [text for index, text in updates if index == 1][-1] == ""

    seen = figures(tensors)
    peak, stays = mib(seen["tensors: peak over the level before"]), mib(seen["tensors: more in use after the cell"])
    assert 12 <= peak < 13 and 4 <= stays < 5
    assert seen["at that peak"] == "unknown: TensorFlow was not loaded when the block began"
    assert seen["held by"].startswith("t 4.0 MiB")
    assert "counts every tensor here" in seen["text"], "the extension was there before TensorFlow"

    seen = figures(traced)
    assert seen["new traces of tf.functions"] == "double 3"
    assert seen["held by"].startswith("Out 4.0 MiB")

    assert figures(failed)["held by"].startswith("kept 4.0 MiB")
    assert re.match(r"4\.0 MiB held by the script \(Cell In\[\d+\], line 1: kept = ", figures(failed)["at that peak"])
    assert not any("profiler" in o.get("text", "") for o in failed.outputs), "TensorFlow's profiler tells of itself"
    errors = [o for o in failed.outputs if o.output_type == "error"]
    assert "ZeroDivisionError: division by zero" in re.sub(r"\x1b\[[\d;]*m", "", "\n".join(errors[0].traceback))
    assert len(errors) == 2 and len(errors[1].traceback) == 1, "the traceback must not be shown twice"


def test_after_tensorflow_it_says_once_what_it_cannot_count():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in UNREADY])
    NotebookClient(notebook, timeout=180, kernel_name="python3").execute()
    first, second = (figures(cell)["text"] for cell in notebook.cells[1:])
    assert "counts only blocks above about 256 KiB" in first and "Restart the kernel" in first
    assert "counts only blocks" in second and "Restart the kernel" not in second


def test_outside_ipython_it_says_where_it_belongs():
    with pytest.raises(RuntimeError, match="is for a notebook or IPython"):
        load_ipython_extension(None)
