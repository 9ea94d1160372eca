"""The rules of the house, each by a tool or by reading the code: imports, private names, lengths, what a command loads."""

import ast
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "labsupport"
CODE = [path for folder in ("labsupport", "tools", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
NOTEBOOKS = sorted((ROOT / "labs").rglob("*.ipynb"))
LONGEST_FUNCTION = 60  # lines: a screen
WIDEST_CELL = 100  # columns: what JupyterLab shows at 1280 pixels beside its file browser
SPARED = "# " + "fmt:"
COLOUR = r"\"#[0-9A-Fa-f]{3,8}\"|\"(white|black|gr[ae]y|red|green|blue)\""


def short(path):
    return str(path.relative_to(ROOT))


def test_imports_go_one_way():
    """The contracts in pyproject.toml."""
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def modules_of_ours(tree):
    """{name in a file: the module of labsupport that it stands for}, and the names that are taken from modules."""
    modules, taken = {}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "labsupport":
            for alias in node.names:
                place = ROOT / (node.module.replace(".", "/") + f"/{alias.name}")
                if place.is_dir() or place.with_suffix(".py").is_file():
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                else:
                    taken.append((node.module, alias.name))
        if isinstance(node, ast.Import):
            modules |= {a.asname or a.name: a.name for a in node.names if a.name.partition(".")[0] == "labsupport"}
    return modules, taken


def private(name):
    return name.startswith("_") and not name.endswith("__")


@pytest.mark.parametrize("folder", ["labsupport", "tools", "tests"])
def test_no_private_name_crosses_a_file(folder):
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        modules, taken = modules_of_ours(tree)
        found += [f"{short(path)}: {module}.{name}" for module, name in taken if private(name)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and private(node.attr) and ast.unparse(node.value) in modules:
                found.append(f"{short(path)}:{node.lineno}: {ast.unparse(node)}")
    assert not found, "\n".join(found)


def test_tests_look_at_what_is_public():
    """No attribute of an object that is no test's own is private, but for Python's and IPython's (_ipython_display_)."""
    found = []
    for path in sorted((ROOT / "tests").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Call)) else ""
            named = isinstance(node, ast.Attribute) and private(node.attr) and not node.attr.endswith("_")
            replaced = re.match(r"monkeypatch\.setattr\(.*['.]_[a-z]\w*'", text)
            if replaced or named and not text.startswith(("self.", "sys.", "os.")):
                found.append(f"{short(path)}:{node.lineno}: {text}")
    assert not found, "\n".join(found)


def test_a_room_names_the_room_that_it_imports_from():
    """`from labsupport import run` reaches all rooms, past the contracts."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        modules, taken = modules_of_ours(ast.parse(path.read_text()))
        found += [f"{short(path)}: {name}" for module, name in taken if module == "labsupport"]
        found += [f"{short(path)}: {name}" for name, module in modules.items() if module == "labsupport"]
    assert not found, "\n".join(found)


def test_no_function_is_longer_than_a_screen():
    found = []
    for path in CODE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = node.end_lineno - node.lineno + 1
                if lines > LONGEST_FUNCTION:
                    found.append(f"{short(path)}:{node.lineno}: {node.name}() has {lines} lines")
    assert not found, "\n".join(found)


def in_cells(pattern):
    """Lines of code in notebooks that have what a pattern finds."""
    found = []
    for path in NOTEBOOKS:
        for number, cell in enumerate(nbformat.read(path, as_version=4).cells):
            lines = cell.source.splitlines() * (cell.cell_type == "code")
            found += [f"{short(path)}, cell {number}: {line}" for line in lines if re.search(pattern, line)]
    return found


def test_no_line_of_code_is_cut_in_a_notebook():
    found = in_cells(rf".{{{WIDEST_CELL + 1}}}")
    assert not found, f"{len(found)} lines:\n" + "\n".join(found)


def test_no_cell_styles_its_figure():
    """What every figure has in common is in showing/palette.py."""
    found = in_cells(r"bbox_to_anchor|\bloc=|spines|edgecolor=\"|" + COLOUR)
    assert not found, "\n".join(found)


def test_colours_are_named_in_one_place():
    """In Python; what a page of HTML adds to page.css is its own."""
    files = [path for path in CODE if ROOT / "tests" not in path.parents and path.name != "palette.py"]
    found = [f"{short(path)}: {hit[0]}" for path in files if (hit := re.search(COLOUR, path.read_text()))]
    assert not found, "\n".join(found)


def test_every_line_is_laid_out_by_the_formatter():
    found = [short(path) for path in CODE if SPARED in path.read_text()]
    assert not found, ", ".join(found)


def processor_seconds(command, **options):
    """What a process and those that it waits for take, the least of three tries."""
    least = float("inf")
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, capture_output=True, **options)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        least = min(least, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return least


def test_export_starts_at_once(tmp_path):
    """Measured: 0.14 s of processor time, 3.5 times what a bare Python takes; the bound lets no large library in."""
    off = {**os.environ, "LABSUPPORT_LEDGER": "off"}  # it loads all that it needs, and finds nothing to export
    export = ["-m", "labsupport", "export", str(tmp_path / "mine.json")]
    done = subprocess.run([sys.executable, "-X", "importtime", *export], env=off, capture_output=True, text=True)
    assert "there is nothing to export" in done.stderr
    loaded = set(re.findall(r"\| +(\w+)$", done.stderr, re.MULTILINE))
    heavy = {"matplotlib", "pandas", "numpy", "tensorflow", "ipywidgets", "IPython"}
    assert "argparse" in loaded and not loaded & heavy

    bare = processor_seconds([sys.executable, "-c", "import argparse, json"])
    assert processor_seconds([sys.executable, *export], env=off) < 7 * bare


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "data/verdicts.md",
        *(f"tools/book/pages/{path.name}" for path in (ROOT / "tools/book/pages").glob("*.md")),
    ],
)
def test_links_lead_somewhere(name):
    links = [
        link for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (ROOT / name).read_text()) if "://" not in link
    ]
    assert not [link for link in links if not ((ROOT / name).parent / link).exists()]


def test_the_workflow_file_is_one():
    path = ROOT / ".github" / "workflows" / "ci.yml"
    check = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(path)]
    told = subprocess.run(check, capture_output=True, text=True)
    assert told.returncode == 0, told.stdout
