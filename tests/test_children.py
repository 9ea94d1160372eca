"""What forked children make for themselves, seen from outside."""

import subprocess
import sys
import time

import pytest

from labsupport.doctor.children import Children
from labsupport.ground.budget import MIB

WORKERS = """
import os, sys, time
shared = b"x" * 2**26
for worker in range(2):
    if os.fork() == 0:
        kept = []
        for n in range(30):
            kept = [*kept, b"y" * 2**21] if sys.argv[1] == "keep" else [b"y" * 2**21]
            time.sleep(0.05)
        os._exit(0)
for worker in range(2):
    os.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("what", ["keep", "reuse"])
def test_what_each_keeps_is_told_from_room_for_its_work(what):
    process = subprocess.Popen([sys.executable, "-c", WORKERS, what])
    children = Children(process.pid)
    while process.poll() is None:
        children.look()
        time.sleep(0.02)
    seen = children.seen
    if what == "keep":
        assert seen.number == 2 and 60 * MIB < seen.size < 130 * MIB and seen.late > 0.2, seen
        assert seen.largest < 66 * MIB  # nothing of what the parent has
    else:
        assert seen.size < 16 * MIB, seen
