"""Where the files beside the code are: the data in the package or in the repository, the notebooks only in the repository."""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def data_file(name):
    """The path of a data file such as "claims.toml": in the package when it was installed from a wheel, in data/ otherwise.

    Raises FileNotFoundError with where it was looked for.
    """
    places = [_PACKAGE / "data" / name, _PACKAGE.parent / "data" / name]
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        f"labsupport's own file {name} is missing; it was looked for at {' and '.join(map(str, places))}: install labsupport again"
    )


def notebook_file(name):
    """The path of a lab such as "09_leaks_over_epochs"; None where labsupport was installed without the repository."""
    place = _PACKAGE.parent / "labs" / f"{name}.ipynb"
    return place if place.is_file() else None
