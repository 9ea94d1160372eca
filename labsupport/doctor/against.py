"""A run against an earlier one of the same script: whether the change helped, and by how much. Pure functions over reports."""

import json

from labsupport.ground.budget import mib
from labsupport.ground.folders import ArmSetupError

_NAMES = {"peak": "tensors, peak", "process_peak": "process, peak"}
_LEAST = 0.02  # of the earlier size: an order of operations moves a peak by a few per cent


def earlier(path):
    """What `--json` has written into a file. Raises ArmSetupError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        figures, suspects = dict(data["figures"]), [suspect["kind"] for suspect in data["suspects"]]
        return {"outcome": str(data["outcome"]), "figures": figures, "suspects": suspects}
    except OSError as error:
        raise ArmSetupError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError):
        raise ArmSetupError(f"{path} is no report of the doctor: write one with --json --report {path}") from None


def as_earlier(diagnosis):
    """What earlier() would give of a Diagnosis of this run."""
    result = diagnosis.result
    kinds = [suspect.kind for suspect in diagnosis.suspects]
    return {"outcome": result.outcome, "figures": result.figures, "suspects": kinds}


def changes(before, diagnosis):
    """Sentences on what differs from an earlier() report."""
    result, kinds = diagnosis.result, [suspect.kind for suspect in diagnosis.suspects]
    told = [] if before["outcome"] == result.outcome else [f"{before['outcome']}; now {result.outcome}"]
    for name, words in _NAMES.items():
        told += _moved(words, before["figures"].get(name), result.figures[name])
    gone = [kind for kind in before["suspects"] if kind not in kinds]
    new = [kind for kind in kinds if kind not in before["suspects"]]
    told += [f"no suspect any more: {', '.join(gone)}"] * bool(gone) + [f"new suspect: {', '.join(new)}"] * bool(new)
    return told or ["nothing has changed"]


def _moved(words, was, now):
    if not isinstance(was, int) or now is None:
        return []
    share = (now - was) / was if was else 0
    by = f"{abs(share):.0%} {'less' if share < 0 else 'more'}" if abs(share) >= _LEAST else "the same within 2 %"
    return [f"{words}: {mib(was)}, now {mib(now)}: {by}"]
