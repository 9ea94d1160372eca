"""Kernels and nurseries of a test run, forked from processes that have loaded TensorFlow once, in place of each loading it anew.

Each notebook has a kernel and a nursery, and loading was a third of what the whole suite computes. A root belongs to one
environment, since TensorFlow reads variables while it loads; it loads when it is first asked, and ends with the test run.
Only for tests: what a learner starts loads everything itself.
"""

import contextlib
import hashlib
import itertools
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from unittest import mock

import psutil

from labsupport.ground import nursery
from labsupport.ground.budget import NO_ONEDNN, Budget, child_environment
from labsupport.ground.quiet import without_collections

FOLDER = "LABSUPPORT_TESTS_ROOTS"  # environment variable: where their sockets are
_READ_WHILE_LOADING = ("TF_", "XLA_", "KERAS_", "CUDA", "OMP_", "ONEDNN", "MALLOC_", "LD_", "PYTHON")
_SIZE = struct.Struct("<Q")
_START = "import sys; sys.path.insert(0, sys.argv[1]); import roots; roots.main(*sys.argv[2:])"


def plant(folder):
    """Begin the roots of a test run: of kernels, and of arms with and without oneDNN. Returns the processes; they end with this one."""
    os.environ[FOLDER] = str(folder)
    arm = child_environment(Budget.of(None, "2 GiB"), {})
    roots = [("kernel", dict(os.environ)), ("nursery", arm), ("nursery", arm | NO_ONEDNN)]
    return [
        subprocess.Popen(
            [sys.executable, "-P", "-c", _START, str(Path(__file__).parent), str(_address(kind, environment)), kind],
            env=environment,
            stdin=subprocess.PIPE,  # closed when this process ends
            start_new_session=True,
        )
        for kind, environment in roots
    ]


def _address(kind, environment):
    read = sorted(item for item in environment.items() if item[0].startswith(_READ_WHILE_LOADING))
    own = [item for item in read if item[0] not in nursery.OF_ONE_ARM]
    return Path(os.environ[FOLDER]) / f"{kind}-{hashlib.sha256(repr(own).encode()).hexdigest()[:16]}"


def _connected(kind, environment):
    """A socket to the root for this environment; None where there is none."""
    if not os.environ.get(FOLDER):
        return None
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(_address(kind, environment)))
    except OSError:
        connection.close()
        return None
    return connection


class Forked(psutil.Process):
    """A process forked from a root, much as a subprocess.Popen."""

    stdin = stdout = stderr = None

    def poll(self):
        return None if self.is_running() else 1  # nobody but its parent knows how it ended


def _forked(connection):
    """The process that a root has made for a connection, which tells its number."""
    return Forked(*_SIZE.unpack(connection.recv(_SIZE.size, socket.MSG_WAITALL)))


class Shared(nursery.Nursery):
    """A nursery from a root, where there is one for its environment."""

    def __init__(self, environment):
        self._socket = _connected("nursery", environment)
        if self._socket is None:
            super().__init__(environment)
        else:
            self.process = _forked(self._socket)


def share_nurseries():
    """From now on this process's nurseries come from the roots."""
    nursery.Nursery = Shared


@contextlib.contextmanager
def shared_nurseries():
    """Meanwhile this process's nurseries come from the roots: one of its own would be loaded for each environment that its tests make."""
    with mock.patch.multiple(nursery, Nursery=Shared, nurseries={}):
        yield
        for one in nursery.nurseries.values():
            one.leave()
            one.process.wait()  # or it would be a child that nobody knows any more


def share_kernels():
    """From now on Jupyter kernels that this process starts come from the roots, each with ports of this test worker."""
    from jupyter_client import connect
    from jupyter_client.provisioning import local_provisioner

    original = local_provisioner.launch_kernel
    connect.LocalPortCache.find_available_port = _port_of_this_worker

    def launch(command, stdin=None, stdout=None, stderr=None, env=None, independent=False, cwd=None, **more):
        connection = _connected("kernel", env)
        if connection is None or command[1:3] != ["-m", "ipykernel_launcher"]:
            return original(command, stdin, stdout, stderr, env, independent, cwd, **more)
        # nbval kills its kernels: what they leave in the temporary folder shall go with the test run.
        env = {**env, "TMPDIR": os.environ[FOLDER]}
        with connection, open(os.devnull) as nothing:
            nursery.send(connection, [nothing.fileno(), 1, 2], env, str(cwd or os.getcwd()), argv=command[2:])
            return _forked(connection)

    local_provisioner.launch_kernel = launch


def _ports():
    """Ports of this test worker, round and round, outside of those that systems give to connections (from 32768 on).

    Jupyter asks for any free port and lets go of it until the kernel takes it, and another may be quicker.
    """
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    own = range(10_000 + number, 32_768, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1)))
    start = os.getpid() % len(own)  # two test runs on one machine
    return itertools.cycle((*own[start:], *own[:start]))


_own_ports = _ports()


def _port_of_this_worker(cache, ip):
    for port in _own_ports:
        with socket.socket() as trial, contextlib.suppress(OSError):
            trial.bind((ip, port))
            return port


def main(address, kind):
    """A root: listens before it loads, and forks once for each connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    loaded = None
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        connection, _ = listener.accept()
        if loaded is None:
            loaded = _load_for_kernels() if kind == "kernel" else nursery.load()
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what has ended is gone, and no zombie that seems to run
        if os.fork() == 0:
            listener.close()
            os.setsid()
            null = os.open(os.devnull, os.O_RDONLY)
            os.dup2(null, 0)  # only the root lives as long as its standard input
            os.close(null)
            connection.sendall(_SIZE.pack(os.getpid()))
            if kind == "kernel":
                _be_kernel(connection)
            nursery.serve(connection, loaded)
        connection.close()


def _load_for_kernels():
    os.environ["MPLBACKEND"] = "module://matplotlib_inline.backend_inline"  # as ipykernel does
    with without_collections():
        import ipykernel.kernelapp  # noqa: F401
        import ipywidgets  # noqa: F401
        import matplotlib.pyplot  # noqa: F401
        import pandas  # noqa: F401

        import labsupport.fits.prediction  # noqa: F401
    return nursery.load()


def _be_kernel(connection):
    # What was loaded stays frozen, see load(): each collection in a lab's kernel took half a second to look through it again.
    request, streams = nursery.receive(connection)
    connection.close()
    nursery.settle(request, streams)
    sys.path[:] = [place for place in sys.path if place != str(Path(__file__).parent)]
    sys.modules.pop("roots")
    module, *arguments = request["argv"]
    sys.argv = [module, *arguments, f"--IPKernelApp.parent_handle={os.getppid()}"]  # it ends when its root has ended
    with contextlib.suppress(SystemExit):
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    os._exit(0)
