"""Graders of the lab on the profiler."""

from labsupport.ground.meter import phase
from labsupport.lesson.exercises import exercise, try_out, untouched


def _by_scope(events, amount):
    total = {}
    for event in events:
        scope = (event["tf_op"] or "").split("/")[0]
        total[scope] = total.get(scope, 0) + amount(event)
    return sorted(total, key=total.get, reverse=True)[:3]


def _alive_at_peak(events):
    peak, alive = max(range(len(events)), key=lambda place: events[place]["bytes_allocated"] or 0), {}
    for event in events[: peak + 1]:
        alive.pop(event["addr"], None)
        alive |= {} if event["freed"] else {event["addr"]: event}
    return list(alive.values())


def _made_trace(*rows):
    """Events with all that those of the lab have: (bytes, address, operation), bytes 0 for what is freed there."""
    events, sizes = [], {}
    for number, (size, place, name) in enumerate(rows):
        freed = 0 if size else sizes.pop(place)
        sizes |= {place: size} if size else {}
        facts = {"seconds": number / 10, "freed": not size, "tf_op": name, "shape": f"[{(size or freed) // 4}]"}
        facts |= {"addr": place, "bytes_allocated": sum(sizes.values())}
        facts |= dict.fromkeys(("requested_bytes", "allocation_bytes"), size or freed)
        events.append(facts)
    return events


@exercise(
    1,
    "A sum for each scope; an event that is freed hands nothing out.",
    "A dictionary can be sorted by its values: sorted(total, key=total.get, reverse=True).",
)
def busiest_scopes(answer, events):
    """answer(events) is the list of three scopes with the most bytes handed out, for this trace and for parts of it."""
    handed = lambda event: 0 if event["freed"] else event["allocation_bytes"]
    a, c, d, e = (256, 1, "a/b"), (400, 2, "c"), (300, 3, "d/e/f"), (300, 4, "d/g")
    made = _made_trace(a, (0, 1, "a/b"), c, (80, 5, None), d, e)
    for recorded in (events, made):
        found, expected = answer(recorded), _by_scope(recorded, handed)
        assert not untouched(found), "busiest_scopes() returns nothing yet: return three names."
        found = list(found)
        assert len(found) == 3, f"three scopes are wanted, you return {len(found)}."
        if other := [name for name in found if not isinstance(name, str)]:
            raise AssertionError(f"names are wanted, and {other[0]!r} is none.")
        if deep := [name for name in found if "/" in name]:
            raise AssertionError(f"{', '.join(deep)} are operations: their scope is what stands before the first /.")
        if found == expected:
            continue
        assert found != _by_scope(recorded, lambda event: event["allocation_bytes"] or 0), (
            "you count each allocation twice, or wrongly: each allocation ends in an event that is freed."
        )
        assert found != _by_scope(recorded, lambda event: not event["freed"]), "you count events, not their bytes."
        assert found != _by_scope(_alive_at_peak(recorded), handed), (
            "you count what was held at the peak: what was freed before was handed out, too."
        )
        known = {(event["tf_op"] or "").split("/")[0] for event in recorded}
        unknown = [name for name in found if name not in known]
        assert not unknown, f"there is no scope {', '.join(unknown)} in these events."
        assert sorted(found) != sorted(expected), f"{found} are the right three, but not in order of their bytes."
        raise AssertionError(f"{found} are not the three scopes with the most bytes.")


def _bagged(answer, number, rows, width):
    """In the arm: (shapes, the largest distances of values and gradient from gather's), or what is wrong, in words."""
    import tensorflow as tf

    table = tf.Variable(tf.random.stateless_normal([rows, width], seed=[1, 2]))
    words = tf.random.stateless_uniform([number, 4], [3, 4], 0, rows, tf.int32)
    pull = tf.random.stateless_normal([number, width], seed=[5, 6])

    def tried(function):
        with tf.GradientTape() as tape:
            means = function(table, words)
            if untouched(means):
                return None
            means = tf.convert_to_tensor(means)
            if means.shape != pull.shape:
                return means, None
            loss = tf.reduce_sum(means * pull)
        return means, tape.gradient(loss, table)

    with phase("yours"):
        mine = tried(answer)
    if mine is None:
        return "bag() returns nothing yet: return a tensor of shape (n, width of the table)."
    means, gradient = mine
    if means.shape != pull.shape:
        return f"the result has the shape {tuple(means.shape)}; {tuple(pull.shape)} is wanted."
    right, right_gradient = tried(lambda table, words: tf.reduce_mean(tf.gather(table, words), axis=1))
    if not float(tf.reduce_max(abs(means - right))) < 1e-4:
        return "the values are not the mean of the four rows."
    if gradient is None:
        return "the table gets no gradient: it would never learn."
    gradient, right_gradient = (tf.convert_to_tensor(one) for one in (gradient, right_gradient))
    return (
        None
        if float(tf.reduce_max(abs(gradient - right_gradient))) < 1e-3
        else "the table's gradient is not the mean's."
    )


@exercise(
    2,
    "tf.gather takes indices of any shape; look at the shape of what it returns.",
    "The four rows stand along axis 1 of what tf.gather returns.",
)
def bag(answer):
    """answer(table, words) is the mean of each row's entries of the table, can be learnt, and needs no one-hot rows."""
    number, rows, width = 1024, 8192, 64
    done = try_out(_bagged, answer, number, rows, width, label="your answer to 2")
    wide, mine = number * rows * 4 / 2**20, done.phase("yours").rise_mib
    assert mine < 0.5 * wide, (
        f"it needs {mine:.0f} MiB; a row of the vocabulary's length for each of {number} bags is {wide:.0f}, and is not needed."
    )
