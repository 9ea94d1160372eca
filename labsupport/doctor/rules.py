"""The doctor's rules: records of a run in, suspects out. Pure functions, which need no TensorFlow and no run.

Two ideas decide what is suspected, so that a healthy script gets no advice. What *grows* with steps is a suspect in
any run: the rules in GROWTH. What is merely *large* is a suspect only in a run that died of memory: the rules in SIZE,
of which the largest suspect is told, and others nearly as large.

A new rule is a function that yields Suspects, its place in one of the two lists, and a test in tests/test_rules.py.
Thresholds marked "by trial" part the troubled scripts of tests/cases and of the labs from the cured ones.
"""

import os
import re
from dataclasses import dataclass, field, replace
from operator import attrgetter

from labsupport.doctor.figures import Parts, growth, in_use, parts_of_peak, wanted
from labsupport.ground.budget import MIB, mib, parse_size
from labsupport.ground.record import Cause, Interval
from labsupport.ground.result import short

LABS = {  # kind: the lab that explains it first, then others that help
    "input copy": ("image_stacking", "arrays_into_datasets", "large_files"),
    "buffer": ("pipeline_buffers", "workers"),
    "batch-bound activations": (
        "batch_size",
        "gradient_accumulation",
        "loop_accumulation",
        "recomputation",
        "shapes_and_layers",
    ),
    "retained tensors": ("leaks_over_epochs",),
    "retracing": ("retracing",),
    "models kept alive": ("a_model_per_trial",),
    "optimizer state": ("where_memory_goes", "mixed_precision", "pruning"),
    "replicas": ("more_than_one_device",),
    "fragmentation": ("reading_an_oom",),
    "weights": ("where_memory_goes", "mixed_precision", "pruning"),
    "constants in graphs": ("retracing", "arrays_into_datasets"),
    "old optimizers after compile()": ("what_a_process_keeps", "a_model_per_trial"),
    "garbage that waits for the collector": ("leaks_over_epochs",),
    "one operation's large output": ("shapes_and_layers",),
    "data converted whole": ("preparing_data", "arrays_into_datasets"),
    "cache behind repeat()": ("pipeline_buffers",),
    "copies in child processes": ("workers",),
    "growth outside TensorFlow": ("leaks_over_epochs", "what_a_process_keeps"),
    "programs that XLA keeps": ("xla",),
    "copy on the host while saving": ("replay_and_saving",),
}
CHANGES = {  # kind: what to change
    "input copy": "read the data batch by batch (from_generator, TFRecord files, a memory map), and keep it in its own dtype, such as uint8",
    "batch-bound activations": "halve the batch, with gradient_accumulation_steps=2 if the updates shall stay as they are",
    "buffer": "give shuffle(), prefetch() and the queue of workers (max_queue_size) a part of their sizes, such as an eighth, and shuffle before what makes elements large: map(), batch()",
    "retained tensors": "keep numbers, such as float(loss), in place of tensors and arrays",
    "retracing": "pass tensors in place of Python values, and apply tf.function once",
    "models kept alive": "let go of each model, and call keras.utils.clear_session() before the next one",
    "optimizer state": "take an optimizer with fewer slots (Adafactor, SGD), or train fewer of the weights",
    "replicas": "each device holds all variables: take fewer devices, or a smaller model",
    "fragmentation": "pad to few sizes, so that freed pieces fit again",
    "weights": "the model alone fills the budget: take narrower layers, fewer of them, or float16 weights where it only answers",
    "constants in graphs": "give the array as an argument of the function, as a tensor",
    "old optimizers after compile()": "compile once, and set model.optimizer.learning_rate afterwards",
    "garbage that waits for the collector": "break the cycle of references, or call gc.collect() between epochs",
    "one operation's large output": "work in pieces: the output of this operation need not exist whole",
    "data converted whole": "convert a batch at a time, in map() of a pipeline or in a generator",
    "cache behind repeat()": "put cache() before repeat()",
    "growth outside TensorFlow": "let go of what the named line keeps, or keep a number of it; what no name holds, in a process that ends",
    "programs that XLA keeps": "let XLA compile once: one function for all models, tensors of one shape; else train each model in a process that ends",
    "copies in child processes": "take fewer workers, or threads, and keep in a worker only what it needs",
    "copy on the host while saving": "set large arrays as weights in place of an initializer's constant",
}
# kind: how much of what a suspect accounts for the change saves. Half a batch halves it; an eighth of a buffer leaves an
# eighth; of the rest all of it goes, but what a batch or a step needs for itself. Other kinds: not known before it is tried.
SAVES = {
    "batch-bound activations": 1 / 2,
    "buffer": 7 / 8,
    "input copy": 1,
    "retained tensors": 1,
    "models kept alive": 1,
    "constants in graphs": 1,
    "old optimizers after compile()": 1,
    "garbage that waits for the collector": 1,
    "data converted whole": 1,
    "cache behind repeat()": 1,
}
# Batches drawn while one tape is open: a step on several parts of a batch draws few.
_MANY_IN_TAPE = 4
# A request for a table's own size: the allocator rounds up to 256 bytes; beside table and gradient few pieces of it are in use.
_ROUNDED, _PIECES = 256, 4
# Of the largest suspect: others as large as this are told, too. Whoever halves the largest has them on top (0.5), and
# what was counted at a census, not at the peak, is known less well than that; by trial.
_NEARLY = 0.6
# Of the budget: the allocator rounds each size up to 256 bytes and leaves rests that are too small to split.
_ROUNDING = 0.02
# Of the budget: a smaller rest lies in pieces in any run that is nearly full, and is not what filled it; by trial.
_SCATTERED = 0.2
# Of what the process grew by: arrays smaller than this do not explain that it ran out; by trial.
_OUTSIDE_SHARE = 0.2
# TensorFlow itself warns of retracing from five traces on (polymorphic_function.py: FREQUENT_TRACING_WARNING_THRESHOLD).
_TRACES = 5
# Traces in the second half of the calls: one may be a last, smaller batch. A call: one in each epoch of fifty steps; of
# longer epochs so many that odd batches do not explain them.
_LATE, _LATE_SHARE, _MANY_LATE = 2, 0.02, 16
# Applications of tf.function to the same code: two may be for training and for evaluation.
_INSTANCES = 2
# Bytes, and a share of the level: smaller growth over a whole run is left to noise, Python objects and a history of
# numbers.
_GROWTH, _GROWTH_SHARE = MIB, 0.02
# Bytes between two censuses, outside of TensorFlow: pools of threads and caches of a healthy run settle below it, by trial.
_OUTSIDE_GROWTH = 32 * MIB
# Of all that a size rose by: less in one step from census to census, such as a metric's variable, is no second rise.
_A_RISE = 0.1
# Of the growth: a name that holds less is not where it goes.
_WORTH_NAMING = 1 / 4
# Of what a script may add outside: children that hold so much are told also where it was enough. Workers with nothing of
# their own but what a fork costs stay under half of it, by trial.
_MOST_OF_IT = 0.7
# Bytes that several children have made, and the share that they made in the last third of their lives: a third where each
# keeps what comes, next to nothing where each needs room for its work; by trial.
_CHILDREN_MADE, _STILL_LATE = 32 * MIB, 0.2
# Times what is in use: an operation that joins pieces asks for about as much as they are.
_OUTSIZE = 2
# NumPy's own words (numpy/_core/_exceptions.py): three digits and a unit.
_NO_ARRAY = re.compile(
    r"Unable to allocate ([\d.]+?)\.? ([KMG]iB) for an array(?: with shape (\([\d, ]*\)) and data type (\w+))?"
)
_SAVING = re.compile(
    r"\.save\w*\(|\bsave_model\("
)  # Keras takes its own frames out of a traceback: the script's line is left
_OPERATION = re.compile(r"Out of memory in (\w+):")  # see ground/oom.py
# Keras' optimizers, as the names of their operations tell them: by then activations have been let go, what is in use has
# the size of the weights.
_UPDATES = re.compile(
    r"Out of memory in (?:[\w.-]+/)*(?:adam|adamw|adamax|rmsprop|sgd|nadam|lion|lamb|adafactor|adagrad|adadelta|ftrl)(?:_\d+)?/"
)
# A file in which Keras makes a variable's first value; its tracebacks leave out the layer that asked for it.
_INITIALIZES = re.compile(r"keras/src/(initializers/|backend/(common/variables|tensorflow/random)\.py)")
_MAKES_VARIABLES = re.compile(
    r"\w*(Random|Normal)\w*|Mul|AddV2|Sub|Cast|Fill|Qr|Const|Identity|ZerosLike|\w*VariableOp|_EagerConst"
)
# Memory of variables over that of the variables that Python still has. A census may meet a model half made or half
# gone, when the two differ for no fault; by trial.
_LET_GO = 1.2


