"""Recording the process itself: everything in one fresh process, so that this one stays as it is."""

import subprocess
import sys
import textwrap

import pytest

from labsupport.ground.budget import MIB
from labsupport.peak.window import Window, heap

SCRIPT = """
import os, sys, tempfile, threading
os.environ["TF_CPU_ALLOCATOR_USE_BFC"] = "1"
from pathlib import Path
from labsupport.peak import recording, window
from labsupport.peak.here import recorded

with recorded() as early:
    pass
assert early.parts is None and "not loaded" in early.why
import tensorflow as tf
old = tf.ones((512, 1024))
methods = tf.GradientTape.gradient, tf.profiler.experimental.start
temporary = set(os.listdir(tempfile.gettempdir()))

def check(name, condition):
    assert sys.gettrace() is None and threading.gettrace() is None, name
    assert sys._getframe(1).f_trace is None, name
    assert (tf.GradientTape.gradient, tf.profiler.experimental.start) == methods, name
    assert condition, name

# The lines of the block itself, in a frame that ran before it, and of what it calls
def called():
    return tf.ones((1024, 1024)) + 1

with recorded("mine") as seen:
    kept = tf.ones((1024, 1024)) + 2
    for _ in range(3):
        called()
rows = {row.line.source: row.size / 2**20 for row in seen.parts.rows if row.line}
check("lines", rows["kept = tf.ones((1024, 1024)) + 2"] == 4 and "return tf.ones((1024, 1024)) + 1" in rows)
check("what was there before", seen.parts.before >= old.shape.num_elements() * 4 and not seen.why and not seen.lines)
check("what stays", [(row.size / 2**20, row.kind) for row in seen.parts.end] == [(4, "held by the script")])

try:
    with recorded() as seen:
        lost = tf.ones((1024, 1024)) + 2
        raise KeyError("inside")
except KeyError:
    check("an exception passes", seen.parts.rows[0].size == 4 * 2**20)

with recorded() as outer:
    with recorded() as inner:
        tf.ones((1024, 1024)) + 3
check("one in another", inner.parts is None and "another recording" in inner.why and outer.parts.rows)

folder = tempfile.mkdtemp()
tf.profiler.experimental.start(folder)
with recorded() as seen:
    tf.ones(3)
tf.profiler.experimental.stop()
check("a session that runs", seen.parts is None and "profil" in seen.why.lower() and list(Path(folder).rglob("*.pb")))
with recorded() as seen:
    tf.ones((1024, 1024)) + 3
    with tf.profiler.experimental.Profile(folder):
        tf.ones((1024, 1024)) + 4
check("a session that begins", "the script's own recording" in seen.parts.window and seen.parts.end is None)
__import__("shutil").rmtree(folder)

trace = lambda *_: None
sys.settrace(trace)
with recorded() as seen:
    tf.ones((1024, 1024)) + 3
assert sys.gettrace() is trace
sys.settrace(None)
check("somebody follows lines", "debugger" in seen.lines and all(row.line is None for row in seen.parts.rows))

class Small(window.Window):
    def __init__(self, full):
        super().__init__(full, 2**20, 0.5)
recording.Window = Small
x = tf.ones((8, 8))
with recorded() as seen:
    for _ in range(20_000):
        x = x + 1.0
check("a window", "the first" in seen.parts.window and seen.parts.end is None and float(x[0, 0]) == 20_001)
assert set(os.listdir(tempfile.gettempdir())) <= temporary, "files are left"
print("all is well")
"""


def test_a_block_of_this_process_is_taken_apart_and_leaves_no_trace(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    # A folder of its own for temporary files: others write into the system's meanwhile.
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**__import__("os").environ, "TMPDIR": str(temporary), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout == "all is well\n", done.stderr[-3000:]


def test_a_window_ends_by_bytes_of_small_pieces_and_no_large_array_counts():
    if heap() is None:
        pytest.skip("the C library of this system does not tell")
    import ctypes
    import threading

    ended = threading.Event()
    window = Window(lambda reason: ended.set(), most_bytes=8 * MIB)
    large = bytearray(64 * MIB)
    assert not ended.wait(0.5), "pages of its own are no part of a trace"
    malloc = ctypes.CDLL(None).malloc
    malloc.restype, malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    pieces = [malloc(1024) for _ in range(16 * 1024)]
    assert ended.wait(5) and len(large) and len(pieces)
    window.close()
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    for piece in pieces:
        free(piece)


def test_where_nothing_is_told_a_window_ends_by_time(monkeypatch):
    import threading

    monkeypatch.setattr("labsupport.peak.window.heap", lambda: None)
    said, ended = [], threading.Event()
    Window(lambda reason: (said.append(reason), ended.set()), most_seconds=0.2)
    assert ended.wait(5) and said == ["the first 0 s"]
