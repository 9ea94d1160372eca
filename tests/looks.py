"""Screenshots of the committed labs as JupyterLab shows them: `python tests/looks.py [NAME ...]` fills build/looks/.

For a person to look at: light and dark, at 1280 pixels and at the 1024 of an old projector.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from browser import ROOT, THEMES, jupyterlab, open_notebook, open_page, set_theme

WIDTHS = (1280, 1024)
TALLEST = 16_000  # pixels; Chromium draws no taller picture


def photograph(page, target, name):
    """Both themes and widths of the notebook that is open, each whole in one picture; a very long one ends early."""
    for theme in THEMES:
        set_theme(page, theme)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            inside = page.locator(".jp-WindowedPanel-outer").evaluate("panel => panel.scrollHeight - panel.clientHeight")
            page.set_viewport_size({"width": width, "height": min(900 + inside, TALLEST)})
            page.wait_for_timeout(500)  # resized and drawn
            page.screenshot(path=target / f"{name}-{theme}-{width}.png")


def main():
    target = ROOT / "build" / "looks"
    target.mkdir(parents=True, exist_ok=True)
    labs = [lab for lab in sorted((ROOT / "labs").glob("[0-9]*.ipynb")) if not sys.argv[1:] or lab.stem in sys.argv[1:]]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "labs").mkdir()
        for lab in labs:  # copies, so that nothing is saved into the committed ones
            shutil.copy(lab, Path(folder) / "labs")
        with jupyterlab(Path(folder)) as server, open_page(server) as page:
            for number, lab in enumerate(labs, 1):
                print(f"{number} of {len(labs)}: {lab.stem}", flush=True)
                open_notebook(page, server, Path(folder), lab.name)
                photograph(page, target, lab.stem)
    print(f"{target.relative_to(ROOT)}: {len(labs) * len(THEMES) * len(WIDTHS)} pictures")


if __name__ == "__main__":
    main()
