"""Makes photos/, photos.csv and digits.npz again, from packages alone.

    pip install pillow==13.0.0 scikit-image==0.26.0 scikit-learn==1.9.1
    apt-get install lomiri-wallpapers-16.04
    python data/make.py

The notebooks never run this and need none of these packages: they read the
files it made. With the versions above every file comes out the same, byte
for byte. Another Pillow may bring another JPEG library: the bytes then
differ, and so may a few crops, as the size of the JPEG decides whether a
crop is kept. Another zlib may change the bytes of digits.npz, not the arrays.
"""

import csv
import io
import random
from pathlib import Path

import numpy as np
import skimage
import sklearn
from PIL import Image
from sklearn.datasets import load_digits

HERE = Path(__file__).resolve().parent
SKIMAGE = Path(skimage.__file__).parent / "data"
SKLEARN = Path(sklearn.__file__).parent / "datasets" / "images"
DEBIAN = Path("/usr/share/backgrounds")

# The place in this list is the class in photos.csv.
SOURCES = [
    ("astronaut", SKIMAGE / "astronaut.png"),
    ("cat", SKIMAGE / "chelsea.png"),
    ("coffee", SKIMAGE / "coffee.png"),
    ("rocket", SKIMAGE / "rocket.jpg"),
    ("galaxies", SKIMAGE / "hubble_deep_field.jpg"),
    ("pagoda", SKLEARN / "china.jpg"),
    ("dahlia", SKLEARN / "flower.jpg"),
    ("hills", DEBIAN / "aitzgorri_by_Aitzol_Berasategi.jpg"),
    ("fig", DEBIAN / "Picture_0B_by_freespace.jpg"),
    ("brushes", DEBIAN / "Picture_1A_by_freespace.jpg"),
    ("drum", DEBIAN / "Wine_by_Jakkub_Mede.jpg"),
    ("dogs", DEBIAN / "friends_by_Aitzol_Berasategi.jpg"),
    ("stream", DEBIAN / "life_by_Aitzol_Berasategi.jpg"),
    ("mountains", DEBIAN / "picosdeeuropa_by_Aitzol_Berasategi.jpg"),
    ("dandelion", DEBIAN / "seeding_by_Clements_Engelhardt.jpg"),
    ("sunset", DEBIAN / "sunset_by_Aitzol_Berasategi.jpg"),
]
PER_CLASS = 26
SIDES = range(96, 161, 8)  # width and height of a crop, in pixels
BYTES = range(3000, 8001)  # a smaller JPEG is mostly a flat patch
MAX_OVERLAP = 0.55  # of two crops of one photo: no near-copies


def overlap(a, b):
    """Area that boxes a and b share, over the area that they cover."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    area = sum((c[2] - c[0]) * (c[3] - c[1]) for c in (a, b))
    return width * height / (area - width * height)


def crops(path, rng):
    """PER_CLASS pairs (box, JPEG bytes) from the photo at path."""
    photo = Image.open(path).convert("RGB")
    photo.info.clear()  # Pillow would copy the comment into every crop
    # A photo is brought to 480 px first, so that a crop holds something to
    # recognise and not a few of its millions of pixels.
    scale = max(1.0, min(photo.size) / 480)
    kept = []
    while len(kept) < PER_CLASS:
        size = rng.choice(SIDES), rng.choice(SIDES)
        largest = min(photo.width / size[0], photo.height / size[1])
        zoom = rng.uniform(scale, max(scale, 0.9 * largest))
        width, height = int(size[0] * zoom), int(size[1] * zoom)
        left = rng.randrange(photo.width - width + 1)
        top = rng.randrange(photo.height - height + 1)
        box = left, top, left + width, top + height
        if any(overlap(box, other) > MAX_OVERLAP for other, _ in kept):
            continue
        file = io.BytesIO()
        crop = photo.resize(size, Image.Resampling.LANCZOS, box=box)
        crop.save(file, "JPEG", quality=85)
        if file.tell() in BYTES:
            kept.append((box, file.getvalue()))
    return kept


def make_photos():
    folder = HERE / "photos"
    folder.mkdir(exist_ok=True)
    classes = [crops(path, random.Random(name)) for name, path in SOURCES]
    with open(HERE / "photos.csv", "w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow("file class name source left top right bottom".split())
        number = 0
        # One crop of each class in turn: any run of 16 files has all classes.
        for row in zip(*classes):
            for label, (box, jpeg) in enumerate(row):
                number += 1
                name, path = SOURCES[label]
                (folder / f"{number:04}.jpg").write_bytes(jpeg)
                table.writerow([f"{number:04}.jpg", label, name, path.name, *box])


def make_digits():
    digits = load_digits()
    np.savez_compressed(
        HERE / "digits.npz",
        images=digits.images.astype(np.uint8),
        labels=digits.target.astype(np.uint8),
    )


def main():
    make_photos()
    make_digits()


if __name__ == "__main__":
    main()
