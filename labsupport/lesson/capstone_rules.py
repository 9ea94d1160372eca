"""What the capstone's checker measures of a script's functions, in the process of an arm. It reads no source.

A fault is a quantity that grows with something it should not grow with, so any cure of it counts. Beside the faults stand
duties: what the cured script must still do. A duty left undone, and whatever a function raises, is told in a sentence.
"""

import contextlib
import ctypes
import gc
import itertools
import os
import shutil
import tempfile
import threading
import time
import traceback
from functools import cached_property
from typing import NamedTuple

import numpy as np

from labsupport.ground import meter
from labsupport.ground.result import is_own
from labsupport.lesson.capstone_training import Training, made_at, near
from labsupport.lesson.catalogue import labs

SCRIPT = {  # the script's functions, and what each is to do
    "image_dataset": "image_dataset(files, labels) gives a tf.data.Dataset of single (image, label) pairs",
    "make_pipeline": "make_pipeline(images) gives shuffled, augmented batches (images, labels) for one epoch",
    "build_model": "build_model() gives the Keras model as it was",
    "make_step": "make_step(model, optimizer) gives a function of (images, labels, rate) that takes one training step",
    "learning_rate": "learning_rate(start, epoch) gives what the step takes as its rate",
    "train_epoch": "train_epoch(step, batches, rate, history) takes a step a batch, and notes loss and size of the gradients "
    "in the list history",
    "evaluate": "evaluate(model, images) gives the share of right answers among all images",
    "search": "search(rates, train, validation, epochs) gives {rate: (last accuracy, history)}, each from the same start",
    "main": "main(files, labels) trains at all RATES for all EPOCHS, in its own process, and gives the best accuracy",
}


class Fault(NamedTuple):
    """A planted fault: the lab that has its cure, what is measured, and the most that is allowed."""

    lab: str
    what: str
    most: float

    @property
    def number(self):
        return labs()[self.lab].number


# Where a fault is there, theory gives the number in brackets.
FAULTS = {
    "eager stack": Fault(
        "image_stacking", "images held by a new data set, for each of its images", 0.2
    ),  # [1: the stack]
    "float64": Fault("arrays_into_datasets", "bytes of a number in a training batch", 4),  # [8]
    "decoded buffer": Fault(
        "pipeline_buffers", "images held by a running pipeline, for each of its images", 0.2
    ),  # [1]
    "giant batch": Fault("batch_size", "growth of evaluate() for each further image, in images", 0.5),  # [more than 2]
    "history": Fault("leaks_over_epochs", "growth for each step, in sizes of the weights", 0.05),  # [1: the gradients]
    "retracing": Fault(
        "retracing", "graphs that each further epoch leaves", 0.5
    ),  # [1 or more: each new rate is traced]
    "model per trial": Fault(
        "a_model_per_trial", "growth for each further trial, in sizes of the weights", 1.5
    ),  # [3 with the model, 2 where Adam's slots alone stay; 1 would be a trial's best weights]
}
_STEP_IMAGES = 32
_UNSEEN = 15  # the class that only validation images have, in _canary()


class Trouble(Exception):
    """What a function of the script does wrong, in a sentence."""


def told(name, what):
    """The sentence: what the function of this name does, and what it is to do."""
    return f"{name} {what}. {SCRIPT[name]}."


def no_function(value):
    """What stands in place of a function, in words."""
    return "is missing" if value is None else f"is no function but {value!r:.40}"


def _said(error):
    """An exception in words, with the script's own line where it arose."""
    kind = type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)]
    lines = [frame.line for frame in frames if "__autograph_generated" not in frame.filename]
    place = f' in the line "{lines[-1]}"' if lines else ""
    words = str(error).strip().splitlines() or ["no message"]
    # What arises while a graph is made comes with its own traceback in front.
    word = words[-1] if words[0].startswith("in user code") else words[0]
    return f"raises {kind}{place}: {word.strip().removeprefix(f'{kind}: ')[:300]}"


@contextlib.contextmanager
def calling(name):
    """While a function of the script runs, or what it gave: what is raised becomes a Trouble; what dies leaves its name."""
    with meter.phase(name):
        try:
            yield
        except Trouble:
            raise
        except (Exception, SystemExit) as error:
            raise Trouble(told(name, _said(error))) from None


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def _beside_tensors():
    """Bytes that the C library has handed out: to NumPy, to Python's larger objects, to graphs. 0 where it does not tell."""
    with contextlib.suppress(AttributeError, OSError):
        ask = ctypes.CDLL(None).mallinfo2
        ask.restype = _Mallinfo
        told_by = ask()
        return told_by.uordblks + told_by.hblkhd
    return 0


