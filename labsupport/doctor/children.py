"""What the forked children of a script make for themselves, seen from outside while the script trains (Linux).

A fork shares its parent's pages, and touching one (Python counts references in it) makes a copy that is no fault of the
script. Neither changes how many anonymous pages the child has in memory (RssAnon), so that what is above their number at
the fork is what the child itself has made.
"""

import contextlib
import time
from pathlib import Path

from labsupport.ground.budget import process_status
from labsupport.ground.result import Offspring

_LOOK_SECONDS = 0.15  # workers that Keras makes for one epoch may live for less than a second
_SPARING = 30  # times as long as a look takes there is none: that keeps looking under 4 % of one core
_FEWEST = 3  # looks at a child that tell whether it made something late in its life


class Children:
    """Follows the children of a process: look() now and then; seen is what they made when they held most."""

    def __init__(self, pid):
        self._pid, self._next = pid, 0.0
        self._made = {}  # pid: (anonymous bytes at its fork, [bytes above that at each look])
        self._most = (0, 0, 0)  # number, bytes of all, bytes of the largest

    def look(self):
        """Read what the children hold, if it is time to."""
        begun = time.monotonic()
        if begun < self._next:
            return
        mine, command = process_status("RssAnon", self._pid), _command(self._pid)
        sizes = [size for child in _below(self._pid) if (size := self._look_at(child, mine or 0, command))]
        if sum(sizes) > self._most[1]:
            self._most = len(sizes), sum(sizes), max(sizes)
        now = time.monotonic()
        self._next = now + max(_LOOK_SECONDS, _SPARING * (now - begun))

    def _look_at(self, child, mine, command):
        """Bytes that a child has made; 0 for one that runs another program, or has gone."""
        size = process_status("RssAnon", child)
        if size is None or _command(child) != command:
            return 0
        at_fork, sizes = self._made.setdefault(child, (min(size, mine), []))
        sizes.append(max(0, size - at_fork))
        return sizes[-1]

    @property
    def seen(self):
        """The Offspring of the process; None where its children made nothing."""
        lives = [sizes for _, sizes in self._made.values() if len(sizes) >= _FEWEST]
        whole = sum(sizes[-1] for sizes in lives)
        if not whole:
            return None
        return Offspring(*self._most, sum(sizes[-1] - sizes[-1 - len(sizes) // 3] for sizes in lives) / whole)


def _below(pid):
    """Process numbers of all that a process has started, and that these have."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError, ValueError):
            for child in map(int, path.read_text().split()):
                found += [child, *_below(child)]
    return found


def _command(pid):
    """The words that a process was started with; none where it has gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
