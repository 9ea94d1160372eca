"""Run a notebook with parameters, strictly: papermill only logs a parameter that the notebook does not have."""

import nbformat
import papermill
from nbclient.exceptions import DeadKernelError


class KernelDied(RuntimeError):
    """The kernel of a notebook ended; the message names the cell that it was running."""


def run_notebook(path, folder, cwd, cell_seconds=180, **parameters):
    """The executed copy of a notebook, run in `cwd`; the copy is written into `folder`.

    Raises ValueError for an unknown parameter, before anything runs, and KernelDied.
    """
    known = papermill.inspect_notebook(path)
    unknown = sorted(parameters.keys() - known.keys())
    if unknown:
        raise ValueError(f"{path.name} has no parameter {', '.join(unknown)}; it has {', '.join(known)}")
    copy = folder / path.name
    try:
        papermill.execute_notebook(
            path, copy, parameters, cwd=cwd, kernel_name="python3", execution_timeout=cell_seconds, progress_bar=False
        )
    except DeadKernelError as error:
        started = [cell for cell in nbformat.read(copy, as_version=4).cells if cell.metadata.papermill.start_time]
        raise KernelDied(f"the kernel of {path.name} died in this cell:\n{started[-1].source}") from error
    return nbformat.read(copy, as_version=4)
