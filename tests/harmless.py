"""Healthy scripts, and scripts with troubles of their own that are none of memory: the doctor must not change any of them.

{name: text}; a comment line `# run: …` gives the words behind `python`, `# stdin: …` what is piped in. A text may hold further
files, each behind a line `#: path`. test_do_no_harm.py runs each both ways.
"""

PLAIN = {
    "arguments": """
# run: train.py --lr 0.1 "two words" ünïcode -- --budget
import sys
print(sys.argv)
""",
    "argparse error": """
# run: train.py --epochs many
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.parse_args()
""",
    "what a script is": """
'''Its docstring.'''
import __main__, inspect, os, sys, threading
print(__name__, __file__, __doc__, __package__, __spec__, type(__loader__).__name__, __builtins__)
print(sys.path[0], sys.path, sys.flags, sys.orig_argv[1:], sorted(vars(__main__)))
print(sorted(os.environ.items()), os.getcwd(), threading.active_count(), threading.current_thread())
def own(): return 1
print(inspect.getsource(own), sys.gettrace(), sys.getprofile(), sys.excepthook is sys.__excepthook__)
""",
    "exit status": """
import sys
sys.exit(3)
""",
    "exit with words": """
import sys
sys.exit("no data found")
""",
    "own error": """
def load(path):
    try:
        return {}[path]
    except KeyError as error:
        raise ValueError(f"cannot read {path}: ünïcode [red]markup[/x]") from error
load("a.csv")
""",
    "error without text": """
class Odd(Exception):
    def __str__(self):
        raise RuntimeError("no text")
raise Odd
""",
    "syntax error": "print('a'\nfor\n",
    "null bytes": "print(1)\n\0\n",
    "recursion": """
def deeper(n):
    return deeper(n + 1)
deeper(0)
""",
    "exit handlers": """
import atexit
log = open("losses.csv", "w")
atexit.register(print, "registered first")
atexit.register(log.close)
atexit.register(lambda: print("registered last", log.closed))
log.write("0,0.5\\n")
class Late:
    def __del__(self):
        print("deleted at the end")
late = Late()
""",
    "threads": """
import threading, time
def work(name, seconds):
    time.sleep(seconds)
    print(name, "ended", flush=True)
threading.Thread(target=work, args=("worker", 0.3)).start()
threading.Thread(target=work, args=("daemon", 60), daemon=True).start()
def fails():
    raise KeyError("in a thread")
threading.Thread(target=fails).start()
print("main ends", threading.active_count() >= 3, flush=True)
""",
    "all threads are waited for": """
import threading
for thread in threading.enumerate():
    if thread is not threading.main_thread():
        thread.join()
print("done")
""",
    "ends itself by SIGTERM": """
import os, signal, sys
print("working", flush=True)
os.kill(os.getpid(), signal.SIGTERM)
""",
    "ends itself by SIGKILL": """
import os, signal
print("a watchdog stops the job", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
""",
    "handles signals": """
import os, signal, sys
def stop(number, frame):
    print("saving", signal.Signals(number).name)
    if number == signal.SIGTERM:
        sys.exit(5)
signal.signal(signal.SIGALRM, stop)
signal.setitimer(signal.ITIMER_REAL, 0.05)
signal.pause()
signal.signal(signal.SIGTERM, stop)
os.kill(os.getpid(), signal.SIGTERM)
""",
    "interrupts itself": """
import os, signal, time
print(signal.getsignal(signal.SIGINT), signal.pthread_sigmask(signal.SIG_BLOCK, []), flush=True)
os.kill(os.getpid(), signal.SIGINT)
time.sleep(5)
""",
    "_exit": """
import os, sys
print("flushed", flush=True)
print("lost, since nothing flushes it")
os._exit(7)
""",
    "input": """
# stdin: first\\nüsecond\\nthird
import sys
name = input("Name of the run? ")
print("run", name, "| rest", repr(sys.stdin.read()), sys.stdin.isatty())
""",
    "end of input": """
input("Continue? ")
""",
    "subprocesses": """
import subprocess, sys
print(subprocess.run([sys.executable, "-c", "import os; print(sorted(os.environ), len(os.listdir('/proc/self/fd')))"],
                     capture_output=True, text=True).stdout)
print(subprocess.run("echo to stderr >&2; exit 4", shell=True).returncode)
""",
    "forks by hand": """
import os, sys
print("once", flush=True)
child = os.fork()
if child == 0:
    print("in the child", flush=True)
    sys.exit(4)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
""",
    "multiprocessing spawn": """
import multiprocessing as mp
from dataclasses import dataclass
@dataclass
class Job:
    n: int
def work(job):
    return Job(job.n ** 2)
if __name__ == "__main__":
    with mp.get_context("spawn").Pool(2) as pool:
        print(pool.map(work, [Job(i) for i in range(4)]))
""",
    "multiprocessing fork": """
import multiprocessing as mp, concurrent.futures as futures
def work(n):
    if n == 3:
        raise ValueError("three")
    return n * factor
if __name__ == "__main__":
    factor = 10
    context = mp.get_context("fork")
    process = context.Process(target=print, args=("in a process",))
    process.start()
    process.join()
    with futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        print([pool.submit(work, n).exception() or "fine" for n in range(5)], process.exitcode)
""",
    "becomes another program": """
import os, sys
os.execv(sys.executable, [sys.executable, "-c", "import sys; print('another'); sys.exit(6)"])
""",
    "asyncio": """
import asyncio
async def step(n):
    await asyncio.sleep(0.01)
    return n
async def main():
    print(await asyncio.gather(*(step(n) for n in range(3))))
asyncio.run(main())
""",
    "logging": """
import logging
logging.basicConfig(filename="run.log", level=logging.INFO, format="%(levelname)s %(filename)s:%(lineno)d %(message)s")
logging.getLogger().addHandler(logging.StreamHandler())
logging.info("epoch %d", 1)
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("failed")
""",
    "warnings": """
import warnings
warnings.warn("twice the rate")
warnings.warn("is old", DeprecationWarning)
warnings.simplefilter("error")
warnings.warn("now an error")
""",
    "stdout replaced": """
import sys
class Tee:
    def __init__(self, stream): self.stream, self.file = stream, open("out.txt", "w")
    def write(self, text): self.file.write(text); return self.stream.write(text)
sys.stdout = Tee(sys.stdout)
print("ünïcode \\u2714 and [bold]markup[/bold]")
sys.stderr = None
""",
    "stdout closed": """
import os, sys
print("before")
sys.stdout.close()
sys.stderr.write("after\\n")
os.close(0)
""",
    "own excepthook": """
import sys
def hook(kind, error, trace):
    with open("crash.txt", "w") as file:
        file.write(f"{kind.__name__} {error} {trace.tb_lineno} {trace.tb_next}")
sys.excepthook = hook
print(undefined)
""",
    "pickles its classes": """
import pickle
class Record:
    def __init__(self, n): self.n = n
with open("record.pkl", "wb") as file:
    pickle.dump(Record(3), file)
print(pickle.load(open("record.pkl", "rb")).n, Record.__module__, pickle.dumps(Record))
""",
    "garbage in its own time": """
import gc
class Cycle:
    def __init__(self, n): self.me, self.n = self, n
    def __del__(self): print("collected", self.n)
for n in range(3):
    Cycle(n)
print("all made", gc.isenabled(), gc.get_threshold(), gc.get_freeze_count())
gc.collect()
""",
    "temporary files": """
import os, tempfile, pathlib
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "a").write_text("1")
    print(os.path.dirname(folder), os.listdir(folder))
os.makedirs("made/deep")
pathlib.Path("made/deep/file.txt").write_text("2")
os.chmod("made/deep/file.txt", 0o640)
print(oct(os.umask(0o022)))
""",
    "package with relative imports": """
# run: -m package.train --epochs 2
#: package/__init__.py
print("package", __name__)
#: package/helper.py
def double(n): return 2 * n
#: package/train.py
import sys
from .helper import double
print(__name__, __package__, __spec__.name, double(3), sys.argv[1:], sys.path[0] == __import__("os").getcwd())
raise SystemExit(2)
""",
    "package with __main__": """
# run: -m package
#: package/__init__.py
#: package/__main__.py
from . import __name__ as parent
print(parent, __file__)
1 / 0
""",
    "no such module": "# run: -m absent.module\n",
    "own sitecustomize": """
import settings_of_site
print(settings_of_site.loaded)
""",
    "h5py, NumPy, pandas": """
import h5py, numpy as np, pandas as pd
from h5py.h5f import is_hdf5
with h5py.File("data.h5", "w") as file:
    file["x"] = np.arange(4)
print(pd.DataFrame({"x": h5py.File("data.h5")["x"][:]}).describe())
pd.DataFrame({"a": [1]}).to_csv("table.csv")
h5py.File("missing.h5", "r")
""",
    "tqdm, matplotlib": """
import matplotlib
matplotlib.use("agg")
import matplotlib.pyplot as plt
from tqdm import tqdm
for n in tqdm(range(3), bar_format="{n} of {total}", mininterval=0):
    plt.plot([n, 1])
plt.savefig("plot.png")
print(len(plt.get_fignums()))
""",
}