@dataclass(frozen=True)
class Suspect:
    """kind: a key of LABS. evidence: sentences. place: "train.py:41", where one line of the script is known.

    size: bytes it accounts for, None where it lies outside TensorFlow's allocator.
    """

    kind: str
    size: int | None
    evidence: list
    place: str = ""

    @property
    def labs(self):
        return LABS[self.kind]

    @property
    def change(self):
        """What to change, as the end of a sentence, and where it can be told, what that saves."""
        share = SAVES.get(self.kind) if self.size else None
        expected = f" (to expect, from this run's figures: about {mib(share * self.size)} less)" if share else ""
        return f"{CHANGES[self.kind]}{expected}"


@dataclass(frozen=True)
class Diagnosis:
    """What the doctor found in an ArmResult. growth: sentences."""

    result: object
    suspects: list = field(default_factory=list)
    parts: Parts = Parts()
    growth: list = field(default_factory=list)


def diagnose(result):
    """The Diagnosis of an arm that ran with probes. No suspects for a run that neither grew nor died of memory."""
    facts = result.facts
    beside = [*in_children(result), *while_saving(result)]
    if facts is None or not facts.censuses:
        return Diagnosis(result, beside)
    finished = not died_of_memory(result)  # with an error of its own, too: it has let go of much by then
    suspects = [suspect for rule in GROWTH for suspect in rule(facts, finished)]
    suspects = suspects or list(outside(facts))
    parts = parts_of_peak(result, _earlier_models(facts, finished), _kept(facts, "tensors", finished)[0])
    suspects += beside
    if died_of_memory(result):
        suspects += [] if beside else _by_size(result, parts, suspects)
        suspects.sort(key=lambda suspect: -(suspect.size or 0))
    suspects = [replace(suspect, place=suspect.place or _made_at(suspect, facts)) for suspect in suspects]
    return Diagnosis(result, suspects, parts, growth(facts))


