"""Files that are there whole or not at all: written aside and renamed into place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace ``path`` by ``content``; a kill or a full disk half-way through leaves what was there."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def replace_folder(aside: Path, target: Path) -> None:
    """Rename the whole folder ``aside`` to ``target``; a folder of that name moves away first and is then removed."""
    old = target.with_name(f".{target.name}.old-{os.getpid()}")
    shutil.rmtree(old, ignore_errors=True)
    if target.exists():
        os.rename(target, old)
    os.rename(aside, target)
    shutil.rmtree(old, ignore_errors=True)
