"""Keys, values and group choices of verl's other versions, and of its trainers that are recipes here.

The kernel asks for it where a command line has something that its schema lacks. Without this folder such a thing is an
unknown key. Nothing here is imported by a command line that uses the schema's keys alone.
"""

from core.config.extensions import Extension

HERE = "core.config.verl_keys"
EXTENSION = Extension(
    name="verl_keys",
    functions={
        "read_unknown": f"{HERE}.reading:read",
        "read_refused_value": f"{HERE}.reading:read_value",
        "older_defaults": f"{HERE}.reading:older_defaults",
        "other_names": f"{HERE}.tables:described",
    },
)
