"""The largest batch that fits a budget: predicted, checked in an arm, corrected by what that showed, and checked once more."""

from dataclasses import dataclass, field

from labsupport.fits.measuring import run_step, step_peak
from labsupport.fits.prediction import LONG, Source
from labsupport.ground.budget import mib, parse_size
from labsupport.showing.running import run

# What the second run leaves free: two steps of the same batch differ by a per cent or so.
_LEFT = 0.01
# How much less room the second run is made for where the first one ended out of memory.
_LESS = 0.9


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
    """The Largest batch of a Wanted in a budget such as "8 GiB", from at most two runs, each of LONG steps, in arms."""
    room = parse_size(budget)
    source = Source(wanted, progress)
    found = Largest(0, source.largest(room), room)

    def tried(batch):
        """Bytes at the worst moment of a run of this batch, None where it ended out of memory."""
        if progress:
            progress(f"running a batch of {batch}")
        result = attempted(wanted.with_batch(batch), budget, timeout=timeout)
        measured = step_peak(result) if result.ok else None
        found.tried.append((batch, source.level(batch), measured, result.ok))
        found.batch = max(found.batch, batch * result.ok)
        return measured

    if found.predicted:
        measured = tried(found.predicted)
        share = _more(measured, source.within(found.predicted, room)) if measured else _LESS
        batch = source.largest(int(room * share))
        if batch > found.batch:
            tried(batch)
    return found


def attempted(wanted, budget, **options):
    """The ArmResult of LONG steps of a Wanted in a budget. options: those of run(). Raises RuntimeError for what ended otherwise than by memory."""
    result = run(run_step, wanted, LONG, budget=budget, outside="6 GiB", quiet=True, **options)
    if not result.ok and not result.error.cause.of_memory:
        raise RuntimeError(f"the step did not run: {result.error}")
    return result


def _more(measured, lowest):
    """How many times the room the walks have for the second run, where the first run took less than each of its walks."""
    return max(1.0, lowest / measured * (1 - _LEFT))
