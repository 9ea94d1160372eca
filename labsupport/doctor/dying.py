"""Rules for what is large, which is a suspect only in a run that died of memory. Pure functions over a Death; thresholds marked "by trial" as in rules.py."""

import math
import os
import re
from dataclasses import dataclass, replace
from operator import itemgetter

from labsupport.doctor.figures import Parts, in_use, wanted
from labsupport.doctor.suspects import (
    GROWTH_LEAST,
    IN_TAPES_OF_THEIR_OWN,
    WORTH_NAMING,
    Suspect,
    buffered,
    called_at,
    in_cycles,
    passes_under_tape,
    place_of,
)
from labsupport.ground.budget import mib
from labsupport.ground.oom import in_a_layer, in_an_initializer, in_python_code, wanted_array
from labsupport.ground.record import Cause, Interval, Kind, in_words

# Rows of a batch that stand twice in a shape: fewer may be heads of attention. Of what was in use and asked for: a smaller
# tensor is not what filled the budget; by trial.
_ROWS_TWICE, _PAIRS_SHARE = 64, 0.1
# A request for a table's own size: the allocator rounds up to 256 bytes; beside table and gradient few pieces of it are in use.
_ROUNDED, _PIECES = 256, 4
# Of the largest suspect: others as large as this are told, too. Whoever halves the largest has them on top (0.5), and
# what was counted at a census, not at the peak, is known less well than that; by trial.
_NEARLY = 0.6
# Models that a training step may need: two of a GAN's, of a teacher and its pupil, of an agent and its target, and one made of both.
_TOGETHER = 3
# Of the weights: what SGD and Adafactor keep is far less, and one slot for each weight is all of it.
_LIGHT = 0.1
# Of the budget: the allocator rounds each size up to 256 bytes and leaves rests that are too small to split.
_ROUNDING = 0.02
# Of buffers and what else was in use: as much had been seen half a second before, in a buffer that was filling; by trial.
_FILLED = 1 / 4
# Of the budget: a smaller rest lies in pieces in any run that is nearly full, and is not what filled it; by trial.
_SCATTERED = 0.2
# Of what the process grew by: arrays smaller than this do not explain that it ran out; by trial.
_OUTSIDE_SHARE = 0.2
# Shapes told of what a step was given: data and labels.
_SHAPES = 2
# Times what is in use: an operation that joins pieces asks for about as much as they are.
_OUTSIZE = 2
# Operations that copy pieces side by side into one.
_JOINS = re.compile(r"Concat(V2)?|Pack")
# A line of the script that only asks a model of Keras'.
_PREDICTS = re.compile(r"\.predict(_on_batch)?\(")
# What is no training step, and takes no gradients: what to change. An operation beside any step may be an update, too.
_BESIDE = "operations outside a training step took it"
_ANSWERS = {
    "evaluation": "halve the batch of evaluation: batch_size of evaluate(), validation_batch_size of fit()",
    "predict()": "halve the batch of predict(): its batch_size",
    "a function without a tape": "give it fewer rows at once: without gradients no result depends on how many there are",
    _BESIDE: "halve the rows that are given at once, and let what comes of them go to an array of NumPy's, as model.predict(rows, batch_size=…) does both",
}
_ONE_OUTPUT = "one operation's large output"
_INSTEAD = {  # of what an operation makes of all rows at once
    "OneHot": "keep the labels as integers: sparse_categorical_crossentropy and an Embedding take them; else make those of a batch in map()",
    "RaggedTensorToTensor": "pad each batch to its own longest row: padded_batch(), or bucket_by_sequence_length() where lengths differ much",
}
_CACHE_LESS = (
    "cache() keeps every element: put it before what makes elements large (decoding, resizing, casting), give it a file, as in "
    'cache("elements"), or do without'
)
_IN_PIECES = "work through the rows in pieces, in a function under tf.recompute_grad where gradients are taken"
# times that the rows of a batch stand in a shape: in words, what it grows with, what to change
_EACH_WITH_EACH = {
    2: (
        "twice",
        "each row with each. It grows with the square of the batch",
        "let no tensor hold a row for each pair: squared distances are |a|² + |b|² − 2 a·b, with one matrix product for all a·b; else "
        f"{_IN_PIECES}; half a batch has a quarter of it",
    ),
    3: (
        "three times",
        "each row with each two. It grows with the cube of the batch",
        f"compare each row with few others, such as the hardest two by their distances, or {_IN_PIECES}; half a batch has an eighth of it",
    ),
}
_SHORTER = (
    "shorten what is compared with itself (half the length has a quarter of the scores), or halve the batch until it fits, with "
    "gradient_accumulation_steps=2, 4, … if the updates shall stay as they are"
)
_IN_CALLS_OF_THEIR_OWN = (
    "call the tf.function once for each pass, each with a tape of its own, and add the gradients up in place of the losses: in one "
    "graph a loop of Python's is unrolled, and its passes may run side by side, also where each has a tape of its own"
)
_FLOAT32 = 'let the model be float32, which is half of it: no keras.config.set_floatx("float64"), and data in float32'
# Keras' optimizers, as the names of their operations tell them: by then activations have been let go, what is in use has
# the size of the weights.
_UPDATES = re.compile(
    r"(?:[\w.-]+/)*(?:adam|adamw|adamax|rmsprop|sgd|nadam|lion|lamb|adafactor|adagrad|adadelta|ftrl)(?:_\d+)?/"
)
_MAKES_VARIABLES = re.compile(
    r"\w*(Random|Normal)\w*|Mul|AddV2|Sub|Cast|Fill|Qr|Const|Identity|ZerosLike|\w*VariableOp|_EagerConst"
)


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
        if during and during.kind is Kind.ANSWER:
            during = None
        outside = result.error.cause not in (Cause.OOM, Cause.CRASH_OUT)
        if not outside and (used := in_use(result)):
            parts = _still(parts, used)
        copied = min(facts.converted.now, parts.wanted)  # what was asked for was the copy of an array
        data, buffers, working = parts.data + copied, parts.buffers, parts.working + parts.wanted - copied
        if outside:
            data += max(last.arrays, facts.converted.largest, _no_array(result))
        if during and during.kind is Kind.ITERATOR:
            data, working = parts.data + parts.wanted, parts.working
        elif _in_a_pipeline(during) and not _one_batch(facts, size) or _filling(facts, parts):
            # No operation of a step ran: what was in use beside the failed allocation is the pipeline's.
            working, buffers = working - parts.working, buffers + parts.working
        elif _before_training(result) and not (_in_a_pipeline(during) or _building(result, parts)):
            data, working = data + working, 0  # before any training: joining the pieces of a data set, for instance
        return cls(result, parts, size, during, outside, data, buffers, working)

    @property
    def building(self):
        """Whether variables were being made."""
        return _building(self.result, self.parts)

    @property
    def updating(self):
        """Whether an optimizer was applying gradients."""
        return bool(self.parts.slots and _UPDATES.match(self.result.operation))

    @property
    def of_a_table(self):
        """Whether a step asked for the size of the largest variable, when as much of it as few such pieces was in use.

        A dense gradient, a regularizer or an update of a whole table: no smaller batch makes it smaller.
        """
        largest = self.result.facts.censuses[-1].largest
        same = self.wanted and abs(self.wanted - largest) <= _ROUNDED and 2 * largest > self.parts.weights
        return bool(same and self.working <= _PIECES * largest)

    @property
    def answering(self):
        """What ran out that takes no gradient, a key of _ANSWERS; "" for a step."""
        if self.during and self.during.kind is Kind.EVALUATION:
            return "evaluation"
        frames = self.result.error.frames
        if frames and _PREDICTS.search(frames[-1].source):
            return "predict()"
        if self.during and self._without_tape:
            return "a function without a tape"
        return "" if self.during else _BESIDE

    @property
    def _without_tape(self):
        """Whether it was a tf.function of the script's in which no tape is open, while others have some."""
        facts = self.result.facts
        taught = any(function.tapes for function in facts.functions)
        taught = taught or any(step.kind is Kind.TAPE for step in facts.steps)
        in_a_function = self.during.kind is Kind.FUNCTION
        known = [one for one in facts.functions if one.own and one.place == self.during.place and in_a_function]
        traced = lambda one: one.traces or self.result.error.cause is Cause.CRASH_OUT  # a crash lets no call end
        return taught and any(traced(one) and not one.tapes for one in known)

    @property
    def pairs(self):
        """How many rows stand twice in the shape that found no room, first and second; 0 where they do not.

        They stand once in what the step was given, and in no weight's shape, or they are no rows: sides of images, or units.
        """
        failing = self.result.facts.failing
        rows = failing.wanted[0] if len(failing.wanted) > 1 else 0
        given = [shape.count(rows) for shape in failing.given]
        if rows < _ROWS_TWICE or failing.wanted[1] != rows or max(given, default=0) != 1:
            return 0
        first = any(shape[0] == rows for shape in failing.given)
        large = (self.wanted or 0) > _PAIRS_SHARE * self.working
        return rows if first and large and not any(rows in shape for shape in failing.weights) else 0

    @property
    def squared(self):
        """A length, such as that of sequences, that stands twice in the shape that found no room and once in what the step was given; 0 where none does."""
        failing = self.result.facts.failing
        inner = failing.wanted[1:]
        twice = [n for n in inner if n >= _ROWS_TWICE and inner.count(n) == 2]
        given = [max((shape[1:].count(n) for shape in failing.given), default=0) for n in twice]
        return twice[0] if twice and given[0] == 1 and not any(twice[0] in shape for shape in failing.weights) else 0

    @property
    def joining(self):
        """The operation beside any step that was to join pieces into one; "" for others."""
        operation, kept = self.result.operation, self.during or in_a_layer(self.result.error.traceback)
        return operation if _JOINS.fullmatch(operation) and not kept else ""

    @property
    def failing(self):
        """A sentence about what failed."""
        return f"the allocation that failed was for {mib(self.wanted)}" if self.wanted else self.result.error.message


