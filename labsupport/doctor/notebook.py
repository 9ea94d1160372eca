"""A notebook as a script: its cells run in a kernel of their own, as Jupyter runs them, while the doctor looks on.

nbclient asks the kernel for one cell after the other; what the cells print and show goes to this process's standard
streams. Nothing is written: not the notebook, and no history.
"""

import asyncio
import contextlib
import os
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from labsupport.doctor.process import Script
from labsupport.ground.folders import ArmSetupError, remove_folder, temporary_folder
from labsupport.ground.result import CELLS, Cell

_INSIDE = "__import__('labsupport.doctor.cells').doctor.cells."  # an expression: it leaves no name behind
_SHUTDOWN_SECONDS = 5  # that Jupyter gives a kernel to end (jupyter_client: KernelManager.shutdown_wait_time)
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


class Notebook(Script):
    """The process of a notebook's kernel, and a thread that runs the cells in it. Raises ArmSetupError."""

    def __init__(self, command, allowed, options):
        try:
            from jupyter_client.connect import write_connection_file
        except ImportError:
            raise ArmSetupError("a notebook needs Jupyter's kernel: pip install ipykernel nbclient nbformat") from None
        (path,) = map(Path, command)
        notebook = read(path)
        self._silent = bool(options["remedy"])
        self._outcome = self._ended = None  # the notebook's exit status, and when its last cell ended
        self._folder = temporary_folder()
        try:
            # Sockets that are files: no port of this machine is opened.
            file, _ = write_connection_file(
                str(self._folder / "kernel.json"), ip=str(self._folder / "s"), transport="ipc"
            )
            kernel = ["-m", "ipykernel_launcher", "-f", file, "--HistoryManager.hist_file=:memory:"]
            environment = {"JPY_PARENT_PID": str(os.getpid())}  # as Jupyter tells a kernel who started it
            super().__init__(kernel, allowed, options, path.resolve().parent, environment)
        except BaseException:
            remove_folder(self._folder)
            raise
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run(notebook, file)), daemon=True)
        self._thread.start()

    async def _run(self, notebook, connection_file):
        """Run the cells; the first error that its cell does not allow ends the run."""
        from jupyter_client import AsyncKernelClient
        from nbclient.exceptions import CellExecutionError, DeadKernelError

        class Client(AsyncKernelClient):
            async def _async_is_alive(client):  # its own asks for heartbeats, which come late on a busy machine
                return self.process.poll() is None

            is_alive = _async_is_alive

        kernel = Client()
        kernel.load_connection_file(connection_file)
        kernel.start_channels()
        client = _shown(self._silent)(notebook, SimpleNamespace(has_kernel=True), timeout=None)
        client.kc = kernel
        outcome = 1
        try:
            with contextlib.suppress(DeadKernelError, RuntimeError):  # its exit status tells
                await kernel.wait_for_ready()
                kernel.allow_stdin = False
                kernel.execute(_INSIDE + "begin()", silent=True)
                with contextlib.suppress(CellExecutionError):  # shown already, as an output of its cell
                    await client.async_execute()
                    outcome = 0
                await client.async_wait_for_reply(kernel.execute(f"{_INSIDE}end({bool(outcome)})", silent=True))
                kernel.shutdown()
        finally:
            self._outcome, self._ended = outcome, time.monotonic()
            kernel.stop_channels()

    def gone(self):
        """The exit status: that of the kernel where it died, else 0, or 1 where a cell failed."""
        code = self.process.poll()
        if code is None and self._ended is not None and time.monotonic() - self._ended > _SHUTDOWN_SECONDS:
            self.kill()
            return self._outcome
        return code or self._outcome if code is not None else None

    def end(self):
        super().end()
        self._thread.join(_SHUTDOWN_SECONDS)
        remove_folder(self._folder)


def read(path):
    """The notebook of a file, in the present format. Its code cells are noted in CELLS. Raises ArmSetupError."""
    import nbformat

    try:
        notebook = nbformat.read(path, as_version=4)
    except Exception as error:  # whatever a file that is none makes of it
        raise ArmSetupError(f"{path} cannot be read as a notebook: {error}"[:500]) from None
    language = notebook.metadata.get("kernelspec", {}).get("language", "python")
    if language.lower() != "python":
        raise ArmSetupError(f"{path} is a notebook in {language}; the doctor knows Python alone")
    run = [cell.source for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    CELLS.update({f"cell {n}": Cell(f"cell {n}", 0, source.splitlines()) for n, source in enumerate(run, 1)})
    return notebook


def _shown(silent):
    """nbclient's client, which shows outputs here as they come, if it is not silent."""
    from nbclient import NotebookClient

    class Shown(NotebookClient):
        def output(self, outs, msg, display_id, cell_index):
            found = super().output(outs, msg, display_id, cell_index)
            if not silent:
                _show(msg["msg_type"], msg["content"])
            return found

    return Shown


def _show(kind, content):
    if kind == "stream":
        stream, text = (sys.stderr if content["name"] == "stderr" else sys.stdout), content["text"]
    elif kind == "error":
        stream, text = sys.stderr, "\n".join(content["traceback"]) + "\n"
    else:
        stream, text = sys.stdout, content["data"].get("text/plain", "") + "\n"
    if not stream.isatty():
        text = _COLOURS.sub("", text)
    stream.write(text)
    stream.flush()
