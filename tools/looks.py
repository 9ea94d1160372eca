"""Screenshots of the committed labs as JupyterLab shows them: `make looks [NAMES=NAME]` fills build/looks/.

For a person to look at: light and dark, at 1280 pixels and at the 1024 of an old projector.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from browser import ROOT, THEMES, jupyterlab, open_notebook, open_page, set_theme

WIDTHS = (1280, 1024)
HEIGHT = 4000


def photograph(page, target, name):
    """Both themes and widths of the notebook that is open, from top to bottom; returns the number of pictures."""
    taken = 0
    panel = page.locator(".jp-WindowedPanel-outer")
    for theme in THEMES:
        set_theme(page, theme)
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": HEIGHT})
            for part in range(panel.evaluate("panel => Math.ceil(panel.scrollHeight / panel.clientHeight)")):
                panel.evaluate("(panel, part) => panel.scrollTo(0, part * panel.clientHeight)", part)
                page.wait_for_timeout(300)  # scrolled and drawn
                page.screenshot(path=target / f"{name}-{theme}-{width}-{part + 1}.png")
                taken += 1
    return taken


def main():
    target = ROOT / "build" / "looks"
    target.mkdir(parents=True, exist_ok=True)
    labs = [lab for lab in sorted((ROOT / "labs").glob("*.ipynb")) if not sys.argv[1:] or lab.stem in sys.argv[1:]]
    taken = 0
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "labs" / "images", Path(folder) / "labs" / "images")
        for lab in labs:  # copies, so that nothing is saved into the committed ones
            shutil.copy(lab, Path(folder) / "labs")
        with jupyterlab(Path(folder)) as server, open_page(server) as page:
            for number, lab in enumerate(labs, 1):
                print(f"{number} of {len(labs)}: {lab.stem}", flush=True)
                open_notebook(page, server, Path(folder), lab.name)
                taken += photograph(page, target, lab.stem)
    print(f"{target.relative_to(ROOT)}: {taken} pictures")


if __name__ == "__main__":
    main()