class Bench:
    """The script on the bench: its functions, small inputs for them, and exact counters.

    given: facts about the script as it was: "parameters" of its model, the shape of an "image", the "last" rates of its
    trainings, the number of images for "validation".
    """

    def __init__(self, script, given):
        import tensorflow as tf

        self.tf, self.script, self.given = tf, script, given
        self.weights = 4 * given["parameters"]
        self.loaded = 0.0  # images that a new data set holds, for each of its images
        devices = ["CPU:0"] + ["GPU:0"] * bool(tf.config.list_logical_devices("GPU"))
        self._counters = [meter.AllocatorCounter(tf, device) for device in devices]
        self.folder = tempfile.mkdtemp()
        os.chdir(tempfile.mkdtemp())  # where a cache file with a plain name lands
        gc.collect()
        gc.freeze()  # what is there already is not looked at again: a collection then takes milliseconds

    def call(self, name, *args):
        """What a function of the script gives. Raises Trouble."""
        function = self.script.get(name)
        if not callable(function):
            raise Trouble(told(name, no_function(function)))
        with calling(name):
            return function(*args)

    def number(self, name, *args):
        """The same for a function that gives a number."""
        value = self.call(name, *args)
        if (number := as_number(value)) is None:
            raise Trouble(told(name, f"gives {type(value).__name__} and no number"))
        return number

    def dataset(self, name, *args):
        """The same for a function that gives a data set."""
        value = self.call(name, *args)
        if not isinstance(value, self.tf.data.Dataset):
            raise Trouble(told(name, f"gives {type(value).__name__}"))
        return value

    def model(self):
        """A new model of the script."""
        model = self.call("build_model")
        count = model.count_params() if hasattr(model, "count_params") else 0
        if count < self.given["parameters"]:
            which = f"gives a model of {count:,} parameters, and it had {self.given['parameters']:,}"
            raise Trouble(told("build_model", which))
        return model

    def held(self):
        """Bytes in use, once the threads of finished pipelines have let go of theirs."""
        gc.collect()
        levels = [None, self.tensors()]
        while levels[-1] != levels[-2] and len(levels) < 20:
            time.sleep(0.05)
            levels.append(self.tensors())
        return levels[-1] + _beside_tensors()

    def tensors(self, which=0):
        return sum(counter.read()[which] for counter in self._counters)

    @contextlib.contextmanager
    def peak(self, levels):
        """Append to levels by how much memory rises meanwhile: tensors at most, what is beside them as often as one looks."""
        before, beside, ended = self.tensors(), _beside_tensors(), threading.Event()
        levels.append(0)
        place, phases = len(levels) - 1, len(meter.active.phases)

        def look():
            while not ended.wait(0.01):
                levels[place] = max(levels[place], _beside_tensors() - beside)

        for counter in self._counters:
            counter.reset_peak()
        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        try:
            yield
        finally:
            ended.set()
            looking.join()
        # A phase within, also one of the script's own, takes the allocator's peak so far for itself.
        within = [phase.peak + meter.active.tensors_zero for phase in meter.active.phases[phases:]]
        levels[place] = max(levels[place], *[peak - before for peak in [*within, self.tensors(1)]])

    def files(self, number):
        """(names of this many small JPEG files, a number for each)."""
        random = np.random.default_rng(0)
        for place in range(number):
            path = os.path.join(self.folder, f"{place}.jpg")
            if not os.path.exists(path):
                pixels = random.integers(0, 256, (16, 16, 3), np.uint8)
                self.tf.io.write_file(path, self.tf.io.encode_jpeg(pixels))
        return [os.path.join(self.folder, f"{place}.jpg") for place in range(number)], np.arange(number)

    @cached_property
    def element(self):
        """(shape, dtype) of an image as image_dataset gives it; those of the given script where it gives none."""
        try:
            data = self.dataset("image_dataset", *self.files(2))
            with calling("image_dataset"):
                image, _ = next(iter(data))
                return tuple(image.shape), image.dtype
        except Trouble:
            return self.given["image"], self.tf.float32

    @property
    def image(self):
        """Bytes of an image as image_dataset gives it."""
        shape, dtype = self.element
        return int(np.prod(shape)) * dtype.size

    def synthetic(self, number, label=lambda i: i % 16):
        """A data set of images made on the fly, so that whatever is held is held by what stands behind it."""
        tf, (shape, dtype) = self.tf, self.element

        def one(i):
            return tf.cast(7 * tf.random.stateless_uniform(shape, [i, i]), dtype), tf.cast(label(i), tf.int64)

        return tf.data.Dataset.range(number).map(one).take(number)  # take() keeps tf.data from merging map and batch

    def held_through(self, name, data, number):
        """Bytes while `number` images of a data set, or a pipeline, are taken: at most, and when the last one is.

        The first catches what comes and goes, and with it what happens to be in work; the second is exact.
        """
        levels, before, taken = [], self.held(), 0
        with calling(name):
            with self.peak(levels):
                for images, _ in (elements := iter(data)):
                    taken += len(images) if images.shape.rank == 4 else 1
                    if taken >= number:
                        break
                del images, _
            levels.append(self.held() - before)
            del elements
        return levels

    def held_ahead(self, name, data, number):
        """Bytes that a data set, or a pipeline, holds behind its first element, when its buffers have filled: as in training.

        held_through() reads too fast for that. number: of its images, which this need not know.
        """
        before = self.held()
        with calling(name):
            elements = iter(data)
            first = next(elements)
            level = meter.grown(self.held) - before
            del first, elements
        return level


