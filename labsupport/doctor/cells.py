"""In the kernel of a notebook that the doctor examines: which cell a piece of code stands in. The notebook sees nothing of it."""

import re

from labsupport.ground.record import Frame, sendable
from labsupport.ground.result import CELLS, Cell, line_of

_TIMED = ("<timed exec>", "<timed eval>")  # %%time compiles what stands below it under these names
_IN_TEXT = re.compile(r'File "([^"]+)", line (\d+)')


def begin():
    """Called in the kernel before the first cell."""
    from IPython import get_ipython

    from labsupport.doctor import inside

    shell = get_ipython()
    _Names(shell)
    inside.visit.ready()


def end(failed):
    """Called in the kernel behind the last cell that runs: when a kernel ends, it first lets go of all that cells made."""
    from labsupport.doctor import inside

    inside.visit.end(failed)


class _Names:
    """Notes under which file name the code of each cell was compiled, in ground.result.CELLS.

    Cells are numbered as Jupyter numbers them when all are run from the top: In [3] is "cell 3".
    """

    def __init__(self, shell):
        self._number, self._lines, self._begun = 0, [], False
        self._cache = shell.compile.cache
        shell.compile.cache = self._noted
        shell.events.register("pre_run_cell", self._begins)

    def _begins(self, info):
        if info.store_history:
            self._number, self._lines, self._begun = self._number + 1, info.raw_cell.splitlines(), False
            for name in _TIMED:
                CELLS[name] = self._cell(1)

    def _noted(self, transformed_code, number=0, raw_code=None):
        name = self._cache(transformed_code, number, raw_code)
        magic = next(iter(self._lines), "").startswith("%%")
        CELLS[name] = self._cell(int(magic and self._begun))  # what a cell magic runs stands below its line
        self._begun = True
        return name

    def _cell(self, above):
        return Cell(f"cell {self._number}", above, self._lines)


def told(raised):
    """A record.Raised whose frames and text name cells."""
    raised.frames[:] = [_frame(frame) for frame in raised.frames]
    message = _IN_TEXT.sub(_in_text, raised.message)
    return type(raised)(raised.cause, raised.type, sendable(message), raised.frames)


def _frame(frame):
    found = line_of(frame.file, frame.line) if frame.file in CELLS else None
    return frame if found is None else Frame(found.place, found.number, frame.scope)


def _in_text(match):
    frame = _frame(Frame(match[1], int(match[2]), ""))
    return f'File "{frame.file}", line {frame.line}'
