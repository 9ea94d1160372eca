"""The map of labsupport in CONTRIBUTING.md, drawn from the imports: `python tools/map.py [--check]`.

Rooms and files come in the order in which they build on each other, each file with the first line of its docstring.
"""

import argparse
import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGE = "labsupport"
BEGIN, END = "<!-- map: made by tools/map.py -->", "<!-- end of map -->"


def first_line(file):
    """The first line of a file's docstring."""
    return ast.get_docstring(ast.parse(file.read_text())).splitlines()[0]


def in_order(uses):
    """The keys of {name: names it uses}, each after what it uses; otherwise by the alphabet. Raises CycleError."""
    sorter, order = TopologicalSorter(uses), []
    sorter.prepare()
    while sorter.is_active():
        ready = sorted(sorter.get_ready())
        order += ready
        sorter.done(*ready)
    return [name for name in order if name in uses]


def drawn():
    """The map as Markdown: a table a room, with what each of its files imports, another room by its name alone."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    imports = {}  # {room: {file: {(room, file) that it imports}}}
    for module in graph.modules:
        room, _, file = module.removeprefix(f"{PACKAGE}.").partition(".")
        if file:
            found = (name.split(".")[1:] for name in graph.find_modules_directly_imported_by(module))
            imports.setdefault(room, {})[file] = {tuple(parts) for parts in found if len(parts) == 2}
    rooms = {room: {other for used in files.values() for other, _ in used} - {room} for room, files in imports.items()}
    lines = []
    for room in in_order(rooms):
        above = f" Imports from {', '.join(sorted(rooms[room]))}." if rooms[room] else ""
        lines += [f"**{room}/** {first_line(ROOT / PACKAGE / room / '__init__.py')}{above}", ""]
        lines += ["| file | what | imports |", "|---|---|---|"]
        beside = {file: {other for place, other in used if place == room} for file, used in imports[room].items()}
        for file in in_order(beside):
            used = sorted(beside[file]) + sorted({f"{place}/" for place, _ in imports[room][file]} - {f"{room}/"})
            what = first_line(ROOT / PACKAGE / room / f"{file}.py").replace("|", r"\|")
            lines.append(f"| `{file}.py` | {what} | {', '.join(used)} |")
        lines.append("")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the map is another one")
    options = parser.parse_args()
    guide = ROOT / "CONTRIBUTING.md"
    old = guide.read_text()
    before, rest = old.split(BEGIN)
    new = f"{before}{BEGIN}\n{drawn()}{END}{rest.split(END)[1]}"
    if options.check and new != old:
        sys.exit("the map of labsupport in CONTRIBUTING.md is not what the imports say: run `python tools/map.py`")
    guide.write_text(new)


if __name__ == "__main__":
    main()