def _still(parts, used):
    """Parts of the peak as far as they can have been in use when memory ran out: what was let go before is taken from the work of operations, then from data."""
    gone = max(0, sum(size for _, size in parts.rows()) - used)
    working = max(0, parts.working - gone)
    return replace(parts, working=working, data=max(0, parts.data - gone + parts.working - working))


def _no_step(facts):
    """Whether no step has begun yet."""
    return not (facts.failed or facts.open) and all(step.kind.of_input for step in facts.steps)


def _before_training(result):
    """Whether no step has begun yet, and there is no model, or its line is the one that has just converted an array."""
    facts, error = result.facts, result.error
    converts = facts.converted.largest and facts.converted.place == place_of(result)
    prepares = converts and not in_a_layer(error.traceback + error.message)
    return _no_step(facts) and (prepares or not facts.censuses[-1].models)


def _filling(facts, parts):
    """Whether a pipeline filled its buffers for the first step: by the size of what was asked for, it was part of one element."""
    most = _most_buffered(facts)
    small = most and 0 < parts.wanted <= most.size / max(1, most.elements)
    much = parts.buffers > _FILLED * (parts.buffers + parts.working)
    return bool(small and much and all(step.count <= 1 for step in facts.steps))


def _no_array(result):
    """Bytes of the array that NumPy found no room for before the first step, as fit() reads a file; 0 if it was none."""
    found = wanted_array(result.error.message) if _no_step(result.facts) else None
    return found[0] if found else 0


