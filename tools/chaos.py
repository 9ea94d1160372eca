"""`make chaos ARGS="--arms 1000 --seed 1"` runs arms of random kinds, two at a time.

Each kind has the causes that it may end with. At the end no process, folder or open file may be left, and no arm may
have ended with another cause. Not part of `make test`: an arm takes a second.
"""

import argparse
import collections
import contextlib
import io
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import left_behind
import numpy as np
import psutil

from labsupport import phase
from labsupport.ground.arm import Job, watched
from labsupport.ground.record import Cause, Watcher

TIMEOUT = 10  # seconds, for arms that hang: a nursery has loaded TensorFlow, and longer waits show nothing more


def fine():
    import tensorflow as tf

    with phase("some"):
        return float(tf.reduce_sum(tf.ones([2**20])))


def out_of_memory():
    import tensorflow as tf

    return [tf.ones([2**22]) for _ in range(100)]


def numpy_out_of_memory():
    return np.ones(2**30)


def large_value():
    return np.zeros(random.randrange(1, 2**25))


def sessions():
    for _ in range(random.randrange(1, 20)):
        subprocess.Popen(["sleep", "1000"], start_new_session=True, env={})


def daemon():
    if os.fork():
        os._exit(0)
    os.setsid()
    time.sleep(1000)


def forks():
    for _ in range(20):
        if not os.fork():
            return "not the arm's"
    return None


def hang():
    sum(range(10**13))


def endless_output():
    def loop():
        while True:
            print("x" * 1000)
            sys.stderr.write("y" * 1000)

    threading.Thread(target=loop, daemon=True).start()
    time.sleep(1)


def noise():
    for number in range(3, 30):
        with contextlib.suppress(OSError):
            os.write(number, random.randbytes(100))
    time.sleep(1)


def deep():
    sys.setrecursionlimit(10**6)

    def call():
        call()

    call()


KINDS = {  # name: (function, what may come of it, how a Job differs)
    "fine": (fine, {None}, {}),
    "out of memory": (out_of_memory, {Cause.OOM}, {"budget": "256 MiB"}),
    "NumPy out of memory": (numpy_out_of_memory, {Cause.MEMORY}, {"outside": "512 MiB"}),
    "large value": (large_value, {None}, {}),
    "no value": (lambda: threading.Lock(), {Cause.NO_VALUE}, {}),
    "error": (lambda: 1 / 0, {Cause.ERROR}, {}),
    "exit": (lambda: os._exit(random.randrange(256)), {Cause.EXIT}, {}),
    "killed": (lambda: os.kill(os.getpid(), signal.SIGKILL), {Cause.KILLED}, {}),
    "crash": (lambda: os.kill(os.getpid(), signal.SIGSEGV), {Cause.CRASH}, {}),
    "group": (lambda: os.killpg(0, signal.SIGTERM), {Cause.KILLED}, {}),
    "sessions": (sessions, {None}, {}),
    "daemon": (daemon, {Cause.EXIT}, {}),
    "forks": (forks, {None}, {}),
    "hang": (hang, {Cause.TIMEOUT}, {"timeout": TIMEOUT}),
    "stop": (lambda: os.kill(os.getpid(), signal.SIGSTOP), {Cause.TIMEOUT}, {"timeout": TIMEOUT}),
    "endless output": (endless_output, {None}, {}),
    "noise": (noise, {Cause.GARBLED}, {}),
    "deep": (deep, {Cause.ERROR, Cause.MEMORY, Cause.TIMEOUT, Cause.CRASH}, {"timeout": TIMEOUT}),
}


class Silent(Watcher):
    """Shows nothing."""


def one(name):
    """What is wrong with one arm of a kind; "" if nothing."""
    function, expected, options = KINDS[name]
    result = watched(Job(function, **options), Silent)
    cause = result.error and result.error.cause
    return "" if cause in expected else f"{name}: {result}"


def remains(before):
    """Sentences on what the arms left."""
    sleeping = [
        process.pid for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", "1000"]
    ]
    found = {
        "folders": left_behind.folders(os.getpid()),
        "processes": left_behind.processes(),
        "open files": left_behind.descriptors() - before,
        "orphans": sleeping,
    }
    return [f"left behind: {what} {which}" for what, which in found.items() if which]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arms", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    random.seed(options.seed)
    names, wrong, done = random.choices(list(KINDS), k=options.arms), [], collections.Counter()
    before, began = left_behind.descriptors(), time.monotonic()
    with ThreadPoolExecutor(2) as pool, contextlib.redirect_stderr(io.StringIO()):
        for name, trouble in zip(names, pool.map(one, names)):
            done[name] += 1
            wrong += [trouble] * bool(trouble)
            print(
                f"{done.total()} of {options.arms} arms, {time.monotonic() - began:.0f} s, {len(wrong)} wrong: {name}",
                flush=True,
            )
    wrong += remains(before)
    print(", ".join(f"{number} × {name}" for name, number in sorted(done.items())))
    sys.exit("\n".join(wrong) if wrong else None)


if __name__ == "__main__":
    main()
