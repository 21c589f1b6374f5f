"""Archives as the tests unpack them."""

import tarfile
from pathlib import Path


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Extracts plain files; Python refuses what is none from 3.11.4 on."""
    refusing = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    archive.extractall(folder, **refusing)