def _in_a_pipeline(interval):
    return interval is not None and interval.kind.of_input


def _one_batch(facts, size):
    """Whether a pipeline has one element at a time, and asked for another as large: it is the batch that is large."""
    most = _most_buffered(facts)
    return bool(most and most.elements == 1 and size and size > most.size / 2)


def _most_buffered(facts):
    """The stage that was seen to buffer most; None where that is not known."""
    return next(iter(facts.buffers), None)


def fragmentation(death):
    """Room enough, but in pieces. Where variables have copies on other devices, the room is that of all devices together.

    A first step leaves pieces, too, and has not asked for all that it needs: it is the batch that is large.
    """
    begun = {step.name: step.count for step in death.result.facts.steps if not step.kind.of_input}
    if death.parts.replicas or (death.during and begun.get(death.during.name) == 1):
        return
    used, budget = in_use(death.result) or 0, death.result.budget
    free, rounding = budget - used, _ROUNDING * budget
    lies_between = used > rounding
    if lies_between and death.wanted and death.wanted < free - rounding and free > _SCATTERED * budget:
        sentence = (
            f"{mib(free)} of the budget were free, yet {mib(death.wanted)} found no place: "
            "the free pieces do not lie together"
        )
        yield Suspect("fragmentation", free, [sentence], place_of(death.result))


def _number(number, one, many):
    return f"{number} {one if number == 1 else many}"


