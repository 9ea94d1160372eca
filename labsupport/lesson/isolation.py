"""Processes that see no network but their own: for servers that listen on every interface without a token.

Linux gives a process a network namespace of its own without any rights (util-linux: unshare --user --net). Where there
is none, as on macOS and in some containers, isolated() returns None.
"""

import base64
import contextlib
import json
import subprocess
import sys

import cloudpickle

_CODE = "from labsupport.lesson.isolation import answer; answer()"
_SIOCSIFFLAGS = 0x8914  # linux/sockios.h: set the flags of a network device
_SECONDS = 120  # for loading TensorFlow several times side by side, and the work


def _job(function, args, loopback):
    job = {"path": sys.path, "loopback": loopback}
    return f"{json.dumps(job)}\n{base64.b64encode(cloudpickle.dumps((function, args))).decode()}\n"


def isolated(function, *args):
    """What function(*args) returns (JSON) in a process that reaches nothing but itself; None where that cannot be had."""
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", _CODE]
    job = _job(function, args, loopback=True)
    try:
        done = subprocess.run(command, input=job, capture_output=True, text=True, check=True, timeout=_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def beside(function, *args):
    """Run function(*args) in a further process of the same network, from when it has printed a line until the block ends.

    Gives the number of the process.
    """
    command = [sys.executable, "-c", _CODE]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **streams) as process:
        process.stdin.write(_job(function, args, loopback=False))
        process.stdin.close()
        process.stdout.readline()
        try:
            yield process.pid
        finally:
            process.kill()


def answer():
    """In the new process: read a job, run it, print what it returns."""
    job, packed = json.loads(sys.stdin.readline()), sys.stdin.readline()
    sys.path[:] = job["path"]
    if job["loopback"]:
        _raise_loopback()
    function, args = cloudpickle.loads(base64.b64decode(packed))
    print(json.dumps(function(*args)))


def _raise_loopback():
    """Bring up the loopback device, which is down in a new namespace."""
    import fcntl
    import socket
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", 1, b""))  # 1: IFF_UP
