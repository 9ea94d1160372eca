"""What measuring costs: the time of one function in run(), drawn live, over its time in a plain process.

Both processes have the same environment, allocator and budget, and they take turns. The ratio of the medians of the
elapsed time should be below 1.02 on an idle machine. On a busy one elapsed time says little; the processor time that
the function took is printed beside it, and the exit code is 1 only where that is beyond 1.10.

Beside it what a look costs, the run of its own in which take_apart() records each allocation, over the run that it repeats.
"""

import contextlib
import io
import statistics
import subprocess
import sys
import time

from labsupport import expect_finished, run
from labsupport.ground.budget import Budget, child_environment, mib
from labsupport.peak.looking import looked
from labsupport.showing import live

REPEATS, BUDGET, OUTSIDE = 5, "1 GiB", "2 GiB"
GOOD, BROKEN = 1.02, 1.10


def work(times=50_000):
    """(elapsed, processor) seconds of many small eager steps: each needs the GIL, so a thread that samples is felt."""
    import tensorflow as tf

    a = tf.random.stateless_normal([192, 192], seed=[1, 2])
    for _ in range(200):
        a @ a
    elapsed, processor = time.perf_counter(), time.process_time()
    for _ in range(times):
        tf.nn.relu(a @ a)
    return time.perf_counter() - elapsed, time.process_time() - processor


def plain():
    """The same in this process, without any measuring."""
    import tensorflow as tf

    Budget.of(BUDGET, OUTSIDE).apply(tf, 1)
    return work()


def small_operations():
    """(elapsed, processor) seconds of few enough of them that a whole recording fits into memory."""
    return work(5_000)


def keras_fit():
    """The same of a model that trains in a graph."""
    import keras
    import numpy as np

    x, y = np.ones((4096, 64), np.float32), np.ones((4096, 1), np.float32)
    model = keras.Sequential(
        [keras.Input((64,)), *(keras.layers.Dense(256, "relu") for _ in range(4)), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse")
    model.fit(x, y, epochs=1, verbose=0)
    elapsed, processor = time.perf_counter(), time.process_time()
    model.fit(x, y, epochs=10, verbose=0)
    return time.perf_counter() - elapsed, time.process_time() - processor


def timed_look(function):
    """In an arm: seconds of the function while it is recorded, without what is made of the recording afterwards."""
    took = []
    looked(lambda: took.append(function()), (), None, None)
    return took[0]


def looks():
    """Print what looking costs, for the worst case and for an ordinary one."""
    for function in (small_operations, keras_fit):
        ratios = []
        for _ in range(REPEATS):
            with contextlib.redirect_stdout(io.StringIO()):
                plainly, look = (
                    run(*what, budget=BUDGET, outside="4 GiB", quiet=True)
                    for what in ((function,), (timed_look, function))
                )
            expect_finished(plainly, look)
            ratios.append(look.value[0] / plainly.value[0])
            process = look.figures["process_peak"] - plainly.figures["process_peak"]
        low, high = min(ratios), max(ratios)
        name, middle = function.__name__.replace("_", " "), statistics.median(ratios)
        print(
            f"a look at {name}: {middle:.2f} × its time ({low:.2f} to {high:.2f}), {mib(process)} more of process memory"
        )


class Drawing(live.NotebookPlot):
    """Draws as in a notebook; there is only no notebook to leave a picture in."""

    def finish(self, result):
        pass

    def abandon(self):
        pass


def main():
    if sys.argv[1:] == ["plain"]:
        print(*plain())
        return
    live.plot_for = Drawing
    environment = child_environment(Budget.of(BUDGET, OUTSIDE), {})
    command = [sys.executable, __file__, "plain"]
    without, measured = [], []
    for repeat in range(REPEATS):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        without.append(tuple(map(float, done.stdout.split())))
        with contextlib.redirect_stdout(io.StringIO()):
            result = run(work, budget=BUDGET, outside=OUTSIDE)
        expect_finished(result)
        measured.append(result.value)
        seconds = f"{without[-1][0]:.2f} s plain, {measured[-1][0]:.2f} s measured and drawn"
        print(f"{repeat + 1} of {REPEATS}: {seconds}", flush=True)
    elapsed, processor = (statistics.median(m) / statistics.median(w) for m, w in zip(zip(*measured), zip(*without)))
    looks()
    verdict = "PASS" if elapsed <= GOOD else "FAIL"
    print(f"medians: elapsed {elapsed:.3f} × plain, processor {processor:.3f} × plain; {verdict} (limit {GOOD})")
    sys.exit(processor > BROKEN)


if __name__ == "__main__":
    main()
