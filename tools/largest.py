"""The largest batch that fits a budget: ours against two others, on the same models: runs, OOMs, and how near they come.

Halving is what accelerate's find_executable_batch_size does (from a start, half after each OOM), doubling with a binary
search what Lightning's BatchSizeFinder does in its mode "binsearch" (from 2, twice as much until an OOM, then between).
The true one comes from a search to the last example. A batch is run once, in an arm, and its outcome kept for all of them.

    python tools/largest.py            writes data/recorded/largest.csv
"""

from table import write_rows
from zoo import wanted
from zoo_models import zoo
from zoo_table import LARGEST

from labsupport.fits.largest import largest_batch
from labsupport.fits.measuring import run_step
from labsupport.showing.running import run

COLUMNS = "model budget way batch true runs ooms".split()
HALVING_FROM = 128  # accelerate's own default
CASES = {"two_inputs": "600 MiB", "subclassed": "900 MiB", "transformer": "900 MiB", "MobileNetV2": "700 MiB"}


class Trials:
    """Outcomes of batches of one model in one budget."""

    def __init__(self, entry, budget):
        self.entry, self.budget, self._known = entry, budget, {}

    def runs(self, batch):
        """Whether a batch runs within the budget."""
        if batch not in self._known:
            step = wanted(self.entry, batch, "adam")
            result = run(run_step, step, budget=self.budget, outside="6 GiB", quiet=True)
            if not result.ok and not result.error.cause.of_memory:
                raise RuntimeError(str(result.error))
            self._known[batch] = result.ok
        return self._known[batch]

    def between(self, low, high, tried):
        """Binary search: the largest batch that runs, low is known to run and high not to."""
        while high - low > 1:
            middle = (low + high) // 2
            tried.append(middle)
            low, high = (middle, high) if self.runs(middle) else (low, middle)
        return low


def halving(trials):
    tried = [HALVING_FROM]
    while not trials.runs(tried[-1]) and tried[-1] > 1:
        tried.append(tried[-1] // 2)
    return tried[-1], tried


def doubling(trials):
    tried = [2]
    while trials.runs(tried[-1]):
        tried.append(2 * tried[-1])
    return trials.between(tried[-1] // 2, tried[-1], tried), tried


def ours(trials):
    found = largest_batch(wanted(trials.entry, 8, "adam"), trials.budget)
    return found.batch, [batch for batch, *_ in found.tried], sum(not ran for *_, ran in found.tried)


def main():
    rows = []
    for name, budget in CASES.items():
        trials = Trials(zoo()[name], budget)
        batch, tried, ooms = ours(trials)
        true, searched = doubling(trials)  # to the last example, so this is the true one, too
        found = [("predicted, two runs", batch, len(tried), ooms)]
        half, halved = halving(trials)
        found.append(("halving from 128", half, len(halved), len(halved) - 1))
        found.append(
            ("doubling, then binary search", true, len(searched), sum(not trials.runs(one) for one in searched))
        )
        rows += [dict(zip(COLUMNS, (name, budget, way, best, true, runs, bad))) for way, best, runs, bad in found]
        print(*rows[-3:], sep="\n", flush=True)
        write_rows(LARGEST, COLUMNS, rows)


if __name__ == "__main__":
    main()
