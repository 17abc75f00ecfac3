"""Whether a command only checks its input. Servers and tools read this without importing core."""

import os


def is_dry_run() -> bool:
    """Return whether DRY_RUN in the environment requests a check that starts nothing."""
    return os.environ.get("DRY_RUN", "").lower() not in ("", "0", "false", "no")