_MAKES = {  # kind: what a script makes there, of Facts.made
    "models kept alive": "model",
    "weights": "model",
    "replicas": "model",
    "optimizer state": "optimizer",
    "old optimizers after compile()": "optimizer",
    "copies in child processes": "process",
}


def _made_at(suspect, facts):
    """The line that makes what a suspect is; "" where none is known."""
    return facts.made.get(_MAKES.get(suspect.kind), "")


def died_of_memory(result):
    """Whether an arm ended because memory ran out."""
    return result.error is not None and result.error.cause.of_memory


# --- what lies in no tensor


def in_children(result):
    """Pages that processes have for themselves which the script started, where they grow or are most of what it may add."""
    made, family = result.offspring, result.family
    if made is not None and made.number > 1 and made.size > _CHILDREN_MADE and made.late > _STILL_LATE:
        sentence = (
            f"{made.number} child processes made {mib(made.size)} for themselves, up to {mib(made.largest)} each, and went on "
            "making more: what a worker keeps (a cache, say) each keeps for itself; threads share one copy"
        )
        yield Suspect("copies in child processes", None, [sentence])
        return
    if family is None or not result.outside or family.size < _MOST_OF_IT * result.outside:
        return
    sentence = (
        f"{family.number} child processes held {mib(family.size)} that they share with nobody, up to {mib(family.largest)} "
        "each: what a process keeps, each worker keeps; threads share one copy"
    )
    yield Suspect("copies in child processes", None, [sentence])


def while_saving(result):
    """Memory outside of TensorFlow that ran out while Keras wrote a model."""
    if (
        result.error is not None
        and result.error.cause is Cause.MEMORY
        and result.error.frames
        and _SAVING.search(result.error.frames[-1].source)
    ):
        sentence = (
            "memory ran out while a model was saved: its configuration is written as text, with each number of an array in it "
            "(an initializer's constant, say) as a Python object; set such arrays as weights instead"
        )
        yield Suspect("copy on the host while saving", None, [sentence, str(result.error)], _place(result))


# --- what grows


