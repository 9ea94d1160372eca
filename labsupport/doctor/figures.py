"""What the doctor tells in figures: what the peak was made of, and how the level moved. Pure functions over records."""

import statistics
from dataclasses import dataclass, fields

from labsupport.ground.budget import MIB, mib
from labsupport.ground.record import Kind

# Of the level late in a run: a smaller rise is that of a first evaluation, of metrics and the like; by trial.
_MUCH = 0.3


@dataclass(frozen=True)
class Parts:
    """Bytes of tensor memory at its peak, by what they were.

    working: what no object that was alive accounts for: activations, gradients and intermediates. wanted: what was asked
    for then and found no room; it stands beside the peak.
    """

    weights: int = 0
    slots: int = 0
    other_variables: int = 0
    replicas: int = 0
    earlier_models: int = 0
    data: int = 0
    kept: int = 0
    garbage: int = 0
    buffers: int = 0
    working: int = 0
    wanted: int = 0

    def rows(self):
        """[(words, bytes)] of what has a size, largest first; wanted is none of them."""
        sizes = [(_WORDS[part.name], getattr(self, part.name)) for part in fields(self) if part.name in _WORDS]
        return sorted((row for row in sizes if row[1]), key=lambda row: -row[1])


_WORDS = {
    "weights": "weights",
    "slots": "optimizer slots",
    "other_variables": "other variables",
    "replicas": "copies on other devices",
    "earlier_models": "models that came before",
    "data": "data held as tensors",
    "kept": "tensors kept by the script",
    "garbage": "garbage that waited for the collector",
    "buffers": "buffers of pipelines",
    "working": "activations, gradients and intermediates",
}


def wanted(result):
    """Bytes of the allocation that found no room; None where that is not told.

    Where TensorFlow crashed in place of raising an error, it is the array that was being copied just then.
    """
    copied = result.facts.converted.now if result.facts else 0
    return (result.wanted or copied or None) if result.error else None


def in_use(result):
    """Bytes in use when memory ran out; None where that is not told.

    Where several operations fail side by side, the first lets go of its tensors before the last dump is written.
    """
    return max(result.dumps, default=None) if result.error else None


def parts_of_peak(result, earlier_models, kept):
    """The Parts of an examined arm.

    earlier_models: whether variables of earlier models stay, of which those count that Python has let go of; kept: bytes by
    which retained tensors grew (see growing.py). Objects are counted at a census, not at the moment of the peak, so each part
    gets at most what those before it leave; what was counted as the most at any time, the buffers, comes last.
    """
    facts = result.facts
    live = max(facts.censuses, key=lambda census: census.weights + census.slots + census.other_variables)
    sizes = {
        "weights": live.weights,
        "slots": live.slots,
        "other_variables": max(0, live.other_variables - live.replicas),
        "replicas": live.replicas,
        "earlier_models": max(map(_let_go, facts.censuses)) if earlier_models else 0,
        "data": _data(facts, live),
        "kept": kept,
        "garbage": facts.censuses[-1].garbage if result.error or facts.uncollected else 0,
        "buffers": sum(buffer.size for buffer in facts.buffers),
    }
    rest = least_peak(result)
    for name, size in sizes.items():
        sizes[name] = min(size, rest)
        rest -= sizes[name]
    return Parts(**sizes, working=rest, wanted=wanted(result) or 0)


def _let_go(census):
    """Bytes of variables that only graphs lead to."""
    return max(0, census.held - census.weights - census.slots - census.other_variables)


def least_peak(result):
    """Bytes: the allocator's own peak, or the highest level seen where the process died before it could report."""
    if result.figures["peak"] is not None:
        return result.figures["peak"]
    censuses = result.facts.censuses if result.facts else []
    seen = [census.level or 0 for census in censuses] + [size for _, size in result.tensors]
    return max([in_use(result) or 0, *seen])


def _data(facts, live):
    """Bytes of tensors that are data: alive before the first step, since what a step adds is not."""
    first = next((census for census in facts.censuses if census.step), None)
    if first is not None:
        return first.tensors
    return sum(holder.size for holder in live.tensor_holders) if live.models else live.tensors


def growth(facts):
    """Sentences on the level of tensor memory at the begin of each kind of step, and of each pass over data."""
    return [*filter(None, map(_by_step, facts.steps)), *_by_pass(facts.passes, facts.number_of_passes)]


def unexplained(facts):
    """Bytes by which the level at the begin of the commonest step rose from the first third to the last, beyond what pipelines and queues with a largest length hold; 0 for little."""
    step = max(facts.steps, key=lambda step: step.count, default=None)
    found = step and _early_and_late(step)
    if not found or not facts.censuses:
        return 0
    early, late = found
    queues = [sum(holder.bounded for holder in census.tensor_holders) for census in facts.censuses]
    rise = late - early - max((census.buffers for census in facts.censuses), default=0) - max(queues, default=0)
    rise -= max(0, settled(facts).held - facts.censuses[0].held)  # slots come with the first step
    return int(rise) if rise > max(MIB, _MUCH * late) else 0


def variables_rose(facts):
    """Bytes by which the memory of variables rose behind the first step, in which optimizers make their slots."""
    return max(census.held for census in facts.censuses) - settled(facts).held


def settled(facts):
    """The first census behind what the first step made; where there was one step alone, the last."""
    return next((census for census in facts.censuses if census.step >= 2), facts.censuses[-1])


def goes_on(facts):
    """Whether the level at the begin of the commonest step rises in the second half of the run at least half as much as in the first; also where there are too few to tell."""
    step = max(facts.steps, key=lambda step: step.count, default=None)
    levels = [size for _, size in step.levels] if step else []
    third = len(levels) // 3
    if third < 2:
        return True
    early, middle, late = (statistics.median(levels[i * third : (i + 1) * third]) for i in range(3))
    return late - middle >= (middle - early) / 2


def _early_and_late(step):
    """Medians of the levels in the first and the last third; None for too few."""
    levels = [size for _, size in step.levels]
    third = len(levels) // 3
    return (statistics.median(levels[:third]), statistics.median(levels[-third:])) if third >= 2 else None


def _by_step(step):
    found = _early_and_late(step)
    if found is None:
        return ""
    early, late = found
    a_step = (late - early) / (step.count * 2 / 3) / MIB  # the middles of first and last third lie that far apart
    until = "until the next begins" if step.kind is Kind.TAPE else "for its duration"  # its end is not seen
    adds = f"; a step adds up to {mib(step.rise)} {until}" if step.rise else ""
    return (
        f"{step.name}: {step.count} steps; in use before a step {mib(early)} in the first third, "
        f"{mib(late)} in the last, {a_step:+.3f} MiB a step{adds}"
    )


def _by_pass(passes, number):
    if number < 3 or None in passes:
        return []
    second, last = passes
    return [
        f"passes over data sets (epochs): {number}; in use at the begin of the second {mib(second)}, of the last "
        f"{mib(last)}, {(last - second) / (number - 2) / MIB:+.3f} MiB a pass"
    ]
