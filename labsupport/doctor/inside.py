"""In the process of a script that the doctor examines: probes that come with TensorFlow, and a last look at the end.

Python itself runs the script. Until TensorFlow is imported nothing is loaded here but the standard library, and what goes
wrong in here never reaches the script. The environment that TensorFlow's allocator reads is set in the C library alone,
where os.environ does not show it.
"""

import _thread
import atexit
import ctypes
import faulthandler
import functools
import os
import sys
import time
from contextlib import contextmanager

from labsupport.doctor.wrapping import quietly  # which needs no more than the standard library, as the next one
from labsupport.ground.quiet import without_collections

_LOOK_SECONDS = 0.5  # between two looks at what a long call of the script buffers: two looks tell that it is long


visit = None  # the one _Visit of this process


def begin(settings):
    """Called before the script. settings: see process.py."""
    global visit
    visit = _Visit(settings)
    sys.meta_path.insert(0, _WithTensorflow(visit))
    atexit.register(visit.end)  # the first one registered is called last, when the script's threads have ended, too


def _resident():
    """Bytes of this process's resident set; 0 where there is no /proc."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


class _WithTensorflow:
    """On sys.meta_path: lets a visit know when TensorFlow or Keras is imported, and when that has ended. It finds nothing itself."""

    def __init__(self, visit):
        self._visit, self._asking, self._left = visit, False, {"tensorflow", "keras"}

    def find_spec(self, name, path=None, target=None):
        if name not in self._left or self._asking:
            return None
        self._asking = True
        try:
            found = (finder.find_spec(name, path, target) for finder in sys.meta_path if hasattr(finder, "find_spec"))
            spec = next(filter(None, found), None)
        finally:
            self._asking = False
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader.exec_module = functools.partial(self._execute, spec.loader, spec.loader.exec_module)
        return spec

    def _execute(self, loader, execute, module):
        del loader.exec_module
        self._left.discard(module.__name__)
        with self._visit.of_tensorflow():
            if module.__name__ == "keras":
                execute(module)
                self._visit.after_keras(module)
                self._visit.try_remedy("keras")
                return
            self._visit.before_tensorflow()
            with without_collections():
                execute(module)
            self._visit.after_tensorflow(module)
            self._visit.try_remedy("tensorflow")


class _Visit:
    """What is done in the process, and when."""

    def __init__(self, settings):
        self._settings, self._pid = settings, os.getpid()
        self._zero, self._base = time.monotonic(), _resident()
        self._looked = 0.0
        self._ended = False
        self._inside, self._device = False, ""  # in of_tensorflow(); the device that is read
        self._resident = self._private = 0  # bytes that Python and TensorFlow took for themselves
        self._probe = self._gauge = self._sender = self._recording = self._keras = None
        os.set_inheritable(settings["records"], False)
        os.set_inheritable(settings["log"], False)
        os.set_inheritable(settings["crash"], False)
        if not faulthandler.is_enabled():  # somebody wants to see it on standard error
            faulthandler.enable(settings["crash"])

    def _elsewhere(self):
        """Whether this is a process that the script has forked, of which nothing is told."""
        return os.getpid() != self._pid

    @contextmanager
    def of_tensorflow(self):
        """What the process grows by in here is TensorFlow's own: it is allowed, and not counted."""
        outermost, self._inside = not self._inside, True  # Keras imports TensorFlow
        before = self._sizes() if outermost else None
        try:
            yield
        finally:
            if outermost:
                self._inside = False
                self._add(before)

    @quietly
    def ready(self):
        """In the kernel of a notebook, before its first cell: what the kernel took for itself is not the notebook's."""
        self._add((self._base, 0))

    @quietly
    def _sizes(self):
        from labsupport.ground.budget import lift_process_limit, process_status

        lift_process_limit()
        return _resident(), process_status("VmData") or 0

    @quietly
    def _add(self, before):
        from labsupport.ground.budget import Budget

        after = self._sizes()
        self._resident += after[0] - before[0]
        self._private += after[1] - before[1]
        if self._gauge is not None:
            self._gauge.process_zero = self._base + self._resident
            self._tell_start()
        Budget(*self._settings["budget"]).limit_process(self._settings["private"] + self._private)

    @quietly
    def before_tensorflow(self):
        from labsupport.ground.budget import Budget

        library = ctypes.CDLL(None)
        level = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "0")
        for name, value in Budget(*self._settings["budget"]).environment().items():
            library.setenv(name.encode(), value.encode(), 1)
        self._redirect(library, level)

    def _redirect(self, library, level):
        """What compiled code prints to standard error goes to the doctor, who reads TensorFlow's log and passes it on.

        Python's own sys.stderr is another stream to the same descriptor, and stays as it is.
        """
        os.write(self._settings["log"], f"{level}\n".encode())
        library.fdopen.restype = ctypes.c_void_p
        stream = ctypes.c_void_p(library.fdopen(self._settings["log"], b"w"))
        if stream:
            library.setvbuf(stream, None, 2, 0)  # 2: _IONBF, or what a dying process printed last would be lost
            ctypes.c_void_p.in_dll(library, "stderr").value = stream.value

    def try_remedy(self, library):
        """Apply the remedy that is on trial, if it is one for this library, which has just been loaded."""
        if not self._settings["remedy"]:
            return
        from labsupport.doctor.remedies import REMEDIES

        remedy = REMEDIES[self._settings["remedy"]]
        if remedy.library == library:
            remedy.apply()

    @quietly
    def after_tensorflow(self, tf):
        """Install the probes; the counters come with TensorFlow's devices, which the script may still set up."""
        if self._elsewhere():
            return
        from tensorflow.python.eager import context

        # All that is needed at the end: Python forgets that it shall end by SIGINT when anything evaluates source then, as
        # some modules do when they are imported (pythonrun.c: _Py_UnhandledKeyboardInterrupt).
        import labsupport.ground.child  # noqa: F401
        from labsupport.doctor.probes import Probe
        from labsupport.ground import meter
        from labsupport.ground.budget import Budget
        from labsupport.ground.pipe import Sender

        self._sender = Sender(self._settings["records"])
        meter.connect(self._sender.send)
        budget = Budget(*self._settings["budget"])
        device = budget.configure(tf, self._settings["devices"])
        self._gauge = meter.Meter()
        self._gauge.start_late(self._zero, self._base)
        self._probe = Probe(self._gauge, tf)
        self._probe.install()
        if self._keras is not None:
            self._probe.see_keras(self._keras)
        _stay_out_of_graphs()
        if device.startswith("GPU"):  # its share has been set, as the budget
            self._probe.forgive_late_settings()
        self._probe.send()
        original = context.Context.ensure_initialized

        @functools.wraps(original)
        def ensure_initialized(of_context):
            if of_context._initialized:
                return original(of_context)
            with self.of_tensorflow():
                original(of_context)
                context.Context.ensure_initialized = original
                self._devices_made(tf, budget, device)

        context.Context.ensure_initialized = ensure_initialized

    @quietly
    def after_keras(self, keras):
        """The probes are there already where Keras has imported TensorFlow, and not where TensorFlow is importing Keras."""
        self._keras = keras
        if self._probe is not None:
            self._probe.see_keras(keras)

    @quietly
    def _devices_made(self, tf, budget, device):
        if self._elsewhere():
            return
        from labsupport.ground import meter

        budget.reserve(tf, device)
        self._gauge.counter = meter.AllocatorCounter(tf, device)
        self._gauge.start_late(self._zero, self._base + self._resident)
        meter.active = self._gauge
        self._device = device
        if self._settings["lines"]:
            self._record_lines()
        _thread.start_new_thread(self._sample, ())  # not one of threading's, which a script may count and wait for

    def _tell_start(self):
        from labsupport.ground.record import Start

        self._sender.send(Start(self._zero, self._gauge.process_zero, self._device, self._pid))

    def _record_lines(self):
        import keras  # noqa: F401  a recording marks the layers and optimizers of what is loaded when it begins

        from labsupport.peak.here import recorded

        block = recorded()
        self._recording = block, block.__enter__()

    @quietly
    def _sample(self):
        self._gauge.keep_sampling(self._look_sometimes)

    def _look_sometimes(self):
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            self._probe.look_between()

    @quietly
    def end(self, failed=True):
        """The script's code, its threads and its own exit handlers have ended. failed: whether its last error ended it."""
        if self._ended:
            return
        self._ended = True
        error = (getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)) if failed else None
        nothing = error is None or isinstance(
            error, KeyboardInterrupt
        )  # an import would change its exit status, see above
        if self._elsewhere() or (nothing and self._sender is None and not _other_libraries()):
            return
        from labsupport.ground.budget import lift_process_limit
        from labsupport.ground.child import record_of
        from labsupport.ground.pipe import Sender
        from labsupport.ground.record import End, Facts

        lift_process_limit()
        self._sender = self._sender or Sender(self._settings["records"])
        figures = self._gauge.figures() if self._gauge else {}
        seconds = time.monotonic() - self._zero
        if self._probe is not None:
            self._last_look(error)
        else:
            self._sender.send(Facts(unseen=_other_libraries()))
        raised = None if error is None else record_of(error)
        if raised is not None and "labsupport.doctor.cells" in sys.modules:  # of a notebook
            raised = sys.modules["labsupport.doctor.cells"].told(raised)
        self._sender.send(End(seconds, figures, raised))

    @quietly
    def _last_look(self, error):
        with without_collections():  # what waits for the collector is to be counted
            self._probe.script_ends(error)
            self._probe.unseen = _other_libraries()
            if self._recording is not None:
                block, seen = self._recording
                block.__exit__(None, None, None)
                self._probe.name_holders(seen)
            self._probe.last_census(error)


def _stay_out_of_graphs():
    """Let TensorFlow leave out the probes' frames where an error's text tells in which lines an operation was made."""
    from tensorflow.python.util import tf_stack

    from labsupport.doctor.wrapping import OURS

    class OurFrames(tf_stack.StackTraceFilter):
        def get_filtered_filenames(self):
            return frozenset(os.path.join(OURS, name) for name in os.listdir(OURS))

    OurFrames().__enter__()  # for this thread, until it ends


def _other_libraries():
    """Names of libraries that ran here whose memory the doctor cannot see."""
    keras = sys.modules.get("keras.src.backend.config")
    backend = getattr(keras, "_BACKEND", None)
    return [f"Keras on {backend}"] if backend not in (None, "tensorflow") else []
