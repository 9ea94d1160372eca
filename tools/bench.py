"""What measuring costs: the time of one function in run(), drawn live, over its time in a plain process.

Both processes have the same environment, allocator and budget, and they take turns. The ratio of the medians of the
elapsed time should be below 1.02 on an idle machine. On a busy one elapsed time says little; the processor time that
the function took is printed beside it, and the exit code is 1 only where that is beyond 1.10.

Beside it what a look costs, the run of its own in which take_apart() records each allocation, over the run that it repeats;
and what the doctor costs three kinds of scripts of half a minute, which should be below 1.03 (a run of seconds pays as much
for the first censuses: some 0.3 s), and how long after a script's end its report
is there, which should be below 2 seconds.
"""

import contextlib
import io
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


_TIMED = """
before = time.perf_counter(), time.process_time()
work({times})
print("WORK", time.perf_counter() - before[0], time.process_time() - before[1], flush=True)
{end}
print("END", time.monotonic(), flush=True)
"""
# name: (what stands above, how often work() does its work when it is timed)
SCRIPTS = {
    "Keras' fit": (
        """
import time, keras, numpy as np
x, y = np.ones((4096, 64), np.float32), np.ones((4096, 1), np.float32)
model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(256, "relu") for _ in range(4)), keras.layers.Dense(1)])
model.compile("adam", "mse")
def work(times): model.fit(x, y, epochs=times, verbose=0)
work(2)
""",
        60,
    ),
    "a loop of its own": (
        """
import time, tensorflow as tf
w = [tf.Variable(tf.random.normal([512, 512])) for _ in range(4)]
@tf.function
def step(x):
    with tf.GradientTape() as tape:
        y = x
        for one in w: y = tf.nn.relu(y @ one)
        loss = tf.reduce_mean(y)
    for one, gradient in zip(w, tape.gradient(loss, w)): one.assign_sub(1e-6 * gradient)
    return loss
def work(times):
    for x in tf.data.Dataset.from_tensors(tf.ones([128, 512])).repeat(times): step(x)
work(20)
""",
        4_000,
    ),
    "many small eager steps": (
        """
import time, tensorflow as tf
a = tf.random.normal([192, 192]); w = tf.Variable(a); optimizer = tf.keras.optimizers.SGD(1e-6)
def work(times):
    for _ in range(times):
        with tf.GradientTape() as tape: loss = tf.reduce_mean(tf.nn.relu(a @ w))
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])
work(100)
""",
        12_000,
    ),
}
_LONG_ERROR = "import atexit; atexit.register(lambda: print('END', time.monotonic(), flush=True)); raise ValueError('x' * 40_000_000)"


def _timed(script, doctor):
    """{"WORK": [elapsed, processor] seconds, "END": [seconds from the script's end until its process, or the doctor, ended]}."""
    command = (
        ["-m", "labsupport", "doctor", str(script), "--budget", BUDGET, "--report", f"{script}.txt"]
        if doctor
        else [str(script)]
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    environment |= {} if doctor else Budget.of(BUDGET, OUTSIDE).environment()
    done = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
    ended = time.monotonic()
    told = {
        word: list(map(float, more))
        for word, *more in map(str.split, done.stdout.splitlines())
        if word in ("WORK", "END")
    }
    return told | {"END": [ended - told["END"][0]]}


def doctors():
    """Print what the doctor costs, bare Python and the doctor taking turns, and when its report is there."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "train.py"
        for name, (above, times) in SCRIPTS.items():
            script.write_text(above + _TIMED.format(times=times, end=""))
            pairs = [(_timed(script, False), _timed(script, True)) for _ in range(REPEATS)]
            elapsed, processor = (
                statistics.median(seen["WORK"][n] for _, seen in pairs)
                / statistics.median(bare["WORK"][n] for bare, _ in pairs)
                for n in (0, 1)
            )
            report = statistics.median(seen["END"][0] for _, seen in pairs)
            print(
                f"the doctor on {name}: elapsed {elapsed:.3f} ×, processor {processor:.3f} ×, report after {report:.1f} s",
                flush=True,
            )
        above, times = SCRIPTS["a loop of its own"]
        script.write_text(above + _TIMED.format(times=1, end=_LONG_ERROR))
        print(f"the doctor on an error's text of 40 MB: report after {_timed(script, True)['END'][0]:.1f} s")


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
    if sys.argv[1:] == ["doctor"]:
        doctors()
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
    doctors()
    verdict = "PASS" if elapsed <= GOOD else "FAIL"
    print(f"medians: elapsed {elapsed:.3f} × plain, processor {processor:.3f} × plain; {verdict} (limit {GOOD})")
    sys.exit(processor > BROKEN)


if __name__ == "__main__":
    main()
