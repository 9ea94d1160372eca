"""The measured functions of a lab as its notebook sends them to run(), without running the notebook."""

import ast
import contextlib
import linecache
from pathlib import Path
from unittest.mock import MagicMock

import jupytext

LABS = Path(__file__).parents[1] / "labs"


def arms(lab, wanted, needed=()):
    """{name: (function, args, keywords)} for every `name = run(…)` in `wanted`, from the source of a lab such as "07".

    To be called in the folder of the labs, as their notebooks are.
    needed: names whose runs must really happen, since a wanted arm takes their value.
    """
    (source,) = (LABS / "source").glob(f"{lab}_*.py")
    from labsupport import run

    found = {}
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(c for c in jupytext.read(source).cells if c.cell_type == "code"):
        name = f"<lab {lab}, cell {number}>"
        linecache.cache[name] = (len(cell.source), None, cell.source.splitlines(True), name)
        for statement in ast.parse(cell.source).body:
            target = statement.targets[0].id if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name) else None

            def recorder(function, *args, **keywords):
                if target in wanted:
                    found[target] = (function, args, keywords)
                if target in needed:
                    return run(function, *args, **{**keywords, "quiet": True}).need()
                return MagicMock()

            if "run" in namespace:
                namespace.update(run=recorder, expect_oom=MagicMock(), guess=MagicMock())
            # What only shows results of runs that did not happen may fail; what defines an arm may not, or it is missing below.
            with contextlib.suppress(Exception):
                exec(compile(ast.Module([statement], []), name, "exec"), namespace)
            if set(wanted) <= found.keys():
                return found
    raise LookupError(f"lab {lab} has no {', '.join(sorted(set(wanted) - found.keys()))} = run(…)")
