"""The largest batch that fits a budget: ours against two others, on the same models: runs, OOMs, and how near they come.

Halving is what accelerate's find_executable_batch_size does (from a start, half after each OOM), doubling with a binary
search what Lightning's BatchSizeFinder does in its mode "binsearch" (from 2, twice as much until an OOM, then between).
A run is one of six steps in an arm, since free memory comes to be in pieces. At the limit outcomes differ, by the order of what
runs side by side: a search takes the first, and the true one is the largest batch that ends in each of three runs. Of each
batch that a way has found is told in how many of three it ends.

    python tools/largest.py            writes data/recorded/largest.csv
"""

from table import write_rows
from zoo import wanted
from zoo_models import zoo
from zoo_table import LARGEST

from labsupport.fits.largest import attempted, largest_batch

COLUMNS = "model budget way batch true runs ooms ended".split()
HALVING_FROM = 128  # accelerate's own default
REPEATS = 3
CASES = {"two_inputs": "600 MiB", "subclassed": "900 MiB", "transformer": "900 MiB", "MobileNetV2": "700 MiB"}


class Trials:
    """Outcomes of batches of one model in one budget."""

    def __init__(self, entry, budget):
        self.entry, self.budget, self._known = entry, budget, {}

    def runs(self, batch):
        """Whether a batch runs within the budget, the first time."""
        return self._outcomes(batch, 1)[0]

    def ended(self, batch):
        """In how many of REPEATS runs it does."""
        return sum(self._outcomes(batch, REPEATS))

    def _outcomes(self, batch, number):
        known = self._known.setdefault(batch, [])
        while len(known) < number:
            known.append(attempted(wanted(self.entry, batch, "adam"), self.budget).ok)
        return known

    def true(self, near):
        """The largest batch that always ends, looked for from one that is near."""
        while self.ended(near) < REPEATS:
            near -= 1
        while self.ended(near + 1) == REPEATS:
            near += 1
        return near

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
        best, searched = doubling(trials)
        half, halved = halving(trials)
        found = [
            ("predicted, two runs", batch, len(tried), ooms),
            (f"halving from {HALVING_FROM}", half, len(halved), len(halved) - 1),
            ("doubling, then binary search", best, len(searched), sum(not trials.runs(one) for one in searched)),
        ]
        true = trials.true(best)
        for way, best, runs, bad in found:
            rows.append(dict(zip(COLUMNS, (name, budget, way, best, true, runs, bad, trials.ended(best)))))
        print(*rows[-3:], sep="\n", flush=True)
        write_rows(LARGEST, COLUMNS, rows)


if __name__ == "__main__":
    main()
