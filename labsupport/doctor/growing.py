"""Rules for what grows with the steps, which is a suspect in any run. Pure functions over Facts; thresholds marked "by trial" as in rules.py."""

from operator import attrgetter

from labsupport.doctor.figures import goes_on, settled
from labsupport.doctor.suspects import (
    GROWTH_LEAST,
    GROWTH_SHARE,
    IN_TAPES_OF_THEIR_OWN,
    MANY_USES,
    WORTH_NAMING,
    Suspect,
    buffered,
    in_cycles,
    passes_under_tape,
)
from labsupport.ground.budget import MIB, mib
from labsupport.ground.record import Kind, in_words

# TensorFlow itself warns of retracing from five traces on (polymorphic_function.py: FREQUENT_TRACING_WARNING_THRESHOLD).
_TRACES = 5
# Traces in the second half of the calls: one may be a last, smaller batch. A call: one in each epoch of fifty steps; of
# longer epochs so many that odd batches do not explain them.
_LATE, _LATE_SHARE, _MANY_LATE = 2, 0.02, 16
# Applications of tf.function to the same code: two may be for training and for evaluation.
_INSTANCES = 2
# Bytes between two censuses, outside of TensorFlow: pools of threads and caches of a healthy run settle below it, by trial.
_OUTSIDE_GROWTH = 32 * MIB
# The same where XLA is known to compile new programs all the while; 25 small ones add 12 MiB.
_PROGRAMS_GROWTH = 16 * MIB
# Of all that a size rose by: less in one step from census to census, such as a metric's variable, is no second rise.
_A_RISE = 0.1
# Memory of variables over that of the variables that Python still has. A census may meet a model half made or half
# gone, when the two differ for no fault; by trial.
_LET_GO = 1.2
# Models of a search that keeps the best one, while the next is made: larger ones may follow smaller ones.
_AT_A_TIME = 3
# Of the rise of the level: tensors that explain so much of it until a census are what it rises by afterwards.
_EXPLAINED = 0.7
# Objects that a container has more of with each step: a loop over batches counts as steps, too.
_EACH_STEP = 0.8
# Times what the steps so far added each: what is more at the end came at once, such as the result of a last tf.concat.
_AS_MUCH = 2
# Censuses in their turn from which a rise is told.
_ENOUGH = 4
# Bytes of one constant: masks and encodings of positions stay below, tables do not.
_TABLE = 16 * MIB
# Graphs with the largest array: for training and for evaluation there are two.
_GRAPHS = 3
# Bytes of one thing that is kept, on average: more than a loss or a row of metrics; what to change then.
_OUTPUTS = 2**14
_ONE_SIGNATURE = (
    "trace once for all shapes: tf.function(reduce_retracing=True), or an input_signature with None for what changes; where XLA "
    "compiles, pad to few shapes"
)
_ONE_MODEL = (
    "build and compile one model, and give it its first weights again for each fold or trial (set_weights(), and the optimizer's "
    "slots and iterations to zero), or train each in a process that ends: TensorFlow keeps the variables of a traced train function, also "
    "when its model is let go and behind clear_session()"
)
_DATA_SETS = (
    "keep no data set or iterator whose pass is over: each of from_tensor_slices() or from_tensors() has a copy of its arrays; make "
    "it once, and let shuffle() give each epoch another order"
)
_IN_PLACE_OF = {
    "tensors": "these are no single numbers: let go of each when it has been used, or keep a bounded number of them (a deque with a "
    "maxlen, a cache with a largest size); where all are wanted, copy each into an array of NumPy's that is made beforehand "
    "(all[start:end] = part), which spares a GPU and no CPU; where only their sum or mean is, add each to one sum at once; else keep "
    "numbers of them",
    "arrays": "these are no single numbers: keep the last or the best alone, give a cache a largest size, or write each into a file "
    "as it comes (np.save(), model.save_weights()); else keep numbers of them",
}


