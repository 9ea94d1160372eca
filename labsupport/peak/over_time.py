"""Memory over time, by kind, and what grows from moment to moment, by line. Pure functions over Blocks and their kinds."""

import re
from bisect import bisect, bisect_left
from collections import Counter, defaultdict

_POINTS = 240  # of a curve: more cannot be told apart on a page
# Moments that growth can be told from; the first is a warm-up, in which weights and slots are made. Growth must then show in
# each of so many equal parts of the others, as in doctor/checks.py: a buffer that fills up grows in some, a leak in all.
_FEWEST, _PARTS = 4, 4
# Bytes a part: the allocator hands out 256 at least, however small a tensor; 16 kept numbers are no leak.
_LEAST = 16 * 256
# Of what was recorded, the turns of a loop must span so much: one that only builds layers, or stacks them, is no training.
_SPAN = 0.5
# What a training comes back to, the surest first.
_PHASE, _UPDATE, _WAY_BACK, _CALL, _TURN = range(5)
TURNS = "run of line"  # the name of moments that are the turns of a loop, before the line's number
_NUMBER = re.compile(r"[\s_#-]*\d+$")  # behind a phase's name: "epoch 3" and "epoch 4" are one


def curve(told, begin, end):
    """[[seconds, {kind: bytes}]]: what was in use between two times (ps), in equal steps, each at its highest moment.

    told: [(Block, kind)], in the order of their begin.
    """
    steps = [(block.start, block.size, kind) for block, kind in told if block.start <= end]
    steps += [(block.end, -block.size, kind) for block, kind in told if block.end <= end]
    steps.sort(key=lambda step: step[:2])  # what ends before what begins: a block may change its kind
    now, total, points = Counter(), 0, {}
    for time, size, kind in steps:
        now[kind] += size
        total += size
        place = int(_POINTS * (time - begin) / max(end - begin, 1))
        if place not in points or total > points[place][0]:
            points[place] = total, time, dict(now)
    return [
        [(time - begin) / 1e12, {k: size for k, size in sizes.items() if size}] for _, time, sizes in points.values()
    ]


def moments(found, phases, begin, until, lines=()):
    """(name, [ps]): moments between two times at which a training stands as it stood before; ("", []) if there are too few.

    The ends of the script's own phases of one name (numbers behind it left aside), else of its updates, else of its ways
    back, else of the calls of the graph that was called most, else the begins of the line that ran most often. found: the
    Threads; phases: names of phases, lines: (file, line), both by the number of their marks.
    """
    ends = defaultdict(list)
    for thread in found:
        for time, kind, number in thread.lines:
            if kind == "phase":
                ends[_PHASE, _NUMBER.sub("", phases[number])].append(time)
            elif kind == "line" and number < len(lines) and lines[number][1]:
                ends[_TURN, lines[number]].append(time)
        for span in thread.spans:
            if span.name == "update":
                ends[_UPDATE, "update"].append(span.end)
            elif span.name.startswith("backward "):
                ends[_WAY_BACK, "way back"].append(span.end)
            elif span.is_call:
                ends[_CALL, span.name].append(span.end)
    told = {key: sorted(time for time in times if time <= until) for key, times in ends.items()}
    spans = lambda times: len(times) >= _FEWEST and times[-1] - times[0] > _SPAN * (until - begin)
    told = {key: times for key, times in told.items() if key[0] != _TURN or spans(times)}
    rank, name = min(told, key=lambda key: (len(told[key]) < _FEWEST, key[0], -len(told[key])), default=(0, ""))
    times = told.get((rank, name), [])
    if len(times) < _FEWEST:
        return "", []
    if rank == _TURN:
        return f"{TURNS} {name[1]}", times
    return "call" if rank == _CALL else name, times


def growth(told, times, key):
    """{key(block, kind): bytes from moment to moment} of what grew in each part of the time, most first."""
    if len(times) < _FEWEST:
        return {}
    changes = defaultdict(Counter)
    for block, kind in told:
        first, after = bisect_left(times, block.start), bisect(times, block.end)
        if first < after:
            steps = changes[key(block, kind)]
            steps[first] += block.size
            steps[after] -= block.size
    last = len(times) - 1
    parts = min(_PARTS, last - 1)
    edges = [1 + (last - 1) * part // parts for part in range(parts + 1)]
    grown = {}
    for name, steps in changes.items():
        levels = [sum(size for place, size in steps.items() if place <= edge) for edge in edges]
        if all(later - earlier >= _LEAST for earlier, later in zip(levels, levels[1:])):
            grown[name] = (levels[-1] - levels[0]) / (last - 1)
    return dict(sorted(grown.items(), key=lambda item: -item[1]))