def input_copy(death):
    """Data held whole, as tensors or as arrays."""
    if not death.data:
        return
    last, converted = death.result.facts.censuses[-1], death.result.facts.converted
    holders = sorted(last.tensor_holders + last.array_holders, key=lambda holder: -holder.size)[:2]
    holders = [holder for holder in holders if holder.size > WORTH_NAMING * holders[0].size]
    if death.building and not (holders or converted.largest):
        return  # the numbers that were to become a variable
    evidence = [
        f"{holder.name} holds {_number(holder.number, 'tensor or array', 'tensors or arrays')}, {mib(holder.size)}"
        for holder in holders
    ]
    if converted.largest:
        evidence.append(f"an array of {mib(converted.largest)} was copied into a tensor at {in_words(converted.place)}")
    if death.outside and _no_array(death.result):
        evidence.append(f"NumPy was to make one array of all data at {place_of(death.result)}: read a batch at a time")
    asked = min(death.parts.wanted, death.data - death.parts.data)
    if asked > 0 and death.parts.working + death.parts.data:
        evidence.append(f"of {mib(death.data)} {mib(death.data - asked)} were in use, {mib(asked)} were asked for")
    place = next((holder.place for holder in holders if holder.size > WORTH_NAMING * death.data), "")
    if converted.largest > WORTH_NAMING * death.data:
        place = converted.place
    yield Suspect("input copy", death.data, [*evidence, death.failing], place or place_of(death.result))


def buffer(death):
    """What a pipeline buffers, or was preparing."""
    if death.buffers:
        evidence = buffered(death.result.facts)
        if _in_a_pipeline(death.during):
            evidence.append(f"memory ran out while the pipeline prepared a batch, with {mib(death.buffers)} in it")
        largest = _most_buffered(death.result.facts)
        place = (largest and largest.place) or death.result.facts.passed_at
        change = _CACHE_LESS if largest and largest.cache else ""
        yield Suspect("buffer", death.buffers, evidence, place, change)


def activations(death):
    """What operations had in use: activations, gradients and intermediates."""
    if not death.working or death.building or death.updating or death.of_a_table or death.joining:
        return
    where, facts = _BESIDE, death.result.facts
    if death.during and not death.during.kind.of_input:
        where = f"in {death.during.name}, which began with {mib(death.during.level)} in use, the process died"
        if facts.failed and facts.failed.peak > facts.failed.level:
            where = f"in {death.during.name} memory rose from {mib(death.during.level)} to {mib(death.during.peak)}"
        if sentence := passes_under_tape(facts):
            change = _IN_CALLS_OF_THEIR_OWN if death.during.kind is Kind.FUNCTION else IN_TAPES_OF_THEIR_OWN
            evidence = [where, sentence, death.failing]
            yield Suspect("retained tensors", death.working, evidence, death.during.place, change)
            return
        if death.pairs:
            place = facts.failing.made_at or place_of(death.result)
            *told, change = _pairs(death)
            yield Suspect(_ONE_OUTPUT, death.working, [*told, where], place, change)
            return
    elif death.during:
        where = f"the pipeline prepared one batch, which is large in itself: {', '.join(buffered(facts))}"
    evidence, place = [where, death.failing], called_at(death.result)
    if place != (inner := place_of(death.result)):
        evidence.append(f"what found no room was to be made at {inner}")
    if shapes := facts.failing.given:
        given = ", ".join(map(str, shapes[:_SHAPES]))
        evidence.append(f"that was a tensor of the shape {facts.failing.wanted}; the step was given {given}")
    if death.squared:
        evidence.append(
            f"its {death.squared} stands in it twice: each place with each, which grows with the square of that length"
        )
    if death.parts.weights:  # where none were seen, the run may have died before anybody could count them
        evidence.append(f"weights are {mib(death.parts.weights)}, optimizer slots {mib(death.parts.slots)}")
    if death.parts.working and death.parts.wanted:
        used, asked = mib(death.parts.working), mib(death.parts.wanted)
        evidence.append(f"of {mib(death.working)} {used} were in use, {asked} were asked for")
    change = _ANSWERS.get(death.answering, "")
    if change:
        evidence += [f"it was {death.answering} that ran out, not training"] * (death.answering != _BESIDE)
    else:
        if facts.made.get("optimizer") == "":  # none of Keras' was made
            change = "halve the batch; for the same updates take the gradients of both halves, and apply their mean"
        if sentences := [*_not_recomputed(facts)]:
            evidence += [*map(itemgetter(0), sentences)]
            change = "; ".join(map(itemgetter(1), sentences))
    change = change or _SHORTER * bool(death.squared)
    yield Suspect("batch-bound activations", death.working, evidence, place, change)


