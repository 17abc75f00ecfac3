"""Small copies of the pictures of validation questions, a file of the run that its report shows."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from core.files import write_atomic
from core.vision.images import Pictures

log = logging.getLogger(__name__)


def keep_thumbnails(path: Path, media: Mapping[tuple[str, str], Pictures]) -> None:
    """Add the thumbnails of questions to those of earlier validations, which mostly have the same ones.

    ``media`` maps a question's data source and uid to its pictures. Raises OSError.
    """
    known = read_thumbnails(path)
    new = [(source, uid) for source, uid in media if uid not in known.get(source, {})]
    for source, uid in new:
        known.setdefault(source, {})[uid] = media[source, uid].thumbnails()
    if new:
        write_atomic(path, json.dumps(known) + "\n")


def read_thumbnails(path: Path) -> dict[str, dict[str, Any]]:
    """Return data source -> uid -> thumbnails that are kept; none of a damaged file, which the next ones replace."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        return known if all(isinstance(value, dict) for value in known.values()) else {}
    except FileNotFoundError:
        return {}
    except (ValueError, AttributeError) as error:
        log.warning("%s is damaged (%s): written anew", path, error)
        return {}
