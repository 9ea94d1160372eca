"""Exercises that grade themselves: what a grader in labsupport/graders/ is made of."""

import functools
import gc
from collections import Counter

import cloudpickle

from labsupport.lesson.ledger import record
from labsupport.showing.cards import show_card
from labsupport.showing.palette import GOOD, TO_DO
from labsupport.showing.plain import plain
from labsupport.showing.running import run

EXERCISE_MIME = "application/vnd.labsupport.exercise+json"


class NotYet(AssertionError):
    """What is missing, where a grader has hints for just that."""

    def __init__(self, reason, *hints):
        super().__init__(reason)
        self.hints = hints


def exercise(number, *hints):
    """Make a grader of a function that takes a learner's answer, and what else it needs, and asserts what the answer does.

    The grader shows "passed", or what is missing, with one more of the hints, folded, after each try; those of a NotYet
    come in their place. Whatever the answer does, the notebook goes on, so that "run all cells" reaches the end of an
    unsolved lab.
    """

    def decorate(grade):
        tries = Counter()

        @functools.wraps(grade)
        def graded(*given, **named):
            reason, fitting = "", ()
            try:
                grade(*given, **named)
            except (Exception, SystemExit) as error:
                fitting = error.hints if isinstance(error, NotYet) else hints
                tries[fitting] += 1
                reason = plain(str(error)) or f"{type(error).__name__}: the code does not do it yet"
            record("exercise", number=number, passed=not reason)
            _show(number, reason, fitting[: tries[fitting]])

        return graded

    return decorate


def untouched(value):
    """Whether this is what a stub gives that nobody has filled in yet."""
    return value is None or value is ...


def no_dataset(given, of):
    """What is wrong with an answer that should be a data set, in words; None if it is one. of: what it is a data set of."""
    import tensorflow as tf

    if untouched(given):
        return f"the function returns nothing yet: return a dataset of {of}."
    if not isinstance(given, tf.data.Dataset):
        return f"the function returns {type(given).__name__}, not a dataset."
    return None


def as_written(dataset):
    """A data set without what tf.data adds by itself: a prefetch that it lets grow where a busy machine serves a batch late."""
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_optimization.apply_default_optimizations = False
    options.autotune.enabled = False
    return dataset.with_options(options)


def try_out(function, *args, **options):
    """Run a grader's function(*args), which calls the answer, in a quiet arm; returns the ArmResult.

    options: those of run(). Raises AssertionError with why the arm did not end well, or with the text that the function
    returned: what is wrong with the answer, in words.
    """
    options.setdefault("label", function.__name__)
    result = run(_tried, function, args, quiet=True, **options)
    if not result.ok and result.error.cause.of_memory:
        raise AssertionError(f"it ran out of memory: {result.error}")
    assert result.ok, f"it did not run to its end: {result.error}"
    assert not isinstance(result.value, str), result.value
    return result


def _tried(function, args):
    """In the arm. Graders and answers collect garbage often: what the libraries hold, which takes 0.2 s each time, is left out."""
    gc.freeze()
    return function(*args)


_known = {}


def try_out_once(function, *args, **options):
    """try_out() for the lab's own code, which each answer is held against: measured again only when it is other code."""
    same = cloudpickle.dumps((function, args))  # with all that the code refers to in the notebook
    if same not in _known:
        _known[same] = try_out(function, *args, **options)
    return _known[same]


def _show(number, reason, hints):
    look = TO_DO if reason else GOOD
    title = f"{look.sign} Exercise {number}: " + (f"not yet: {reason}" if reason else "passed")
    folds = [(f"Hint {place}", hint) for place, hint in enumerate(hints, 1)] if reason else []
    facts = {"number": number, "passed": not reason, "reason": reason, "hints": [hint for _, hint in folds]}
    show_card(title, [], look.colour, {EXERCISE_MIME: facts}, folds)