def _pairs(death):
    """Sentences on a tensor that has each row of a batch with each, and what to change."""
    rows, wanted = death.pairs, death.result.facts.failing.wanted
    times = 3 if wanted[2:3] == [rows] else 2
    words, grows, change = _EACH_WITH_EACH[times]
    yield f"the {rows} rows of the batch stand {words} in the tensor that found no room, {wanted}, {mib(death.wanted)}: {grows}"
    if wanted[times:]:
        without = " × ".join(map(str, wanted[:times]))
        yield f"its {without} results alone are {mib(death.wanted / math.prod(wanted[times:]))}"
    yield change


def _not_recomputed(facts):
    """(sentence, what to change) on a recomputation that is asked for and spares little."""
    asked, missed = facts.made.get("recomputation"), facts.made.get("not layers")
    if not asked:
        return
    if missed:
        yield (
            f"RematScope's layer_names, at {asked}, have names that no layer called in it has: {missed}",
            "give RematScope names that its layers have (layer.name)",
        )
    elif not facts.recomputed:
        yield (
            f"recomputation is asked for at {asked}, and nothing recomputes: what keras.remat or tf.recompute_grad returns must "
            "be what is called, and a RematScope must be open where the layers are made (in a compiled model it then raises a "
            "ValueError about keyword arguments for layers that take `training`: call those through keras.remat)",
            "let the recomputation run that is asked for, or halve the batch",
        )
    if facts.segments == 1:
        sentence = "all that is made in it is made again at once on the way back, when the gradients are taken"
        yield (
            f"recomputation, asked for at {asked}, is one single piece: {sentence}",
            "recompute in several pieces, such as one for each few layers: as many pieces as one has layers",
        )


def as_made(result, parts):
    """The Parts of a run that died: while variables are made, tensors beside them are their first values, and no data; before there is a model, they are data."""
    if _building(result, parts):
        return replace(parts, data=0, working=parts.working + parts.data)
    if _before_training(result) and not _in_a_pipeline(result.facts.failed or result.facts.open):
        return replace(parts, data=parts.data + parts.working, working=0)
    return parts


def joined(death):
    """Pieces that become one beside any step, which then exist twice; where they are known to be kept, that is told with them."""
    if death.joining and death.working and not death.parts.kept:
        yield Suspect(_ONE_OUTPUT, death.working, [_joins(death)], place_of(death.result))


def _joins(death):
    return (
        f"memory ran out where {death.joining} joined pieces into one ({place_of(death.result)}): {death.failing}, "
        "beside the pieces themselves"
    )


def _building(result, parts):
    """Whether memory ran out while layers or an optimizer made their variables.

    In one of Keras' initializers; else before the first step, beside more variables than data, in an operation that
    initializers use.
    """
    if in_an_initializer(result.error.traceback):
        return True
    facts, operation = result.facts, "" if "/" in result.operation else result.operation
    if operation and not _MAKES_VARIABLES.fullmatch(operation):
        return False
    model = facts.made.get("model") and os.path.basename(place_of(result)) == facts.made["model"]
    arrays = facts.converted.largest if operation else facts.censuses[-1].arrays  # of a crash no more is known
    data = max(parts.data, arrays)
    made = parts.weights + parts.other_variables  # those of a frozen model, too
    return _no_step(facts) and (model or made > data) and not _no_array(result)


def weights(death):
    """Variables that train, as far as they have been made."""
    size = max(0, death.parts.weights - sum(_others(death))) + death.working * death.building
    if size:
        known = death.parts.weights or death.parts.slots
        sizes = f"weights {mib(death.parts.weights)}, optimizer slots {mib(death.parts.slots)}"
        evidence = [*[sizes] * bool(known), *_in_float64(death), death.failing]
        told, change = _while_made(death) if death.building else ([], _FLOAT32 * len(_in_float64(death)))
        yield Suspect("weights", size, evidence + told, place_of(death.result) if death.building else "", change)


