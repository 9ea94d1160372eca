"""Run a notebook with parameters, strictly: papermill only logs a parameter that the notebook does not have."""

import papermill
from nbclient.exceptions import DeadKernelError


class KernelDied(RuntimeError):
    """The kernel of a notebook ended; the message names the cell that it was running."""


def run_notebook(path, cwd, **parameters):
    """The executed notebook, run in `cwd`; nothing is written, which for a lab would take seconds, cell by cell.

    Raises ValueError for an unknown parameter, before anything runs, and KernelDied.
    """
    known = papermill.inspect_notebook(path)
    unknown = sorted(parameters.keys() - known.keys())
    if unknown:
        raise ValueError(f"{path.name} has no parameter {', '.join(unknown)}; it has {', '.join(known)}")
    started = []
    try:
        return papermill.execute_notebook(
            path,
            None,
            parameters,
            cwd=cwd,
            kernel_name="python3",
            execution_timeout=180,  # seconds a cell: a whole lab ends within 90
            progress_bar=False,
            on_cell_start=lambda cell, cell_index: started.append(cell.source),
        )
    except DeadKernelError as error:
        raise KernelDied(f"the kernel of {path.name} died in this cell:\n{started[-1]}") from error