_FIT = """
keras.utils.set_random_seed(1)
x, y = np.random.rand(64, 8).astype("float32"), np.random.rand(64, 1).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
"""

TENSORFLOW = {
    "fit with callbacks and workers, saved model": f"""
# run: train.py --epochs 3
import argparse, atexit, numpy as np, keras
class Batches(keras.utils.PyDataset):
    def __len__(self): return 6
    def __getitem__(self, i): return x[i * 8:(i + 1) * 8], y[i * 8:(i + 1) * 8]
{_FIT}
class Own(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        log.write(f"{{epoch}},{{logs['loss']:.6f}}\n")
if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int)
    epochs = parser.parse_args().epochs
    log = open("losses.csv", "w")
    atexit.register(log.close)
    calls = [keras.callbacks.CSVLogger("log.csv"), keras.callbacks.TensorBoard("logs"), Own(),
             keras.callbacks.ModelCheckpoint("best.keras"), keras.callbacks.EarlyStopping("loss")]
    model.fit(x, y, epochs=epochs, validation_split=0.25, verbose=2, callbacks=calls)
    model.save_weights("last.weights.h5")
    again = keras.models.load_model("best.keras")
    print(np.abs(again.predict(x, verbose=0) - model.predict(x, verbose=0)).max(), model.evaluate(x, y, verbose=0))
    for processes in (False, True):
        data = Batches(workers=2, use_multiprocessing=processes)
        print(len(model.fit(data, epochs=2, verbose=0).history["loss"]))
    model.summary()
    raise KeyError("val_accuracy")
""",
    "custom loops, a GAN, own devices, garbage in its own time, an error in a pipeline": """
import gc, logging, os, sys, traceback
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0],
                                           [tf.config.LogicalDeviceConfiguration()] * 2)
tf.config.threading.set_intra_op_parallelism_threads(2)
tf.keras.utils.set_random_seed(2)
class Record:
    def __init__(self, n): self.me, self.n, self.outputs = self, n, tf.ones([8])
    def __del__(self): print("collected", self.n)
gc.disable()
weight = tf.Variable(tf.ones([8, 8]))
for n in range(9):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight ** 2)
    Record(n); tape.gradient(loss, weight)
print("all made", sys.getrefcount(weight))
gc.enable(); gc.collect()
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(tf.ones([32, 4]), tf.ones([32, 1]), verbose=0)
print(strategy.num_replicas_in_sync, [d.name for d in tf.config.list_logical_devices()], os.environ["TF_CPP_MIN_LOG_LEVEL"])
g, d = tf.Variable(tf.ones([4, 4])), tf.Variable(tf.ones([4, 1]))
@tf.function
def step(z):
    print("traced")
    with tf.GradientTape() as a, tf.GradientTape() as b:
        fake = tf.sigmoid(z @ g @ d)
        up, down = tf.reduce_mean(fake), tf.reduce_mean(1 - fake)
    g.assign_sub(0.1 * a.gradient(up, g)); d.assign_sub(0.1 * b.gradient(down, d))
    return up
for n in range(20):
    loss = step(tf.random.normal([8, 4]))
tf.print("loss", tf.round(loss * 1000))
print(sum(int(b) for b in tf.data.Dataset.range(9).shuffle(9).prefetch(1)))
try:
    tf.ones([2, 3]) @ tf.ones([2, 3])
except tf.errors.InvalidArgumentError as error:
    print(type(error).__name__, error.message[:60])
try:
    next(iter(tf.data.Dataset.range(1).map(lambda n: tf.debugging.check_numerics(1 / n, "no first row"))))
except tf.errors.InvalidArgumentError:
    traceback.print_exc()
try:
    tf.keras.optimizers.SGD(learning_rate="fast")
except ValueError:
    logging.exception("no such rate")
class Wrong(tf.keras.Model):
    def call(self, x):
        return tf.matmul(x, tf.zeros([7, 3]))
for call in (Wrong(), tf.function(Wrong(), autograph=False)):
    try:
        call(tf.zeros([2, 5]))
    except (ValueError, tf.errors.InvalidArgumentError):
        traceback.print_exc()
try:
    tf.constant(gc)
except ValueError as error:
    print(traceback.format_exc(), [row.name for row in traceback.extract_tb(error.__traceback__)])
for row in tf.data.Dataset.range(3).map(lambda n: tf.debugging.check_numerics(1 / (n - 1), "no second row")):
    print(float(row))
""",
    "graphs of TensorFlow 1, others in a spawned process and a thread": """
import importlib.util, multiprocessing as mp, os, signal, sys, threading
def work(n):
    import tensorflow as tf
    return float(tf.reduce_sum(tf.ones([n])))
if __name__ == "__main__":
    print(importlib.util.find_spec("tensorflow").loader.__class__.__name__)
    with mp.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [2]), "tensorflow" in sys.modules)
    thread = threading.Thread(target=lambda: print(work(4)))
    thread.start(); thread.join()
    import tensorflow.compat.v1 as tf
    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float32, [None, 2])
        print(session.run(tf.reduce_sum(x), {x: [[1, 2], [3, 4]]}))
    tf.disable_eager_execution()
    import tensorflow
    print(threading.active_count(), tensorflow.__spec__.loader, tensorflow.executing_eagerly(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
""",
}
SCRIPTS = PLAIN | TENSORFLOW
