"""The measured functions of a lab as its notebook sends them to lab.run(), without running the notebook."""

import ast
import contextlib
import linecache
from pathlib import Path
from unittest.mock import MagicMock, patch

import jupytext
import reuse

import labsupport

ROOT = Path(__file__).parents[1]
LABS = ROOT / "labs"


def arms(lab, wanted, needed=()):
    """{name: (function, args, keywords)} for every `name = lab.run(…)` or `lab.measure(…)` in `wanted`, from the source of a lab such as "retracing".

    To be called in the folder of the labs, as their notebooks are.
    needed: names whose runs must really happen, here or in the notebook, since a wanted arm takes their value.
    """
    (source,) = (ROOT / "tools" / "source").glob(f"[0-9]*_{lab}.py")
    found, namespace, measure = {}, {"__name__": "__main__"}, labsupport.measure
    target = None

    def recorder(function, *args, **keywords):
        if target in wanted:
            found[target] = (function, args, keywords)
        return measure(function, *args, **keywords) if target in needed else MagicMock()

    # In the module itself, not in a stand-in: an arm that uses `lab` finds the whole module in its own process.
    nothing = dict.fromkeys(("expect_oom", "expect_finished", "guess"), MagicMock())
    with reuse.equal_once(), patch.multiple(labsupport, run=recorder, measure=recorder, **nothing):
        for cell, code in enumerate(c.source for c in jupytext.read(source).cells if c.cell_type == "code"):
            name = f"<{lab}, cell {cell}>"
            linecache.cache[name] = (len(code), None, code.splitlines(True), name)
            for statement in ast.parse(code).body:
                named = isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
                target = statement.targets[0].id if named else None
                # What only shows results of runs that did not happen may fail; what defines an arm may not, or it is missing below.
                with contextlib.suppress(Exception):
                    exec(compile(ast.Module([statement], []), name, "exec"), namespace)
                if set(wanted) <= found.keys():
                    return found
    raise LookupError(f"{lab} has no {', '.join(sorted(set(wanted) - found.keys()))} = lab.run(…)")
