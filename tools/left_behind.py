"""What arms leave in this process. Nurseries stay, they outlive their arms."""

import json
import os
import tempfile
import time
from pathlib import Path

import psutil

from labsupport.ground import nursery


def folders(pid):
    """The arms' folders that a process has made, by its number."""
    marks = Path(tempfile.gettempdir()).glob("labsupport-*/.labsupport-arm.json")
    return [mark.parent for mark in marks if json.loads(mark.read_text())["pid"] == pid]


def processes():
    """The processes below this one that do not end by themselves within ten seconds.

    What was given up before TensorFlow was loaded still starts afterwards, sees that nobody waits for it, and ends.
    """
    until = time.monotonic() + 10
    while True:
        found = [p for p in psutil.Process().children(recursive=True) if p.pid not in nursery.pids()]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.1)


def descriptors():
    """The number of open files, without the socket to each nursery."""
    return len(os.listdir("/proc/self/fd")) - nursery.sockets()
