"""Make a learner's own copy of the labs, or bring one up to date: `working_copy.py FOLDER`.

Labs come without their outputs, or the answers would stand under the questions. Nothing that is there is overwritten: a
lab that has changed since it was copied is put beside the learner's, as NAME-new.ipynb, once.
"""

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

LABS = Path(__file__).parents[1] / "labs"
COPIED = ".copied.json"  # in the copy: {notebook: what its cells were when it was copied}
COURSE = "start_here.ipynb"  # its table answers nothing


def text_of(path):
    """A notebook as a learner begins with it. As JSON, without nbformat: a learner's server waits for this."""
    book = json.loads(path.read_text())
    for cell in book["cells"]:
        if cell["cell_type"] == "code" and path.name != COURSE:
            cell["outputs"], cell["execution_count"] = [], None
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def _write(path, text):
    """Whole or not at all, whenever this is stopped."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text)
    os.replace(part, path)


def _beside(path):
    """The first free name beside a notebook: NAME-new, NAME-new2, …"""
    names = (path.with_name(f"{path.stem}-new{number or ''}{path.suffix}") for number in (0, *range(2, 1000)))
    return next(name for name in names if not name.exists())


def bring_up_to_date(folder):
    """Returns sentences on what was put beside the learner's own."""
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / COPIED
    copied, told = json.loads(state.read_text()) if state.exists() else {}, []
    for source in [*sorted(LABS.glob("*.ipynb")), *sorted(LABS.glob("solutions/*.ipynb"))]:
        name, text = str(source.relative_to(LABS)), text_of(source)
        now, target = hashlib.sha256(text.encode()).hexdigest(), folder / name
        if copied.get(name) == now and target.exists():
            continue
        if target.exists():
            target = _beside(target)
            told.append(f"{name} has changed since you began: the new one is {target.name}, beside yours")
        target.parent.mkdir(exist_ok=True)
        _write(target, text)
        copied[name] = now
        _write(state, json.dumps(copied, indent=1))
    shutil.copytree(LABS / "images", folder / "images", dirs_exist_ok=True)
    return told


if __name__ == "__main__":
    print("\n".join(bring_up_to_date(Path(sys.argv[1]))), end="")