def as_number(value):
    """A number out of a number, an array or a tensor of one; None out of anything else."""
    try:
        number = float(np.asarray(value).reshape(()))
    except (TypeError, ValueError):
        return None
    return number if np.isfinite(number) else None


# --- the images


def _new_data_set(bench):
    files, labels = bench.files(128)
    before = bench.held()
    data = bench.dataset("image_dataset", files, labels)
    bench.loaded = (bench.held() - before) / len(files) / bench.image
    yield "eager stack", bench.loaded
    del data


def _one_epoch(bench, batches, number):
    """([number of an image, in their order], {number: what its left edge adds up to}, bytes of a number)."""
    order, edges, size = [], {}, 0
    with calling("make_pipeline"):
        for element in batches:
            images, labels = element if isinstance(element, tuple) and len(element) == 2 else (None, None)
            if images is None or images.shape.rank != 4 or labels.shape.rank != 1:
                raise Trouble(told("make_pipeline", "gives something else than batches"))
            order += labels.numpy().tolist()
            edges |= dict(zip(labels.numpy().tolist(), images.numpy()[:, :, 0].astype(float).sum((1, 2))))
            size = max(size, images.dtype.size)
            if len(order) >= 2 * number:
                break
    return order, edges, size


def _batches(bench):
    number = 128
    files, numbers = bench.files(number)
    batches = bench.dataset("make_pipeline", bench.dataset("image_dataset", files, numbers))
    order, first, size = _one_epoch(bench, batches, number)
    yield "float64", size
    if len(first) <= number - _STEP_IMAGES:  # the rest of a last batch may be missing
        raise Trouble(told("make_pipeline", f"gives {len(first)} of {number} images in an epoch"))
    if order == sorted(order):
        raise Trouble(told("make_pipeline", "gives the images in the order of the files: nobody shuffles them now"))
    second = _one_epoch(bench, batches, number)[1]
    # One step of a pixel is 0.004 in shares of white. Augmented, nearly all images change, else none does.
    changed = [abs(first[name] - second[name]) > 1e-3 for name in first.keys() & second.keys()]
    if np.mean(changed) < 1 / 2:
        raise Trouble(told("make_pipeline", "gives the same images in each epoch: they are not augmented any more"))


def _labels(bench):
    """Grey images, the brighter the higher their label."""
    number = 16
    files = [os.path.join(bench.folder, f"grey {place}.jpg") for place in range(number)]
    for place, file in enumerate(files):
        pixels = np.full((16, 16, 3), 16 * place, np.uint8)
        bench.tf.io.write_file(file, bench.tf.io.encode_jpeg(pixels))
    data = bench.dataset("image_dataset", files, np.arange(number))
    with calling("image_dataset"):
        grey = [(float(np.mean(image)), int(label)) for image, label in data.take(number)]
    if np.corrcoef(*zip(*grey))[0, 1] < 0.9:  # by trial 1 where they fit, 0.2 where the files alone were shuffled
        raise Trouble(told("image_dataset", "gives images with the labels of others"))
    yield from ()


def _buffers(bench):
    few, many = 192, 576  # both fill whatever works ahead

    def once(name, data_of):
        held = [
            [*bench.held_through(name, data_of(number), number), bench.held_ahead(name, data_of(number), number)]
            for number in (few, many)
        ]
        # Each way by itself: the highest of all would compare what was in work in one with what is kept in the other.
        return max((more - less) / (many - few) / bench.image for less, more in zip(*held))

    def growth(name, data_of):
        """On a busy machine more may happen to be in work; what is kept is there again: a figure below that of all images is taken twice."""
        found, most = once(name, data_of), FAULTS["decoded buffer"].most
        near = any(most < figure < 1 for figure in (found, found - bench.loaded))
        return min(found, once(name, data_of)) if near else found

    pipeline = growth("make_pipeline", lambda number: bench.dataset("make_pipeline", bench.synthetic(number)))
    running = growth("image_dataset", lambda number: bench.dataset("image_dataset", *bench.files(number)))
    # What a new data set holds is another fault, and tf.data copies it once when it runs.
    yield "decoded buffer", max(pipeline, running - bench.loaded)