def _increase(censuses, size, little_by_little=False):
    """By how much a size rose over the run; 0 unless it rose twice, also in the second half of the steps, and was always higher in the last third than before.

    A single rise is an event, such as the first evaluation; so are two early ones, the arrays of fit() behind a loop of the
    script's own, then those of the evaluation. What comes and goes with batches is lower now and then. A
    third of the censuses, since they come at steps 2, 4, 8, …: it is most of the run. Others lie close to each other: then
    small rises add up to one, little by little.
    """
    counted = [census for census in censuses if census.step >= 2]
    values = [size(census) for census in counted]
    half = [value for census, value in zip(counted, values) if 2 * census.step <= counted[-1].step]
    if half and values[-1] <= half[-1]:
        return 0
    late = max(2, len(values) // 3)
    least = _A_RISE * (max(values) - min(values)) if values else 0
    rises, last = 0, values[:1]
    for value in values:
        if value - last[0] > least:
            rises += 1
        if value - last[0] > least or not little_by_little:
            last = [value]
    return max(values) - values[0] if rises >= 2 and min(values[-late:]) > max(values[:-late]) else 0


def _while_steps_ran(facts):
    """All censuses in their turn but the last, which is from the end, or from the middle of a step that failed."""
    return [census for census in facts.censuses[:-1] if not census.extra]


def new_constants(facts, finished):
    """Large arrays in graphs: each graph of a function that is traced again and again has copies of its own, and a table costs the process many times its size while one is made, also where there was room for it."""
    baked, again = facts.baked, next(retracing(facts, finished), None)
    if again is not None and baked.bytes >= max(_GRAPHS * baked.largest, GROWTH_LEAST):
        sentence = (
            f"arrays of {mib(baked.bytes)} became constants of graphs, the largest of {mib(baked.largest)} at {in_words(baked.place)}: each "
            "new graph has copies of its own"
        )
        yield Suspect("constants in graphs", baked.bytes, [sentence, *again.evidence], baked.place)
    if finished and again is None and baked.largest >= _TABLE:
        sentence = (
            f"an array of {mib(baked.largest)} became a constant of a graph at {in_words(baked.place)}, in all {mib(baked.bytes)} were "
            "written into definitions of graphs, which the process copies as they are handed on, and holds beside the array"
        )
        yield Suspect("constants in graphs", None, [sentence], baked.place)


def retracing(facts, finished):
    """A function that is traced again and again, still in the second half of its calls."""
    for function in facts.functions:
        rebuilt = not function.own and function.traces <= 2 * function.instances  # Keras makes one for each model
        if function.traces < _TRACES or not _go_on(function.traced_at, function) or rebuilt:
            continue
        twice = " (the first makes variables, and is traced twice)" * (function.traces > function.calls)
        evidence = [
            f"tf.function {function.name} ({function.at}) was traced {function.traces} times in {function.calls} calls{twice}, "
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
        shapes = function.shapes > function.traces / 2 and function.instances <= _INSTANCES and not function.changing
        if shapes:
            evidence.append(f"its arguments had {function.shapes} different shapes: each is a new graph")
        yield Suspect("retracing", None, evidence, function.place, _ONE_SIGNATURE * shapes)


def _go_on(at, function):
    """Whether what came at these calls of a function still does in the second half of them, and not just for odd batches."""
    late = sum(call > function.calls / 2 for call in at)
    return late >= max(_LATE, min(_LATE_SHARE * function.calls / 2, _MANY_LATE))


def growing_graph(facts, finished):
    """A graph of TensorFlow 1 that is built further while its session runs."""
    censuses = [census for census in facts.censuses if census.step >= 2]
    runs = [step for step in facts.steps if step.kind is Kind.SESSION]
    if len(censuses) < 2 or not runs:
        return
    steps = censuses[-1].step - censuses[0].step
    added = censuses[-1].operations - censuses[0].operations
    if steps >= _TRACES and added >= steps / 2:
        grew = f"the graph grew by {added} operations in {steps} calls of Session.run"
        yield Suspect("retracing", None, [f"{grew}: build operations once, before the loop"], runs[0].place)


def grown_variables(facts, finished):
    """Bytes by which the memory of variables rose over the run; 0 where it is less than half a model, or so little that a census lets garbage be."""
    at_the_end = [] if finished else facts.censuses[-1:]  # a script that finished has let go of its models there
    running = _while_steps_ran(facts) + at_the_end
    held = attrgetter("held")
    grown = _increase(running, held)
    if not grown and finished and (seen := _by_growth(facts, _while_steps_ran(facts))):
        # Nothing was collected for most of these: what is still held at the end, behind a collection, is no garbage.
        still = held(facts.censuses[-1]) - held(settled(facts))
        grown = max(0, min(_increase(seen, held, little_by_little=True), still))
    if grown:  # that of the last census in its turn, and it went on
        grown = max(grown, max(map(held, [*running, facts.censuses[-1]])) - held(settled(facts)))
    return grown if grown > max(_largest_model(_fullest(facts)) / 2, GROWTH_LEAST) else 0


def _few_at_a_time(census):
    """Whether many models came, no more than few are alive, the best, the last and the next, and all memory of variables is theirs."""
    theirs = sum(model.size for model in census.models) + census.slots
    return 0 < len(census.models) <= _AT_A_TIME < census.models_met and census.held <= _LET_GO * theirs


def _fullest(facts):
    """The census with the most memory of variables."""
    return max(facts.censuses, key=lambda census: census.held)


def _largest_model(census):
    return max((model.size for model in census.models), default=0)


def earlier_models(facts, finished):
    """Variables of models that came before, whether the models are alive or only their memory is."""
    grown, last = grown_variables(facts, finished), _fullest(facts)
    if not grown or _few_at_a_time(last):
        return
    change = _ONE_MODEL if any(function.tapes and function.instances > 1 for function in facts.functions) else ""
    evidence = [
        f"the memory of variables rose by {mib(grown)} while steps ran, to {mib(last.held)}; "
        f"the largest model alive had {mib(max(map(_largest_model, facts.censuses)))} of weights"
    ]
    seen = last.weights + last.slots + last.other_variables
    holder = _holder_of_models(facts, last, grown)
    if holder is not None:
        number = f"{holder.number} models, " * bool(holder.number)
        at = f" ({holder.place})" * bool(holder.place)
        evidence.append(f"{holder.name} holds {number}{mib(holder.size)} with all their variables{at}")
        numbers = f"let {holder.name} keep numbers of each model (of what fit() returns, history.history), and at most the best model"
        change = f"{numbers}; {change}" if change else numbers
    elif last.held > _LET_GO * seen:
        evidence.append(
            f"{mib(last.held - seen)} belong to variables that Python has let go of; "
            "a graph (of a compiled train or predict function) keeps them"
        )
        change = _ONE_MODEL
        if cleared := facts.made.get("clear_session"):
            evidence.append(
                f"clear_session() was called ({cleared}): it clears Keras' own state, and neither that nor gc.collect() reaches "
                "the table in which TensorFlow keeps the gradient functions of a traced train function, with its variables"
            )
    elif len(last.models) > 2:
        evidence.append(f"{len(last.models)} models are alive")
        if facts.made.get("clear_session") and not change:
            change = (
                "let go of each model: clear_session() was called, and something still leads to them, such as a list of the script's, "
                "or what fit() returns, which holds its model (keep history.history)"
            )
    if last.models_met == 1:
        of_compile = ": each compile() makes one, and an old train function keeps the old one" * (holder is None)
        evidence.append(f"there is one model, and each new optimizer comes with new slots{of_compile}")
        yield Suspect("old optimizers", grown, evidence, holder.place if holder else "")
        return
    place = (holder and (holder.place or _filled_before(facts))) or facts.made.get("model") or _used_at(facts)
    yield Suspect("models kept alive", grown, evidence, place, change)


def _holder_of_models(facts, census, grown):
    """The name that leads to most of the variables that came, or None: the last model has a name, too, for no fault."""
    if not census.model_holders:  # the end of a function that held them
        census = max(facts.censuses, key=lambda census: max((one.size for one in census.model_holders), default=0))
    before = {holder.name: holder.size for holder in settled(facts).model_holders}
    came = lambda holder: holder.size - before.get(holder.name, 0)
    most = max((holder for holder in census.model_holders if holder.number != 1), key=came, default=None)
    return most if most and came(most) > grown / 2 else None


def _filled_before(facts):
    """The line that puts models into what holds them, by the name that this had while it was filled."""
    holders = [one for census in reversed(facts.censuses) for one in census.model_holders if one.number > 1]
    return next((one.place for one in holders if one.place), "")


def _used_at(facts, least=2):
    """The line that calls the functions which Keras makes for so many models or more, one after the other."""
    again = [function for function in facts.functions if not function.own and function.instances >= least]
    return max(again, key=attrgetter("instances")).place if again else ""


def kept(facts, name, finished):
    """(bytes by which "tensors" or "arrays" that stay alive grew, in how many steps, the census that tells); (0, 0, None) for noise.

    The end of a run that finished tells, too; that of one that failed may be the middle of a step.
    """
    running = _while_steps_ran(facts)
    size = lambda census: getattr(census, name) - finished * _bounded(census, name)
    grown = _increase(running, size) or _increase(
        _by_growth(facts, running), lambda census: _named(census, name), little_by_little=True
    )
    if not running or grown < max(GROWTH_LEAST, GROWTH_SHARE * (running[-1].level or 0)):
        return 0, 0, None
    extra = [census for census in facts.censuses[:-1] if census.extra]
    counted = max(running[-1:] + extra, key=size)
    grown = max(grown, size(counted) - size(settled(facts)))
    last = facts.censuses[-1]
    if finished and size(last) > size(counted):
        names = {holder.name for holder in _holders(counted, name)}
        now = sum(holder.size - finished * holder.bounded for holder in _holders(last, name) if holder.name in names)
        steps = last.step - settled(facts).step
        if _named(counted, name) > _EXPLAINED * size(counted):  # what grew has names: others came at once
            return max(grown, now - size(settled(facts))), steps, last
        # What the steps behind the last census explain, by what those before it added; more came at once.
        a_step = grown / max(1, counted.step - settled(facts).step)
        most = _AS_MUCH * a_step * max(1, last.step - counted.step)
        return grown + min(size(last) - size(counted), most), steps, last
    after = _after(facts, counted, grown)
    until = sum(step.count for step in facts.steps) if after else counted.step
    return grown + after, until - settled(facts).step, counted


def _after(facts, counted, grown):
    """By how much the level rose after a census, where what grew until then is what it rose by until then."""
    most = max(facts.steps, key=attrgetter("count"), default=None)
    before, level = settled(facts).level, counted.level
    if not (most and most.levels and before and level) or grown < _EXPLAINED * (level - before):
        return 0
    return max(0, most.levels[-1][1] - level)


def _is_garbage(facts, grown):
    """Whether tensors that grew by so much are garbage, which nobody collects."""
    return facts.uncollected and facts.censuses[-1].garbage > grown / 2


def tensors_kept(facts, finished):
    """Bytes of tensors that the script keeps: by which what is not garbage grew, and in queues with a largest length."""
    grown = kept(facts, "tensors", finished)[0]
    queues = finished * max(_bounded(census, "tensors") for census in facts.censuses)
    return queues + (0 if _is_garbage(facts, grown) else grown)


def _by_growth(facts, running):
    """All censuses, also those that were taken because tensors had grown, where few came in their turn: a busy machine affords few.

    None of them where the level of tensor memory does not go on rising: what grew until then may have been filled once.
    """
    few = sum(census.step >= 2 for census in running) < _ENOUGH
    return [census for census in facts.censuses[:-1] if running] if few and goes_on(facts) else []


def _named(census, name):
    """Bytes of "tensors" or "arrays" that names of the script lead to: they are no garbage, also where none was collected."""
    return sum(holder.size - holder.bounded for holder in _holders(census, name))


def _bounded(census, name):
    """Bytes of "tensors" or "arrays" in queues with a largest length: they grow only until they are full."""
    return sum(holder.bounded for holder in _holders(census, name))


def _holders(census, name):
    return census.tensor_holders if name == "tensors" else census.array_holders


def retained(facts, finished):
    """Tensors and arrays whose number grows with the steps."""
    for name, word in (("tensors", "tensors"), ("arrays", "NumPy arrays")):
        grown, steps, last = kept(facts, name, finished)
        if not grown or _is_garbage(facts, grown):
            continue
        evidence = [
            f"{word} that stay alive grew by {mib(grown)} in {steps} steps, {mib(grown / max(1, steps))} a step"
        ]
        holders = _holders(last, name)
        counted = min(grown, getattr(last, name))
        then = f" after {last.step} steps" * (counted < grown)
        worth = [holder for holder in holders if holder.size > WORTH_NAMING * counted]
        evidence += [
            f"{holder.name} holds {holder.number} of them, {mib(holder.size)}{then}"
            for holder in worth
            if holder in holders[:2]
        ]
        filled = [] if worth else _that_fill(settled(facts), last)
        evidence += [f"{one.name} holds {one.number:,} objects, more with each step" for one in filled]
        place = (worth or filled)[0].place if worth or filled else ""
        if not place:  # no name leads there: to a data set made of arrays again, or to what predict() joins at its end
            copies = facts.converted.bytes >= grown
            place = facts.converted.place if copies else _used_at(facts, 1)
        change = ""
        if worth and worth[0].of_data_sets > worth[0].size / 2:
            change = _DATA_SETS
        elif filled:
            change = f"let {filled[0].name} keep no such objects but numbers of them: a tape or a closure holds the tensors that it has seen"
        elif worth and worth[0].size > _OUTPUTS * worth[0].number:
            change = _IN_PLACE_OF[name]
        yield Suspect("retained tensors", grown, evidence, place, change)


def in_one_tape(facts, finished):
    """A tape that stays open while many batches are drawn: also where the budget was large enough for all of them."""
    tapes = [step for step in facts.steps if step.kind is Kind.TAPE]
    most = max(tapes, key=attrgetter("rise"), default=None)
    if finished and most and facts.in_tape >= MANY_USES and most.rise > GROWTH_LEAST:
        sentences = [passes_under_tape(facts), f"meanwhile memory rose by {mib(most.rise)}"]
        yield Suspect("retained tensors", most.rise, sentences, most.place, IN_TAPES_OF_THEIR_OWN)


def waiting(facts, finished):
    """Garbage in cycles, where the script has switched the collector off: no step is the last straw, it grows until the end."""
    grown, steps, _ = kept(facts, "tensors", finished)
    garbage = facts.censuses[-1].garbage
    if grown and _is_garbage(facts, grown):
        cycles = facts.cycles
        of = f", among them {in_cycles(cycles)}" if cycles else ""
        sentence = (
            f"Python's collector is switched off (gc.disable()), so that it never comes: {mib(garbage)} of tensors were garbage in "
            f"reference cycles at the end{of}; what stays alive grew by {mib(grown)} in {steps} steps, {mib(grown / max(1, steps))} a step"
        )
        change = "break the cycle of references, or leave the collector on, or call gc.collect() now and then"
        place = cycles.place if cycles else ""
        yield Suspect("garbage that waits for the collector", max(garbage, grown), [sentence], place, change)


def endless_cache(facts, finished):
    """A cache that stands behind repeat(): its first pass never ends, so that it keeps every element of every pass."""
    grown = _increase(_while_steps_ran(facts), attrgetter("buffers"))
    # tf.data's model names a cache in memory twice (MemoryCache, MemoryCacheImpl): the first is enough.
    one = next((buffer for buffer in facts.buffers if buffer.endless), None)
    if one is not None and grown > GROWTH_LEAST:
        sentence = (
            f"{one.name}, {one.elements} elements: {mib(one.size)}, and it grew with the steps: it stands behind "
            "repeat(); put cache() first"
        )
        yield Suspect("cache behind repeat()", one.size, [sentence], one.place or facts.passed_at)


def kept_iterators(facts, finished):
    """Iterators that stay alive, each with the buffers of its pipeline."""
    running = _while_steps_ran(facts)
    grown = _increase(running, attrgetter("buffers"))
    if _increase(running, attrgetter("iterators")) >= 2 and grown > GROWTH_LEAST:
        sentence = (
            f"{max(census.iterators for census in facts.censuses)} iterators over data sets are alive, and what their pipelines buffer "
            f"grew by {mib(grown)}; an iterator keeps its buffers until it is let go"
        )
        yield Suspect("buffer", grown, [sentence, *buffered(facts)], facts.passed_at)


def programs(facts, finished):
    """A function that XLA compiles for one shape after the other, while the process grows outside of TensorFlow's allocator."""
    known = [one for one in facts.functions if one.compiled and one.shapes >= _TRACES]
    many = [one for one in known if _go_on(one.shaped_at, one)]
    _, grew = _grown_outside(facts, _PROGRAMS_GROWTH)
    if many and grew:
        most = max(many, key=attrgetter("shapes"))
        sentence = (
            f"XLA compiled {most.name} ({most.at}) for {most.shapes} different shapes of its arguments in {most.calls} calls, "
            "and keeps each program"
        )
        yield Suspect("programs that XLA keeps", None, [sentence, grew], most.place)


def _grown_outside(facts, least):
    """(the last two censuses in their turn, a sentence) on growth of the process, from step to step and to its end, that TensorFlow's counter does not have; the sentence is "" for little."""
    even = lambda step: step >= 2 and step & (step - 1) == 0  # censuses between these are where tensors grew
    known = [census for census in _while_steps_ran(facts) if None not in (census.process, census.peak)]
    rows = [census for census in known if even(census.step)]
    if len(rows) < 3:
        return [], ""
    sizes = [census.process - census.peak for census in rows[-3:]]  # what was in use once stays in the allocator's pool
    early, late = sizes[1] - sizes[0], sizes[2] - sizes[1]
    before, steps = rows[-2].step - rows[-3].step, rows[-1].step - rows[-2].step
    # What grows with steps grows as much in each later on, by half at least; what was only being set up does not.
    if late < least or early < least / 4 or late / steps < early / before / 2:
        return [], ""
    grew = (
        f"outside of TensorFlow's allocator the process grew by {mib(late)} in the last {steps} steps counted, "
        f"{mib(late / steps)} a step, and went on as it had begun"
    )
    return rows[-2:], grew


def _that_fill(before, after):
    """Holders of other objects than tensors and arrays, of which one census has about one more for each step than another before."""
    held = {holder.name: holder.number for holder in before.containers}
    steps = after.step - before.step
    return [holder for holder in after.containers if holder.number - held.get(holder.name, 0) >= _EACH_STEP * steps > 0]


def outside(facts):
    """Growth of the process alone; for runs in which nothing else grew."""
    rows, grew = _grown_outside(facts, _OUTSIDE_GROWTH)
    if not grew:
        return
    # Of a library's that is given an iterator, such as Keras' fit() with jit_compile, the shapes are not known.
    if compiled := [function for function in facts.functions if function.compiled and not function.shapes]:
        sentence = f"XLA compiles {compiled[0].name} ({compiled[0].at}) for each new shape, and keeps each program"
        yield Suspect("programs that XLA keeps", None, [grew, sentence], compiled[0].place)
        return
    filled = _that_fill(*rows)
    holds = [f"{holder.name} holds {holder.number:,} objects, more with each step" for holder in filled]
    nobody = ["no name of the script leads to it"] * (not filled)
    yield Suspect("growth outside TensorFlow", None, [grew, *holds, *nobody], filled[0].place if filled else "")


GROWTH = (
    programs,
    new_constants,
    retracing,
    growing_graph,
    earlier_models,
    retained,
    in_one_tape,
    waiting,
    endless_cache,
    kept_iterators,
)  # rule(facts, finished)
