"""Two or more measured arms side by side: one picture, one table, the same as text."""

from dataclasses import dataclass

import pandas as pd

from labsupport.showing.picture import compare_figure
from labsupport.showing.words import bundle

_PEAK = {"tensors": "peak_mib", "process": "process_peak_mib"}


def _short(value):
    """A value for a table cell: numbers rounded; nothing for containers and whatever would be long."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = "" if value is None or isinstance(value, (dict, list, tuple)) else str(value)
    return text if len(text) <= 40 else ""


@dataclass
class Comparison:
    """results: the arms in the order given. story: "tensors" or "process", the memory that is compared.

    frame: one row an arm; MiB and seconds; missing figures are None.
    """

    results: list
    story: str

    def ratio(self, first, second):
        """Peak of the arm labelled `first` over the peak of the arm labelled `second`; None if unavailable."""
        peaks = {result.label: getattr(result, _PEAK[self.story]) for result in self.results}
        missing = {first, second} - peaks.keys()
        if missing:
            raise KeyError(f"no arm is labelled {', '.join(map(repr, missing))}; there are {', '.join(map(repr, peaks))}")
        return peaks[first] / peaks[second] if peaks[first] and peaks[second] else None

    @property
    def frame(self):
        base = getattr(self.results[0], _PEAK[self.story])
        rows = []
        for result in self.results:
            peak = getattr(result, _PEAK[self.story])
            rows.append(
                {
                    "arm": result.label,
                    "outcome": result.outcome,
                    "peak MiB": result.peak_mib,
                    "at the end MiB": result.end_mib if result.ok else None,
                    "process peak MiB": result.process_peak_mib,
                    "time s": result.seconds,
                    "× smaller than the first": base / peak if base and peak and result.ok else None,
                    "value": _short(result.value),
                }
            )
        return pd.DataFrame(rows).set_index("arm")

    @property
    def text(self):
        return self._readable().to_string()

    def _readable(self):
        frame = self.frame.astype(object)
        died = [not result.ok for result in self.results]
        for column, digits in (("peak MiB", 1), ("at the end MiB", 1), ("process peak MiB", 1), ("time s", 2), ("× smaller than the first", 2)):
            frame[column] = [
                ("–" if dead else "unavailable") if pd.isna(x) else f"{x:,.{digits}f}" + ("+" if dead and "peak" in column else "")
                for x, dead in zip(frame[column], died)
            ]
        return frame if frame["value"].any() else frame.drop(columns="value")

    def _ipython_display_(self):
        from IPython.display import HTML, display

        data, metadata = bundle(compare_figure(self.results, self.story), "Side by side\n" + self.text)
        display(data, metadata=metadata, raw=True)
        note = "" if all(r.ok for r in self.results) else "<small>+ : it did not finish; it wanted more.</small>"
        display(HTML(self._readable().to_html(border=0, index_names=False) + note))

    def __str__(self):
        return self.text


def compare(*results, story="tensors"):
    """Set measured arms side by side; the first is what the others are compared with.

    story: "tensors" compares the allocator's exact peaks; "process" the resident set, for what the allocator
    does not see (graphs, NumPy, Python objects). Raises ValueError for fewer than two arms or a stopped one.
    """
    if len(results) < 2:
        raise ValueError("compare() needs two or more results of run(): compare(failure, fix)")
    if story not in _PEAK:
        raise ValueError(f"story is {story!r}: write \"tensors\" or \"process\"")
    stopped = [result.label for result in results if result.outcome == "stopped"]
    if stopped:
        raise ValueError(f"{', '.join(stopped)}: stopped before the end; run that cell again first")
    labels = [result.label for result in results]
    if len(set(labels)) < len(labels):
        raise ValueError(f"two arms have the same label ({', '.join(labels)}): give run(..., label=...) so that they can be told apart")
    return Comparison(list(results), story)
