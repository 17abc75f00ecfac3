"""How tool calls are written and answered, for the loops of ``tools`` and ``environments``. It adds no key."""

from core.config.extensions import Extension

EXTENSION = Extension(name="call_formats")