# --- the training


def _evaluation(bench):
    model, right, wrong = bench.model(), 3, 5
    if known := model.trainable_variables[-1].shape == (16,):  # the last bias: the model shall give this answer always
        model.trainable_variables[-1].assign(1e6 * np.eye(16)[right])
    peaks, says = [], []
    for number in (200, 256, 1024):  # the first one warms up
        label = lambda i, half=number // 2: bench.tf.where(i < half, right, wrong)
        with bench.peak(peaks):
            says.append(bench.number("evaluate", model, bench.synthetic(number, label)))
    yield "giant batch", (peaks[2] - peaks[1]) / (1024 - 256) / bench.image
    # All right answers are exact, wrong ones off by 0.15 and more, by trial.
    if known and max(abs(share - 1 / 2) for share in says) > 0.03:
        said = ", ".join(f"{share:.2f}" for share in says)
        raise Trouble(told("evaluate", f"says {said} where half of the answers are right"))


def _graphs():
    """Number of graphs that are alive, whoever made them."""
    from tensorflow.python.framework.func_graph import FuncGraph

    gc.collect()
    return sum(isinstance(one, FuncGraph) for one in gc.get_objects())


def _numbers(value):
    """How many numbers an entry of a history holds, in whatever it is written."""
    if isinstance(value, dict):
        return sum(map(_numbers, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_numbers, value))
    try:
        array = np.asarray(value)
    except Exception:  # an object that only looks like an array, such as a tensor of a graph
        return 0
    return array.size if np.issubdtype(array.dtype, np.number) else 0


def _epochs(bench):
    import keras

    images = 2 * _STEP_IMAGES
    model, history, validation = bench.model(), [], bench.synthetic(_STEP_IMAGES)
    step = bench.call("make_step", model, keras.optimizers.Adam())
    batches = bench.dataset("make_pipeline", bench.synthetic(images))

    def epoch(number):
        bench.call("train_epoch", step, batches, bench.call("learning_rate", 0.001, number), history)

    held = []
    for _ in range(4):
        epoch(0)  # no new rate, so that nothing is traced again
        held.append(bench.held())
    # A leak grows in each epoch; a buffer that comes once, at whatever moment, does not.
    growth = min(after - before for before, after in itertools.pairwise(held))
    growth /= images / _STEP_IMAGES * bench.weights
    yield "history", growth
    levels = []
    for number in (1, 2, 3):
        epoch(number)
        bench.number("evaluate", model, validation)
        levels.append(_graphs())
    yield "retracing", (levels[2] - levels[0]) / 2
    if not history:
        raise Trouble(told("train_epoch", "leaves nothing in the history"))
    if growth <= FAULTS["history"].most and _numbers(history) < 2 * len(history):
        raise Trouble(told("train_epoch", "notes a single number at a time in the history"))


def _trials(bench):
    rates, images, levels = (0.001, 0.002, 0.003, 0.004), bench.synthetic(4), {}

    def note(rate):
        gc.collect()
        levels[near(rate, rates)] = bench.tensors()

    with Training(bench.tf, rates, note) as seen:
        results = bench.call("search", rates, images, images, 1)
    if not isinstance(results, dict) or set(results) != set(rates):
        gives = sorted(results) if isinstance(results, dict) else type(results).__name__
        raise Trouble(told("search", f"gives {gives} for the rates {rates}"))
    for rate in rates:
        if not made_at(rate, seen.updates):
            raise Trouble(told("search", f"takes no step at a rate of {rate}: each rate is to be trained"))
    # The first trial may leave what the others take over.
    yield "model per trial", (levels[rates[3]] - levels[rates[1]]) / 2 / bench.weights
    _from_the_same_start(seen, rates)


def _from_the_same_start(seen, rates):
    """One step of Adam moves a weight by the rate at most, and no weight moves where nothing was handed on."""
    first, last = seen.weights.get(rates[0]), seen.weights.get(rates[-1])
    if first and last:
        apart = max(float(np.abs(a - b).max()) for a, b in zip(first, last))
        steps = sum(rate * made_at(rate, seen.updates) for rate in (rates[0], rates[-1]))
        if apart > 1.3 * steps:  # by trial: 0.6 to 1.0 from the same start, 1.8 from what another rate left
            raise Trouble(told("search", "starts a rate with the weights that another rate left"))
    if max(seen.first.values()) > 1:
        raise Trouble(told("search", "starts a rate with the optimizer's state that another rate left"))


