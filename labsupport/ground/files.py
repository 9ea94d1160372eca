"""Where the data files are: in the package when it was installed from a wheel, in the repository's data/ otherwise."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def data_file(name):
    """The path of a data file such as "claims.toml". Raises FileNotFoundError with where it was looked for."""
    places = [_PACKAGE / "data" / name, _PACKAGE.parent / "data" / name]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        f"labsupport's own file {name} is missing; it was looked for at {' and '.join(map(str, places))}: install labsupport again"
    )
