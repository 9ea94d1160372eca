"""Two or more measured arms side by side: one picture, one table, the same as text."""

from dataclasses import dataclass

import pandas as pd

from labsupport.ground.record import Cause
from labsupport.ground.result import Stopped
from labsupport.showing.picture import compare_figure
from labsupport.showing.plain import plain
from labsupport.showing.words import bundle

_PEAK = {"tensors": "peak_mib", "process": "process_peak_mib"}
_SMALLER = "× smaller than the first"
_DIGITS = {"peak MiB": 1, "at the end MiB": 1, "process peak MiB": 1, "time s": 2, _SMALLER: 2}
_LONGEST = 40  # characters of a value that a table's cell shows


def _short(value):
    """A value for a table cell: numbers rounded; nothing for containers and whatever would be long."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "" if value is None or isinstance(value, (dict, list, tuple, set)) else str(value)
    return text if len(text) <= _LONGEST else ""


@dataclass
class Comparison:
    """results: the arms in the order given. story: "tensors" or "process", the memory that is compared."""

    results: list
    story: str

    @property
    def frame(self):
        """A row an arm; MiB and seconds; what is unavailable is None, as the ratios are where the first arm did not finish."""
        first, *_ = self.results
        peaks = [getattr(result, _PEAK[self.story]) for result in self.results]
        rows = {
            result.label: {
                "outcome": result.outcome,
                "peak MiB": result.peak_mib,
                "at the end MiB": result.end_mib if result.ok else None,
                "process peak MiB": result.process_peak_mib,
                "time s": result.seconds,
                # The peak of an arm that died is less than it wanted: a ratio to it would be a guess.
                _SMALLER: peaks[0] / peak if peaks[0] and peak and first.ok and result.ok else None,
                "value": _short(result.value),
            }
            for result, peak in zip(self.results, peaks)
        }
        return pd.DataFrame.from_dict(rows, orient="index")

    def _readable(self):
        """The frame as it is shown: numbers rounded, a "+" behind a peak that was cut short, no column without figures."""
        frame = self.frame.astype(object)
        for column, digits in _DIGITS.items():
            frame[column] = [
                ("unavailable" if result.ok else "–")
                if pd.isna(number)
                else f"{number:,.{digits}f}" + "+" * (not result.ok and "peak" in column)
                for number, result in zip(frame[column], self.results)
            ]
        empty = ["value"] * (not frame["value"].any()) + [_SMALLER] * (not self.results[0].ok)
        return frame.drop(columns=empty)

    @property
    def text(self):
        return plain(self._readable().to_string())

    def _ipython_display_(self):
        from IPython.display import HTML, display

        data, metadata = bundle(compare_figure(self.results, self.story), "Side by side\n" + self.text)
        display(data, metadata=metadata, raw=True)
        note = (
            "" if all(result.ok for result in self.results) else "<small>+ : it did not finish; it wanted more.</small>"
        )
        display(HTML(plain(self._readable().to_html(border=0)) + note))  # pandas escapes markup

    def __str__(self):
        return self.text


def compare(*results, story="tensors"):
    """Set measured arms side by side; the first is what the others are compared with.

    story: "tensors" compares the allocator's exact peaks; "process" the resident set, for what the allocator
    does not see (graphs, NumPy, Python objects). Raises ValueError for fewer than two arms, Stopped for a stopped one.
    """
    if len(results) < 2:
        raise ValueError("compare() needs two or more results of run(): compare(failure, fix)")
    if story not in _PEAK:
        raise ValueError(f'story is {story!r}: write "tensors" or "process"')
    stopped = [result.label for result in results if not result.ok and result.error.cause is Cause.STOPPED]
    if stopped:
        raise Stopped(f"{', '.join(stopped)}: stopped before the end; run that cell again first")
    labels = [result.label for result in results]
    if len(set(labels)) < len(labels):
        raise ValueError(
            f"two arms have the same label ({', '.join(labels)}): give run(..., label=...) so that they can be told apart"
        )
    return Comparison(list(results), story)
