"""Pictures of Fashion-MNIST: photos of clothes, 28 × 28 grey pixels, of ten named classes.

The package has 1,800 of its 70,000, in pictures/, in the data set's own format (IDX, gzipped): of
the five classes that `tinsmith demo --images` teaches, the first 240 of each in the training set
and the first 80 in the test set; of the five that its model knows, the first 40 in the test set.
Their licence is pictures/LICENSE. They were selected from Debian's package dataset-fashion-mnist by

    python -m tinsmith.demo.fashion select /usr/share/datasets/fashion-mnist

As a data set for the cookbook's vlm_classifier, which looks for it in the folder that it is started
in, those of the first five classes are written by

    python -m tinsmith.demo.fashion dataset FOLDER
"""

import argparse
import gzip
import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

FOLDER = Path(__file__).parent / "pictures"
SIDE = 28
NAMES = (
    "t-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag",
    "ankle boot",
)  # fmt: skip
KNOWN = ("trouser", "dress", "sandal", "bag", "ankle boot")  # to the demonstration's model
NEW = tuple(name for name in NAMES if name not in KNOWN)
TRAIN, TEST = "train", "t10k"
# How many of each class the package has.
SELECTED = {TRAIN: dict.fromkeys(NEW, 240), TEST: dict.fromkeys(NEW, 80) | dict.fromkeys(KNOWN, 40)}
# A file's beginning says that it has bytes, and how many axes.
IMAGES_MAGIC, LABELS_MAGIC = 0x803, 0x801


@dataclass(frozen=True)
class Pictures:
    """Pictures and their labels, which are places in NAMES."""

    pixels: NDArray[np.uint8]  # (N, 28, 28): 0 is the ground, 255 the lightest cloth
    labels: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def names(self) -> list[str]:
        """The name of each one's class."""
        return [NAMES[label] for label in self.labels]

    def take(self, places: Sequence[int] | NDArray[np.intp]) -> "Pictures":
        """Those at some places, in that order."""
        return Pictures(self.pixels[places], self.labels[places])

    def of(self, names: Sequence[str]) -> "Pictures":
        """Those of some classes."""
        return self.take(np.flatnonzero(np.isin(self.labels, [NAMES.index(one) for one in names])))

    def files(self) -> list[bytes]:
        """Each as a PNG file."""
        from PIL import Image

        found = []
        for pixels in self.pixels:
            out = io.BytesIO()
            Image.fromarray(pixels).save(out, "png")
            found.append(out.getvalue())
        return found


def read(side: str, folder: Path = FOLDER) -> Pictures:
    """The pictures of one side, TRAIN or TEST, of a folder with the data set's files."""
    image_file, label_file = _files(folder, side)
    content = gzip.decompress(image_file.read_bytes())
    magic, count, high, wide = struct.unpack_from(">4I", content)
    if (magic, high, wide) != (IMAGES_MAGIC, SIDE, SIDE):
        raise ValueError(f"{image_file} should have pictures of {SIDE} × {SIDE} bytes")
    pixels = np.frombuffer(content, np.uint8, offset=16).reshape(count, SIDE, SIDE)
    content = gzip.decompress(label_file.read_bytes())
    if struct.unpack_from(">2I", content) != (LABELS_MAGIC, count):
        raise ValueError(f"{label_file} should have {count} labels")
    return Pictures(pixels, np.frombuffer(content, np.uint8, offset=8))


def write(side: str, pictures: Pictures, folder: Path) -> None:
    """Writes the files of one side; the same pictures are the same bytes."""
    image_file, label_file = _files(folder, side)
    count = len(pictures)
    head = struct.pack(">4I", IMAGES_MAGIC, count, SIDE, SIDE)
    image_file.write_bytes(gzip.compress(head + pictures.pixels.tobytes(), 9, mtime=0))
    head = struct.pack(">2I", LABELS_MAGIC, count)
    label_file.write_bytes(gzip.compress(head + pictures.labels.tobytes(), 9, mtime=0))


def _files(folder: Path, side: str) -> tuple[Path, Path]:
    return folder / f"{side}-images-idx3-ubyte.gz", folder / f"{side}-labels-idx1-ubyte.gz"


# ---- commands ----


def select(source: Path, folder: Path = FOLDER) -> None:
    """Writes the package's pictures, from the whole data set."""
    for side, counts in SELECTED.items():
        whole = read(side, source)
        places = [
            np.flatnonzero(whole.labels == NAMES.index(name))[:count]
            for name, count in counts.items()
        ]
        write(side, whole.take(np.sort(np.concatenate(places))), folder)


def write_dataset(folder: Path) -> Path:
    """Writes the new classes' pictures as the recipe's data set; returns its folder."""
    import datasets

    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(NEW))}
    place = folder / "dpdl-benchmark" / "caltech101" / "data"
    place.mkdir(parents=True, exist_ok=True)
    datasets.disable_progress_bars()
    for side, name in ((TRAIN, "train"), (TEST, "test")):
        pictures = read(side).of(NEW)
        columns = {
            "image": [{"bytes": file, "path": None} for file in pictures.files()],
            "label": [NEW.index(one) for one in pictures.names],
        }
        rows = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
        rows.to_parquet(str(place / f"{name}-00000-of-00001.parquet"))
    return place.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("select", "dataset"))
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.command == "select":
        select(options.folder)
    else:
        print(f"The recipe's data set is {write_dataset(options.folder)}")


if __name__ == "__main__":
    main()