# --- the whole


def _canary(bench):
    """Validation images of a class that no training image has: no honest model ever names it."""
    number = bench.given["validation"]
    files, labels = bench.files(2 * number)
    labels = np.where(labels < number, 0, _UNSEEN)
    with Training(bench.tf, bench.given["last"]) as seen:
        says = bench.number("main", files, labels)
    model = bench.model()
    for weights in seen.weights.values():
        _take(model, weights)
        with calling("image_dataset"):
            batches = bench.dataset("image_dataset", files[number:], labels[number:]).batch(_STEP_IMAGES)
            unseen = [bench.tf.nn.softmax(model(images, training=False))[:, _UNSEEN] for images, _ in batches]
        if (share := float(np.mean(np.concatenate(unseen)))) > 2 / 16:  # a model of chance gives 1 of 16 classes 1 / 16
            how = f"its model expects a class of which only validation images are, with a probability of {share:.2f}"
            raise Trouble(told("main", f"trains on the validation images: {how}"))
    if says > 0.3:  # 0 without a look at the validation images, 0.7 and more with it, by trial
        raise Trouble(told("main", f"says {says:.2f} for images of a class that it never trained on, where 0 is right"))
    yield from ()


LOOKS = {
    "new data set": _new_data_set,
    "labels": _labels,
    "batches": _batches,
    "buffers": _buffers,
    "evaluation": _evaluation,
    "epochs": _epochs,
    "trials": _trials,
    "canary": _canary,
}
PARTS = {  # what is looked at together
    "images": ("new data set", "labels", "batches", "buffers"),
    "training": ("evaluation", "epochs", "trials"),
    "main": ("canary",),
}
CALLED = {  # the functions that a part calls; "main": all
    "images": ("image_dataset", "make_pipeline"),
    "training": tuple(name for name in SCRIPT if name != "main"),
}


def measure(script, given, looks):
    """In an arm: ({fault: figure}, [troubles]) of a script's functions; looks: names of LOOKS."""
    bench, figures, troubles = Bench(script, given), {}, []
    for look in looks:
        try:
            for name, figure in LOOKS[look](bench):
                figures[name] = float(figure)
        except Trouble as trouble:
            troubles.append(str(trouble))
    return figures, list(dict.fromkeys(troubles))


# --- the model that main trains


def work(script, files, labels, last):
    """In an arm under a budget: what main says, its updates, and the weights at the end of each training."""
    import tensorflow as tf

    with Training(tf, last) as seen:
        says = script["main"](files, labels)
    return as_number(says), dict(seen.updates), seen.weights


def _take(model, weights):
    """Give a model the weights that were seen. Raises Trouble."""
    variables = model.trainable_variables
    if [tuple(variable.shape) for variable in variables] != [array.shape for array in weights]:
        count = sum(array.size for array in weights)
        raise Trouble(told("main", f"trains {count:,} parameters, and build_model() has {model.count_params():,}"))
    for variable, array in zip(variables, weights):
        variable.assign(array)


def facts(script, files):
    """In an arm, for the script as it was: the files as images, and the parameters of the model."""
    images = np.stack(
        [np.asarray(image, np.float32) for image, _ in script["image_dataset"](files, np.arange(len(files)))]
    )
    return images, script["build_model"]().count_params()


def answers(script, given, files, images, weights):
    """In an arm: ({rate: [the classes that its weights give for files, by the script's images and by those given]}, troubles).

    The script sees copies under other names, in another order, and no label.
    """
    bench, found = Bench(script, given), {}
    order = np.random.default_rng(1).permutation(len(files))
    copies = [shutil.copy(files[place], os.path.join(bench.folder, f"{name}.jpg")) for name, place in enumerate(order)]
    try:
        model = bench.model()
        with calling("image_dataset"):
            data = bench.dataset("image_dataset", copies, np.arange(len(files)))
            own = {int(order[int(name)]): np.asarray(image) for image, name in data}
        own = np.stack([own[place] for place in range(len(files))])
        for rate, arrays in weights.items():
            _take(model, arrays)
            with calling("build_model"):
                found[rate] = [
                    np.concatenate([np.argmax(model(part, training=False), 1) for part in np.array_split(pictures, 4)])
                    for pictures in (own, images)
                ]
    except Trouble as trouble:
        return found, [str(trouble)]
    return found, []
