"""Where arms come from: a process that has loaded TensorFlow, and done nothing else, forks once for each of them.

Loading TensorFlow takes seconds. What an arm needs is a process in which nothing has run yet, and the fork of one that
has only loaded it is that: no thread of TensorFlow's, no device, no tensor. A nursery belongs to one environment, since
TensorFlow reads variables while it loads, and ends when the process ends that started it.
"""

import contextlib
import gc
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NamedTuple

import msgspec

from labsupport.ground.quiet import without_collections

_ROOT = str(Path(__file__).parents[2])
_START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from labsupport.ground.nursery import main; main(int(sys.argv[2]))"
)
# Read when the first tensor is made, not while TensorFlow loads; the last one pytest sets anew for each test.
OF_ONE_ARM = ("TMPDIR", "TF_CPU_BFC_MEM_LIMIT_IN_MB", "TF_FORCE_GPU_ALLOW_GROWTH", "PYTEST_CURRENT_TEST")
_MOST = 2  # kept: the notebook's own environment, and a lab's other one, such as without oneDNN; each takes 250 MiB
_SIZE = struct.Struct("<Q")
_POPULATE_READ = 22  # linux/mman.h: MADV_POPULATE_READ
_PRESENT = 1 << 63  # a bit of /proc/PID/pagemap: the page is in memory (Linux: admin-guide/mm/pagemap.rst)


class Ends(NamedTuple):
    """The descriptors that a new arm's parent holds: to write to its standard input, and to read from all others."""

    stdin: int
    stdout: int
    stderr: int
    records: int
    status: int


class Nursery:
    """The parent's side of one nursery process."""

    def __init__(self, environment):
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, _ROOT, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                pass_fds=[theirs.fileno()],
            )

    def ask(self, environment, theirs):
        """Hand over the other ends of an arm's pipes. Raises OSError if the nursery has gone."""
        send(self._socket, theirs, environment, os.getcwd())

    def leave(self):
        """It ends when it has answered what it was asked."""
        self._socket.close()


nurseries, _left, _lock = {}, [], threading.Lock()


def start(environment):
    """Begin a process for an arm with this environment; returns its Ends. Raises OSError where no process can be started."""
    (read, write), *others = [os.pipe() for _ in Ends._fields]
    ours, theirs = Ends(write, *(reads for reads, _ in others)), [read, *(writes for _, writes in others)]
    try:
        with _lock:
            _ask(environment, theirs)
    except BaseException:
        for descriptor in ours:
            os.close(descriptor)
        raise
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    return ours


def warm(environment):
    """Let TensorFlow be loaded for arms that will come with this environment; does not wait for it."""
    with _lock, contextlib.suppress(OSError):
        _nursery(environment)


def _nursery(environment):
    """The nursery of an environment, a new one if need be; the one used last stands last in nurseries."""
    shared = {name: value for name, value in environment.items() if name not in OF_ONE_ARM}
    key = (os.getpid(), tuple(sorted(shared.items())), _limits())
    _left[:] = [nursery for nursery in _left if nursery.process.poll() is None]
    nursery = nurseries.pop(key, None)
    if nursery is None or nursery.process.poll() is not None:
        nursery = Nursery(environment)
    nurseries[key] = nursery
    while len(nurseries) > _MOST:
        _left.append(nurseries.pop(next(iter(nurseries))))
        _left[-1].leave()
    return nursery


def _ask(environment, theirs):
    nursery = _nursery(environment)
    try:
        nursery.ask(environment, theirs)
    except OSError:  # it is about to end, for instance killed by a system without memory: once more with a new one
        nursery.process.wait()
        _nursery(environment).ask(environment, theirs)


def pids():
    """The numbers of the nurseries of this process: they outlive their arms."""
    return {nursery.process.pid for nursery in [*nurseries.values(), *_left]}


def sockets():
    """How many descriptors of this process lead to nurseries."""
    return len(nurseries)


def _umask():
    now = os.umask(0o077)
    os.umask(now)
    return now


def _limits():
    """What a process inherits from its parent and a nursery could not take back: limits, and on which cores it may run."""
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    cores = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else ()
    return tuple(resource.getrlimit(getattr(resource, name)) for name in names), cores


