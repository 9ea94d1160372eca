"""The largest batch that fits a budget: predicted, checked in an arm, corrected by what that showed, and checked once more."""

from dataclasses import dataclass, field

from labsupport.fits.measuring import run_step, step_peak
from labsupport.fits.prediction import Source
from labsupport.ground.budget import mib, parse_size
from labsupport.showing.running import run

# The first run is this far below the prediction, whose error is seldom beyond 10 % (data/recorded/zoo.csv), so that it has room.
_FIRST = 0.9
# What is left free in the second: two steps of the same batch differ by a per cent or so, and a full region is in pieces.
_LEFT = 0.01


@dataclass
class Largest:
    """batch: the largest that was seen to run, 0 if none was; predicted: the first guess; tried: [(batch, predicted bytes,
    measured bytes or None, whether it ran)] in the order of the runs."""

    batch: int
    predicted: int
    budget: int
    tried: list = field(default_factory=list)

    def __str__(self):
        runs = [
            f"batch {batch}: {mib(measured)} measured, {mib(level)} predicted" if ran else f"batch {batch}: did not run"
            for batch, level, measured, ran in self.tried
        ]
        found = f"{self.batch} is the largest batch seen to run" if self.batch else "no batch fits"
        return f"{found} in {mib(self.budget)} (predicted: {self.predicted}); " + "; ".join(runs)


def largest_batch(wanted, budget, progress=None, timeout=300):
    """The Largest batch of a Wanted in a budget such as "8 GiB", from at most two runs, each of two steps, in arms."""
    room = parse_size(budget)
    source = Source(wanted, progress)
    predicted = source.largest(room)
    found = Largest(0, predicted, room)
    batch, ratio = max(1, int(predicted * _FIRST)) if predicted else 0, 1.0
    for _ in range(2):
        if not batch or any(batch <= tried for tried, *_, ran in found.tried if ran):
            break
        if progress:
            progress(f"running a batch of {batch}")
        result = run(run_step, wanted.with_batch(batch), budget=budget, outside="6 GiB", quiet=True, timeout=timeout)
        measured = step_peak(result) if result.ok else None
        found.tried.append((batch, source.level(batch), measured, result.ok))
        if result.ok:
            found.batch = max(found.batch, batch)
        elif not result.error.cause.of_memory:
            raise RuntimeError(f"the step did not run: {result.error}")
        ratio = off_by(measured, source.lowest(batch), source.level(batch)) if measured else 1 / _FIRST * ratio
        batch = source.largest(int(room * (1 - _LEFT) / ratio), source.lowest)
    return found


def off_by(measured, lowest, highest):
    """By what factor predictions are off, after one run. Within their range a run says nothing against them: the next run's
    order may be the one that takes most."""
    if measured > highest:
        return measured / highest
    return min(1.0, measured / lowest)
