"""What the notebooks of the lab share: run a function under a memory budget, measure it, compare, judge.

Names are loaded on first use, so that the child process of an arm, which needs only the ground floor, does not pay
for matplotlib and ipywidgets.
"""

from importlib import import_module

_HOME = {
    "ground.budget": ("parse_size", "BudgetError", "NO_ONEDNN"),
    "ground.meter": ("phase", "reading"),
    "ground.folders": ("ArmSetupError", "working_folder"),
    "ground.result": ("ArmResult", "expect_oom", "expect_finished"),
    "showing.running": ("run", "measure"),
    "showing.comparison": ("compare",),
    "showing.apart": ("take_apart",),
    "showing.palette": ("COLOURS", "LINES", "BUDGET_LINE", "legend_below"),
    "fits.prediction": ("predict",),
    "fits.plan": ("plan",),
    "fits.lowered": ("CannotPredict",),
    "lesson.predict": ("tensor_mib", "predicted_vs_measured"),
    "lesson.guessing": ("guess",),
    "lesson.claims": ("verdict",),
    "lesson.isolation": ("isolated", "beside"),
    "lesson.capstone": ("script_functions", "Judge"),
    "lesson.course": ("load_tensorflow", "explore", "choose", "note"),
    "doctor.checks": ("memory_budget", "assert_no_growth"),
    "doctor.magic": ("load_ipython_extension",),
    "learner.guide": ("find_lab", "reading_paths"),
    "learner.standing": ("progress", "guesses"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}
__all__ = sorted(_MODULE_OF)


def __getattr__(name):
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'labsupport' has no attribute {name!r}; it offers {', '.join(__all__)}")
    return getattr(import_module(f"labsupport.{_MODULE_OF[name]}"), name)