def _increase(censuses, size):
    """By how much a size rose over the run; 0 unless it rose twice and was always higher in the last third than before.

    A single rise is an event, such as the first evaluation; what comes and goes with batches is lower now and then. A
    third of the censuses, since they come at steps 2, 4, 8, …: it is most of the run.
    """
    values = [size(census) for census in censuses if census.step >= 2]
    late = max(2, len(values) // 3)
    least = _A_RISE * (max(values) - min(values)) if values else 0
    rises = sum(later - earlier > least for earlier, later in zip(values, values[1:]))
    return max(values) - values[0] if rises >= 2 and min(values[-late:]) > max(values[:-late]) else 0


def _while_steps_ran(facts):
    """All censuses but the last, which is from the end, or from the middle of a step that failed."""
    return facts.censuses[:-1]


def retracing(facts, finished):
    """A function that is traced again and again, still in the second half of its calls."""
    for function in facts.functions:
        late = sum(call > function.calls / 2 for call in function.traced_at)
        rebuilt = not function.own and function.traces <= 2 * function.instances  # Keras makes one for each model
        least = max(_LATE, min(_LATE_SHARE * function.calls / 2, _MANY_LATE))
        if function.traces < _TRACES or late < least or rebuilt:
            continue
        evidence = [
            f"tf.function {function.name} ({function.place}) was traced {function.traces} times in {function.calls} calls, "
            "and still in the second half"
        ]
        if function.instances > _INSTANCES:
            times = f"{function.instances} times"
            evidence.append(f"tf.function was applied to it anew {times}; make it once, outside the loop")
        elif function.changing:
            evidence.append(
                f"argument {function.changing}: every new value is a new graph; "
                "pass a tensor, or the same object each time"
            )
        yield Suspect("retracing", None, evidence, _spot(function))


def _spot(function):
    """The line of a record.Function: where it was written, or, of a library's, where it was called."""
    return function.place.removeprefix("called at ").removesuffix("a library")


def growing_graph(facts, finished):
    """A graph of TensorFlow 1 that is built further while its session runs."""
    censuses = [census for census in facts.censuses if census.step >= 2]
    runs = [step.name for step in facts.steps if step.name.startswith("Session.run")]
    if len(censuses) < 2 or not runs:
        return
    steps = censuses[-1].step - censuses[0].step
    added = censuses[-1].operations - censuses[0].operations
    if steps >= _TRACES and added >= steps / 2:
        grew = f"the graph grew by {added} operations in {steps} calls of Session.run"
        place = runs[0].removeprefix("Session.run (").removesuffix("a library)").removesuffix(")")
        yield Suspect("retracing", None, [f"{grew}: build operations once, before the loop"], place)


def _earlier_models(facts, finished):
    """Bytes by which the memory of variables rose over the run; 0 where it is less than half a model, or so little that a census lets garbage be."""
    running = _while_steps_ran(facts) if finished else facts.censuses  # at its end a script has let go of its models
    grown = _increase(running, attrgetter("held"))
    return grown if grown > max(_largest_model(_fullest(facts)) / 2, _GROWTH) else 0


def _fullest(facts):
    """The census with the most memory of variables."""
    return max(facts.censuses, key=lambda census: census.held)


def _largest_model(census):
    return max((model.size for model in census.models), default=0)


def earlier_models(facts, finished):
    """Variables of models that came before, whether the models are alive or only their memory is."""
    grown, last = _earlier_models(facts, finished), _fullest(facts)
    if not grown:
        return
    evidence = [
        f"the memory of variables rose by {mib(grown)} while steps ran, to {mib(last.held)}; "
        f"the largest model alive has {mib(_largest_model(last))} of weights"
    ]
    seen = last.weights + last.slots + last.other_variables
    if last.held > _LET_GO * seen:
        evidence.append(
            f"{mib(last.held - seen)} belong to variables that Python has let go of; "
            "a graph (of a compiled train or predict function) keeps them"
        )
    elif len(last.models) > 2:
        evidence.append(f"{len(last.models)} models are alive")
    if last.models_met == 1:
        evidence.append(
            "there is one model: each compile() makes a new optimizer, and an old train function keeps the old one"
        )
        yield Suspect("old optimizers after compile()", grown, evidence)
        return
    yield Suspect("models kept alive", grown, evidence, facts.made.get("model") or _used_at(facts))


def _used_at(facts, least=2):
    """The line that calls the functions which Keras makes for so many models or more, one after the other."""
    again = [function for function in facts.functions if not function.own and function.instances >= least]
    return _spot(max(again, key=lambda function: function.instances)) if again else ""


def _kept(facts, name, finished):
    """(bytes by which "tensors" or "arrays" that stay alive grew with the steps, the census that tells); (0, None) for noise.

    The end of a run that finished tells, too; that of one that failed may be the middle of a step.
    """
    running = _while_steps_ran(facts)
    size = lambda census: getattr(census, name) - finished * _bounded(census, name)
    grown = _increase(running, size)
    if not running or grown < max(_GROWTH, _GROWTH_SHARE * (running[-1].level or 0)):
        return 0, None
    last = max(running[-1:] + facts.censuses[-1:] * finished, key=size)
    return max(grown, size(last) - size(_settled(facts))), last


def _bounded(census, name):
    """Bytes of "tensors" or "arrays" in queues with a largest length: they grow only until they are full."""
    holders = census.tensor_holders if name == "tensors" else census.array_holders
    return sum(holder.bounded for holder in holders)


def _settled(facts):
    """The first census behind what the first step made."""
    return next(census for census in facts.censuses if census.step >= 2)


def retained(facts, finished):
    """Tensors and arrays whose number grows with the steps."""
    for name, word in (("tensors", "tensors"), ("arrays", "NumPy arrays")):
        grown, last = _kept(facts, name, finished)
        if not grown:
            continue
        steps = last.step - _settled(facts).step
        evidence = [f"{word} that stay alive grew by {mib(grown)} in {steps} steps, {mib(grown / steps)} a step"]
        holders = last.tensor_holders if name == "tensors" else last.array_holders
        for holder in holders[:2]:
            if holder.size > _WORTH_NAMING * grown:
                evidence.append(f"{holder.name} holds {holder.number} of them, {mib(holder.size)}")
        place = next((holder.place for holder in holders if holder.size > _WORTH_NAMING * grown), "")
        if not place:  # no name leads there: to a data set made of arrays again, or to what predict() joins at its end
            copies = facts.converted.bytes >= grown
            place = facts.converted.place.removesuffix("a library") if copies else _used_at(facts, 1)
        yield Suspect("retained tensors", grown, evidence, place)


def endless_cache(facts, finished):
    """A cache that stands behind repeat(): its first pass never ends, so that it keeps every element of every pass."""
    grown = _increase(_while_steps_ran(facts), attrgetter("buffers"))
    # tf.data's model names a cache in memory twice (MemoryCache, MemoryCacheImpl): the first is enough.
    one = next((buffer for buffer in facts.buffers if buffer.endless), None)
    if one is not None and grown > _GROWTH:
        sentence = (
            f"{one.name}: {mib(one.size)}, and it grew with the steps: it stands behind repeat(); put cache() first"
        )
        yield Suspect("cache behind repeat()", one.size, [sentence], one.place or facts.passed_at)


def kept_iterators(facts, finished):
    """Iterators that stay alive, each with the buffers of its pipeline."""
    running = _while_steps_ran(facts)
    grown = _increase(running, attrgetter("buffers"))
    if _increase(running, attrgetter("iterators")) >= 2 and grown > _GROWTH:
        sentence = (
            f"{running[-1].iterators} iterators over data sets are alive, and what their pipelines buffer "
            f"grew by {mib(grown)}; an iterator keeps its buffers until it is let go"
        )
        yield Suspect("buffer", grown, [sentence, *_buffered(facts)], facts.passed_at)


def _buffered(facts):
    """The two stages of pipelines that were seen to buffer most."""
    return [f"{buffer.name}: {mib(buffer.size)}" for buffer in facts.buffers[:2] if buffer.size >= _GROWTH]


GROWTH = (retracing, growing_graph, earlier_models, retained, endless_cache, kept_iterators)  # rule(facts, finished)


def outside(facts):
    """Growth of the process, from step to step and to its end, that TensorFlow's counter does not have; for runs in which nothing else grew."""
    even = lambda step: step >= 2 and step & (step - 1) == 0  # censuses between these are where tensors grew
    known = [census for census in _while_steps_ran(facts) if None not in (census.process, census.level)]
    rows = [census for census in known if even(census.step)]
    if len(rows) < 3:
        return
    sizes = [census.process - census.level for census in rows[-3:]]
    early, late = sizes[1] - sizes[0], sizes[2] - sizes[1]
    steps = rows[-1].step - rows[-2].step
    # What grows with steps grows more where more steps lie between two censuses; what was only being set up does not.
    if late < _OUTSIDE_GROWTH or early < _OUTSIDE_GROWTH / 4 or late < early:
        return
    grew = (
        f"outside of TensorFlow's allocator the process grew by {mib(late)} in the last {steps} steps counted, "
        f"{mib(late / steps)} a step, and went on as it had begun"
    )
    if compiled := [function for function in facts.functions if function.compiled]:
        sentence = f"XLA compiles {compiled[0].name} ({compiled[0].place}) for each new shape, and keeps each program"
        yield Suspect("programs that XLA keeps", None, [grew, sentence], _spot(compiled[0]))
        return
    before = {holder.name: holder.number for holder in rows[-2].containers}
    filled = [holder for holder in rows[-1].containers if holder.number - before.get(holder.name, 0) >= steps]
    holds = [f"{holder.name} holds {holder.number:,} objects, more with each step" for holder in filled]
    nobody = ["no name of the script leads to it"] * (not filled)
    yield Suspect("growth outside TensorFlow", None, [grew, *holds, *nobody], filled[0].place if filled else "")


# --- what is large, where memory ran out


@dataclass(frozen=True)
class Death:
    """A run that died of memory. data, buffers, working: bytes, as in Parts, with what was happening taken into account.

    wanted: bytes of the allocation that found no room, or None. during: the Interval in which it happened, or None.
    outside: whether memory ran out outside TensorFlow's allocator.
    """

    result: object
    parts: Parts
    wanted: int | None
    during: Interval | None
    outside: bool
    data: int
    buffers: int
    working: int

    @classmethod
    def of(cls, result, parts):
        facts, size = result.facts, wanted(result)
        last, during = facts.censuses[-1], facts.failed or facts.open
        outside = result.error.cause not in (Cause.OOM, Cause.CRASH_OUT)
        copied = min(facts.converted.now, parts.wanted)  # what was asked for was the copy of an array
        data, buffers, working = parts.data + copied, parts.buffers, parts.working + parts.wanted - copied
        if outside:
            data += max(last.arrays, facts.converted.largest, _no_array(result))
        if _in_a_pipeline(during):
            # No operation of a step ran: what was in use beside the failed allocation is the pipeline's.
            working, buffers = working - parts.working, buffers + parts.working
        elif _building(result, parts):
            data, working = data - parts.data, working + parts.data
        elif _before_training(facts):
            data, working = data + working, 0  # before any training: joining the pieces of a data set, for instance
        return cls(result, parts, size, during, outside, data, buffers, working)

    @property
    def building(self):
        """Whether variables were being made."""
        return _building(self.result, self.parts)

    @property
    def updating(self):
        """Whether an optimizer was applying gradients."""
        return bool(self.parts.slots and _UPDATES.match(self.result.error.message))

    @property
    def of_a_table(self):
        """Whether a step asked for the size of the largest variable, when as much of it as few such pieces was in use.

        A dense gradient, a regularizer or an update of a whole table: no smaller batch makes it smaller.
        """
        largest = self.result.facts.censuses[-1].largest
        same = self.wanted and abs(self.wanted - largest) <= _ROUNDED and 2 * largest > self.parts.weights
        return bool(same and self.working <= _PIECES * largest)

    @property
    def failing(self):
        """A sentence about what failed."""
        return f"the allocation that failed was for {mib(self.wanted)}" if self.wanted else self.result.error.message


def _no_step(facts):
    """Whether no step has begun yet."""
    return not (facts.failed or facts.open) and all(step.kind != "step" for step in facts.steps)


def _before_training(facts):
    """Whether there is neither a model yet nor a step."""
    return _no_step(facts) and not facts.censuses[-1].models


def _no_array(result):
    """Bytes of the array that NumPy found no room for before the first step, as fit() reads a file; 0 if it was none."""
    found = _array_wanted(result) if _no_step(result.facts) else None
    return found[0] if found else 0


def _array_wanted(result):
    """(bytes, shape, dtype) of the array that NumPy found no room for; None if it was none."""
    found = _NO_ARRAY.search(result.error.message)
    return found and (parse_size(f"{found[1]} {found[2]}"), found[3], found[4])


def _in_a_pipeline(interval):
    return interval is not None and interval.kind == "input"


def fragmentation(death):
    """Room enough, but in pieces."""
    used, budget = in_use(death.result), death.result.budget
    free = 0 if used is None else budget - used
    if death.wanted and death.wanted < free - _ROUNDING * budget and free > _SCATTERED * budget:
        sentence = (
            f"{mib(free)} of the budget were free, yet {mib(death.wanted)} found no place: "
            "the free pieces do not lie together"
        )
        yield Suspect("fragmentation", free, [sentence], _place(death.result))


def _number(number, one, many):
    return f"{number} {one if number == 1 else many}"


def input_copy(death):
    """Data held whole, as tensors or as arrays."""
    if not death.data:
        return
    last, converted = death.result.facts.censuses[-1], death.result.facts.converted
    holders = sorted((last.tensor_holders + last.array_holders)[:2], key=lambda holder: -holder.size)
    if death.building and not (holders or converted.largest):
        return  # the numbers that were to become a variable
    evidence = [
        f"{holder.name} holds {_number(holder.number, 'tensor or array', 'tensors or arrays')}, {mib(holder.size)}"
        for holder in holders
    ]
    if converted.largest:
        evidence.append(f"an array of {mib(converted.largest)} was copied into a tensor at {converted.place}")
    if death.outside and _no_array(death.result):
        evidence.append(f"NumPy was to make one array of all data at {_place(death.result)}: read a batch at a time")
    place = next((holder.place for holder in holders if holder.size > _WORTH_NAMING * death.data), "")
    if converted.largest > _WORTH_NAMING * death.data:
        place = converted.place.removesuffix("a library")
    yield Suspect("input copy", death.data, [*evidence, death.failing], place or _place(death.result))


def buffer(death):
    """What a pipeline buffers, or was preparing."""
    if death.buffers:
        evidence = _buffered(death.result.facts)
        if _in_a_pipeline(death.during):
            evidence.append(f"memory ran out while the pipeline prepared a batch, with {mib(death.buffers)} in it")
        largest = next(iter(death.result.facts.buffers), None)
        yield Suspect("buffer", death.buffers, evidence, (largest and largest.place) or death.result.facts.passed_at)


def activations(death):
    """What operations had in use: activations, gradients and intermediates."""
    if not death.working or death.building or death.updating or death.of_a_table:
        return
    where, facts = "operations outside a training step took it", death.result.facts
    if death.during and death.during.kind == "step":
        where = f"in {death.during.name} the process died"
        if facts.in_tape >= _MANY_IN_TAPE:
            sentence = f"up to {facts.in_tape} batches were drawn while one tape was open, which keeps what each of them computed"
            place = re.sub(r"^.*\((?:called at )?(.+)\)$", r"\1", death.during.name)
            yield Suspect("retained tensors", death.working, [where, sentence, death.failing], place)
            return
        if facts.failed and facts.failed.peak > facts.failed.level:
            where = f"in {death.during.name} memory rose from {mib(death.during.level)} to {mib(death.during.peak)}"
    evidence = [where, death.failing]
    if death.parts.weights:  # where none were seen, the run may have died before anybody could count them
        evidence.append(f"weights are {mib(death.parts.weights)}, optimizer slots {mib(death.parts.slots)}")
    yield Suspect("batch-bound activations", death.working, evidence, _place(death.result))


def _building(result, parts):
    """Whether memory ran out while layers or an optimizer made their variables.

    In one of Keras' initializers; else before the first step, beside more variables than data, in an operation that
    initializers use.
    """
    if _INITIALIZES.search(result.error.traceback):
        return True
    facts, operation = result.facts, _OPERATION.match(result.error.message)
    if operation and not _MAKES_VARIABLES.fullmatch(operation[1]):
        return False
    model = facts.made.get("model") and os.path.basename(_place(result)) == facts.made["model"]
    return _no_step(facts) and (model or parts.weights > parts.data) and not _no_array(result)


def weights(death):
    """Variables that train, as far as they have been made."""
    size = max(0, death.parts.weights - sum(_others(death))) + death.working * (death.building or death.of_a_table)
    if size:
        evidence = [f"weights {mib(death.parts.weights)}, optimizer slots {mib(death.parts.slots)}", death.failing]
        if death.building:
            evidence.append(
                "memory ran out while variables were made: the model and its optimizer are larger than the budget"
            )
        if death.of_a_table:
            evidence.append(
                "that is the size of the largest variable: a gradient, a regularizer or an update of the whole of it, which a "
                "smaller batch leaves as large; take a smaller table, or no regularizer on it"
            )
        yield Suspect("weights", size, evidence, _place(death.result) if death.building else "")


def constants(death):
    """Arrays that became constants of graphs: copied into each graph, and into the allocator when it runs."""
    baked = death.result.facts.baked
    if baked.bytes > _WORTH_NAMING * death.result.budget:
        sentence = (
            f"arrays of {mib(baked.bytes)} became constants of graphs, the largest of {mib(baked.largest)} in "
            f"{baked.place}: give them as arguments, as tensors or as a tf.Variable"
        )
        place = re.sub(r"^.*\((?:called at )?(.+)\)$", r"\1", baked.place)  # "tf.function step (t.py:5)"
        yield Suspect("constants in graphs", baked.bytes, [sentence], place.removesuffix("a library"))


def garbage(death):
    """Tensors that nothing leads to any more, in circles that only the collector takes apart."""
    size = death.parts.garbage
    if size:
        sentence = (
            f"{mib(size)} of tensors were garbage in reference cycles when memory ran out: objects that refer to themselves, "
            "by a closure or a bound method, wait for Python's collector, which counts objects and not bytes"
        )
        evidence = [sentence, "break the cycle, or call gc.collect()"]
        yield Suspect("garbage that waits for the collector", size, evidence, _place(death.result))


def large_output(death):
    """One operation beside any training step whose output is much larger than all that was in use."""
    facts, used = death.result.facts, in_use(death.result)
    used = death.result.figures["peak"] or 0 if used is None else used
    an_array = 2 * facts.converted.largest > (death.wanted or 0)
    trains = death.during is not None and facts.censuses[-1].weights
    if death.wanted and not trains and death.wanted > _OUTSIZE * used and not (an_array or death.building):
        sentence = f"one operation asked for {mib(death.wanted)} at once, beside {mib(used)} in use"
        yield Suspect(
            "one operation's large output", death.wanted, [sentence, str(death.result.error)], _place(death.result)
        )


def converted_whole(death):
    """One array of NumPy's much larger than all data that were held: a conversion that makes many bytes of one."""
    asked = death.outside and _array_wanted(death.result)
    if not asked:
        return
    (size, shape, dtype), facts = asked, death.result.facts
    held = death.parts.data + max(facts.censuses[-1].arrays, facts.converted.bytes)
    if held and size > _OUTSIZE * held:  # of data that lie in a file nothing is known
        sentence = (
            f"one array of {mib(size)}, {dtype} of the shape {shape}, was to be made beside {mib(held)} of data: windows, "
            "padding or dummies of all rows at once, for instance; a pipeline makes those of one batch"
        )
        yield Suspect("data converted whole", size, [sentence], _place(death.result))


def read_ahead(death):
    """A batch of NumPy's with no room in Python code that a pipeline calls, where many of its size have been made before it."""
    asked = death.outside and "PyFunc" in death.result.error.message and _array_wanted(death.result)
    if not asked:
        return
    (size, shape, dtype), grown = asked, max((size for _, size in death.result.process), default=0)
    if grown > _OUTSIZE * size:
        sentence = (
            f"a pipeline's Python code was to make one more array of {mib(size)}, {dtype} of the shape {shape}, when the process "
            f"had grown by {mib(grown)}: with workers, Keras lets max_queue_size batches (10 if not given) wait, and one more"
        )
        yield Suspect("buffer", grown, [sentence], _place(death.result))


def _place(result):
    """The line of the script where an error arose, as "train.py:41"; "" where it is not known."""
    frames = result.error.frames if result.error else []
    if not frames:
        return ""
    file = os.path.basename(frames[-1].place)
    return short(file if file == result.label else frames[-1].place, frames[-1].number)


def optimizer_state(death):
    """Variables beside the weights."""
    parts = death.parts
    if parts.slots + parts.other_variables:
        sizes = (
            f"weights {mib(parts.weights)}, optimizer slots {mib(parts.slots)}, "
            f"other variables (masks, accumulators) {mib(parts.other_variables)}"
        )
        told = [
            "memory ran out in the optimizer's update: its intermediates have the size of the weights"
        ] * death.updating
        # Beside what earlier models and optimizers left, the update is the last straw and not the load.
        update = death.working if death.updating and not parts.earlier_models else 0
        size = parts.slots + parts.other_variables + update
        yield Suspect("optimizer state", size, [sizes, *told, death.failing])


def _others(death):
    """Bytes of each model beside the largest."""
    return sorted(model.size for model in death.result.facts.censuses[-1].models)[:-1]


def other_models(death):
    """Models beside the largest."""
    others = _others(death)
    if others:
        size = sum(others)
        sentence = f"{len(others) + 1} models are alive; those beside the largest have {mib(size)} of weights"
        yield Suspect("models kept alive", size, [sentence])


def replicas(death):
    """Variables that are held once on each device."""
    copies = death.parts.replicas
    if copies:  # counted twice, since each copy has gradients of its size
        sentence = f"variables are held once on each device: {mib(copies)} more than on one"
        yield Suspect("replicas", 2 * copies, [sentence])


# rule(death)
SIZE = (input_copy, buffer, activations, optimizer_state, other_models, replicas, weights, constants, garbage)


def _by_size(result, parts, known):
    """Suspects of a run that died of memory, beside those `known` to grow."""
    death = Death.of(result, parts)
    ahead = [] if known else [*read_ahead(death)]
    if alone := [*fragmentation(death), *large_output(death), *(ahead or converted_whole(death))]:
        return alone
    found = [suspect for rule in SIZE for suspect in rule(death)]
    if death.outside:
        # What TensorFlow's allocator holds is not at fault then, and Python objects that are no arrays may be.
        grown = max((size for _, size in result.process), default=0)
        found = [suspect for suspect in found if suspect.kind == "input copy" and suspect.size > _OUTSIDE_SHARE * grown]
    kinds = {suspect.kind for suspect in known}
    found = [suspect for suspect in found if suspect.kind not in kinds]
    most = max((suspect.size or 0 for suspect in [*found, *known]), default=0)
    return [suspect for suspect in found if suspect.size >= _NEARLY * most]