def main(descriptor):
    """The nursery's side: called in a fresh interpreter; descriptor: its end of the socket."""
    os.setsid()
    serve(socket.socket(fileno=descriptor), load())


def serve(asked, loaded):
    """Fork an arm for each request that comes by the socket, until its other end is closed. loaded: of load()."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for its children here: their parent is elsewhere
    while True:
        request, theirs = receive(asked)
        if request is None:
            os._exit(0)
        if os.fork() == 0:
            asked.close()
            _be_born(request, theirs, loaded)
        for descriptor in theirs:
            os.close(descriptor)


def load():
    """Load TensorFlow; returns where its files lie in memory, for _touch(). An arm that cannot load it says so itself."""
    if sys.platform != "linux":  # elsewhere system libraries do not take a fork well
        return []
    with contextlib.suppress(Exception), without_collections():
        import tensorflow as tf

        _ = tf.keras  # loaded on first use
        import cloudpickle  # noqa: F401  what each arm needs beside it

        import labsupport.ground.child
        import labsupport.ground.meter
        import labsupport.ground.pipe
        import labsupport.ground.values  # noqa: F401
    gc.collect()
    gc.freeze()  # an arm's collection before it starts need not look at TensorFlow's modules again: 0.2 s
    return _resident_files()


def _resident_files():
    """[(address, pages)] of the pages of files that are in this process's memory."""
    import numpy as np

    page, found = os.sysconf("SC_PAGE_SIZE"), []
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps, open("/proc/self/pagemap", "rb") as pages:
        for line in maps:
            addresses, rights, _, _, inode, *_ = line.split()
            if inode == "0" or rights[0] != "r" or rights[1] == "w":
                continue
            first, last = (int(address, 16) // page for address in addresses.split("-"))
            pages.seek(8 * first)
            here = np.frombuffer(pages.read(8 * (last - first)), np.uint64) & np.uint64(_PRESENT) != 0
            edges = np.flatnonzero(np.diff(here, prepend=False, append=False))
            found += [((first + a) * page, b - a) for a, b in edges.reshape(-1, 2).tolist()]
    return found


def _touch(files):
    """Bring pages of files back into the resident set, which a fork empties of them.

    Otherwise an arm's process would grow by code that it has long loaded, as soon as it runs.
    """
    import ctypes

    import numpy as np

    page, advise = os.sysconf("SC_PAGE_SIZE"), ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for address, pages in files:
        if advise(address, pages * page, _POPULATE_READ) != 0:  # unknown before Linux 5.14: read a byte of each
            np.frombuffer((ctypes.c_char * (pages * page)).from_address(address), np.uint8)[::page].sum()


def send(connection, descriptors, environment, folder, **more):
    """Ask for a process with this environment, folder and these descriptors, and with this process's umask."""
    as_bytes = {os.fsencode(name): os.fsencode(value) for name, value in environment.items()}  # they need be no UTF-8
    request = {"environment": as_bytes, "folder": os.fsencode(folder), "umask": _umask(), **more}
    message = msgspec.msgpack.encode(request)
    socket.send_fds(connection, [_SIZE.pack(len(message))], descriptors)
    connection.sendall(message)


def receive(connection):
    """(request, descriptors) of what the other end has sent; (None, []) when it is closed."""
    head, descriptors, _, _ = socket.recv_fds(connection, _SIZE.size, len(Ends._fields))
    if not head:
        return None, []
    return msgspec.msgpack.decode(connection.recv(*_SIZE.unpack(head), socket.MSG_WAITALL)), descriptors


def settle(request, streams):
    """In a fork: become what a fresh process would be that was asked for so; streams: its input, output and error."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.umask(request["umask"])
    os.environ.clear()
    os.environb.update(request["environment"])
    tempfile.tempdir = None  # it remembers TMPDIR
    with contextlib.suppress(OSError):
        os.chdir(request["folder"])
    for place, descriptor in enumerate(streams):
        os.dup2(descriptor, place)
        os.close(descriptor)
    if numpy := sys.modules.get("numpy"):  # or all arms would draw the same; Python's own generator sees to it itself
        numpy.random.seed()


def _be_born(request, theirs, loaded):
    """In the fork: the arm."""
    from labsupport.ground import child

    settle(request, theirs[:3])
    child.main(*theirs[3:], prepare=lambda: _touch(loaded))
