"""Python reads this at its start, before a script that the doctor examines: it hands over to inside.py and steps back.

The script is then run by Python itself, not by code of ours, so that nothing about it is imitated. The folder of this
file stands first in PYTHONPATH; the environment is put back as it was before the script begins.
"""

import json
import os
import sys


def _hand_over():
    settings = json.loads(os.environ.pop("LABSUPPORT_DOCTOR"))
    os.environ.pop("PYTHONPATH")
    if settings["pythonpath"] is not None:
        os.environ["PYTHONPATH"] = settings["pythonpath"]
    sys.path.remove(os.path.dirname(__file__))
    sys.path.insert(0, settings["root"])
    try:
        from labsupport.doctor import inside
    finally:
        sys.path.remove(settings["root"])
    inside.begin(settings)


try:
    _hand_over()
except Exception as error:  # then the script runs all the same, and the doctor sees nothing
    print(f"doctor: nothing can be seen of this script ({type(error).__name__}: {error})", file=sys.stderr)

_own = sys.modules.pop("sitecustomize")
try:
    import sitecustomize  # noqa: F401  one that stands behind this one
except ModuleNotFoundError as _error:
    if _error.name != "sitecustomize":
        raise
finally:
    sys.modules.setdefault("sitecustomize", _own)