def _while_made(death):
    """(sentences, what to change) where memory ran out while variables were made."""
    parts, budget = death.parts, death.result.budget
    made = parts.weights + parts.slots + parts.other_variables
    if made + parts.wanted > budget:
        return ["memory ran out while variables were made: the model and its optimizer are larger than the budget"], ""
    if 2 * (made + parts.wanted) > budget:
        return [
            "memory ran out while variables were made: most trainings need more than the budget then, for gradients, and for each "
            "slot of an optimizer, as much again"
        ], ""
    beside = f", beside {mib(made)} of them" * bool(made)
    sentence = (
        f"memory ran out while variables were made{beside}: the first value of each is worked out by several "
        "operations (a random number, its scale, its mean), and up to three results of its whole size exist at once"
    )
    return (
        [sentence],
        "take a smaller layer or table, or let it begin with zeros, which is one operation, and read its values in afterwards",
    )


def whole_table(death):
    """Pieces of the size of the largest variable, made in a step."""
    if death.of_a_table:
        sentence = (
            "that is the size of the largest variable: a gradient, a regularizer or a product of the whole of it; a smaller batch "
            "leaves it as large"
        )
        yield Suspect("work on a whole table", death.working, [death.failing, sentence], place_of(death.result))


def constants(death):
    """Arrays that became constants of graphs: copied into each graph, and into the allocator when it runs."""
    baked = death.result.facts.baked
    if baked.bytes > WORTH_NAMING * death.result.budget:
        sentence = (
            f"arrays of {mib(baked.bytes)} became constants of graphs, the largest of {mib(baked.largest)} in "
            f"{in_words(baked.place)}: give them as arguments, as tensors or as a tf.Variable"
        )
        yield Suspect("constants in graphs", baked.bytes, [sentence], baked.place)


def garbage(death):
    """Tensors that nothing leads to any more, in circles that only the collector takes apart."""
    size = death.parts.garbage
    if size:
        sentence = (
            f"{mib(size)} of tensors were garbage in reference cycles when memory ran out: objects that refer to themselves, "
            "by a closure or a bound method, wait for Python's collector, which counts objects and not bytes"
        )
        cycles = death.result.facts.cycles
        most = [f"most of it: {in_cycles(cycles)}"] if cycles else []
        evidence = [sentence, *most, "break the cycle, or call gc.collect()"]
        place = cycles.place if cycles else place_of(death.result)
        yield Suspect("garbage that waits for the collector", size, evidence, place)


def large_output(death):
    """One operation beside any training step whose output is much larger than all that was in use."""
    facts, used = death.result.facts, in_use(death.result)
    used = death.result.figures["peak"] or 0 if used is None else used
    an_array = 2 * facts.converted.largest > (death.wanted or 0)
    # A layer's operation grows with its batch, in a step or beside one, such as an evaluation of all rows at once.
    of_a_layer = in_a_layer(death.result.error.traceback + death.result.error.message)
    trains = (death.during is not None or of_a_layer) and facts.censuses[-1].weights
    if death.wanted and not trains and death.wanted > _OUTSIZE * used and not (an_array or death.building):
        sentence = f"one operation asked for {mib(death.wanted)} at once, beside {mib(used)} in use"
        yield Suspect(
            _ONE_OUTPUT, death.wanted, [sentence], place_of(death.result), _INSTEAD.get(death.result.operation, "")
        )


def converted_whole(death):
    """One array of NumPy's much larger than all data that were held: a conversion that makes many bytes of one."""
    asked = death.outside and wanted_array(death.result.error.message)
    if not asked:
        return
    (size, shape, dtype), facts = asked, death.result.facts
    held = death.parts.data + max(facts.censuses[-1].arrays, facts.converted.bytes)
    if held and size > _OUTSIZE * held:  # of data that lie in a file nothing is known
        sentence = (
            f"one array of {mib(size)}, {dtype} of the shape {shape}, was to be made beside {mib(held)} of data: windows, "
            "padding or dummies of all rows at once, for instance; a pipeline makes those of one batch"
        )
        yield Suspect("data converted whole", size, [sentence], place_of(death.result))


def read_ahead(death):
    """A batch of NumPy's with no room in Python code that a pipeline calls, where many of its size have been made before it."""
    message = death.result.error.message
    asked = death.outside and in_python_code(message) and wanted_array(message)
    if not asked:
        return
    (size, shape, dtype), grown = asked, max((size for _, size in death.result.process), default=0)
    if grown > _OUTSIZE * size:
        sentence = (
            f"a pipeline's Python code was to make one more array of {mib(size)}, {dtype} of the shape {shape}, when the process "
            f"had grown by {mib(grown)}: with workers, Keras lets max_queue_size batches (10 if not given) wait, and one more"
        )
        yield Suspect("buffer", grown, [sentence], place_of(death.result))


def optimizer_state(death):
    """Variables beside the weights."""
    parts = death.parts
    if parts.slots + parts.other_variables:
        sizes = f"weights {mib(parts.weights)}, optimizer slots {mib(parts.slots)}"
        if parts.other_variables > GROWTH_LEAST:
            sizes += f", other variables (masks, accumulators) {mib(parts.other_variables)}"
        told = [
            "memory ran out in the optimizer's update: its intermediates have the sizes of what it updates"
        ] * death.updating
        # Beside what earlier models and optimizers left, the update is the last straw and not the load.
        update = death.working if death.updating and not parts.earlier_models else 0
        size = int(parts.slots * _of_one_model(death)) + parts.other_variables + update
        light = parts.slots < _LIGHT * parts.weights
        change = "train fewer of the weights: this optimizer keeps next to nothing already" * light
        evidence = [sizes, *told, *_in_float64(death), death.failing]
        yield Suspect("optimizer state", size, evidence, to_change=_FLOAT32 if _in_float64(death) else change)


def _in_float64(death):
    """[a sentence] where most of the memory of variables has eight bytes a number."""
    last = death.result.facts.censuses[-1]
    share = last.float64 / max(1, last.weights + last.slots + last.other_variables)
    return [f"{mib(last.float64)} of the variables are float64, twice as large as in float32"] * (share > 1 / 2)


def _of_one_model(death):
    """The share of the largest of many models in the weights of all: of their optimizers' slots only its own would be left. 1 for two that may work together."""
    sizes = [model.size for model in death.result.facts.censuses[-1].models]
    return max(sizes) / sum(sizes) if len(sizes) > _TOGETHER else 1


def _others(death):
    """Bytes of each model beside the largest."""
    return sorted(model.size for model in death.result.facts.censuses[-1].models)[:-1]


def other_models(death):
    """Models beside the largest."""
    others = _others(death)
    if others:
        slots = int(death.parts.slots * (1 - _of_one_model(death)))
        sentence = (
            f"{len(others) + 1} models are alive; those beside the largest have {mib(sum(others))} of weights"
            + f", and {mib(slots)} of optimizer slots" * bool(slots)
        )
        several = (holder for holder in death.result.facts.censuses[-1].model_holders if holder.number > 1)
        holder = next(several, None)
        evidence = [sentence] + ([f"{holder.name} holds {holder.number} of them"] if holder else [])
        yield Suspect("models kept alive", sum(others) + slots, evidence, holder.place if holder else "")


def replicas(death):
    """Variables that are held once on each device."""
    copies = death.parts.replicas
    if copies:  # counted twice, since each copy has gradients of its size
        sentence = f"variables are held once on each device: {mib(copies)} more than on one"
        yield Suspect("replicas", 2 * copies, [sentence])


# rule(death)
SIZE = (
    input_copy,
    buffer,
    activations,
    joined,
    optimizer_state,
    other_models,
    replicas,
    weights,
    whole_table,
    constants,
    garbage,
)


def by_size(result, parts, known):
    """Suspects of a run that died of memory: those `known` to grow, and others."""
    death = Death.of(result, parts)
    if death.joining:
        known = [
            replace(one, evidence=[*one.evidence, _joins(death)]) if one.kind == "retained tensors" else one
            for one in known
        ]
    ahead = [] if known else [*read_ahead(death)]
    if alone := [*fragmentation(death), *large_output(death), *(ahead or converted_whole(death))]:
        return _in_order(known, alone)
    found = [suspect for rule in SIZE for suspect in rule(death)]
    if death.outside:
        # What TensorFlow's allocator holds is not at fault then, and Python objects that are no arrays may be.
        grown = max((size for _, size in result.process), default=0)
        found = [suspect for suspect in found if suspect.kind == "input copy" and suspect.size > _OUTSIDE_SHARE * grown]
    kinds = {suspect.kind for suspect in known}
    found = [suspect for suspect in found if suspect.kind not in kinds]
    most = max((suspect.size or 0 for suspect in [*found, *known]), default=0)
    return _in_order(known, [suspect for suspect in found if suspect.size >= _NEARLY * most])


def _in_order(known, found):
    """The largest suspects first, and before one that is merely large a nearly as large one that grows: a step works on more of it each time."""
    return sorted([*known, *found], key=lambda one: -(one.size or 0) / (_NEARLY if one in known else 1))
