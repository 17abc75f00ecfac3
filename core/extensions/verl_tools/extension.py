"""Tools and a simulated user under the names that verl's own YAML files give, for the stand-in of ``verl_classes``."""

from core.config.extensions import Extension

EXTENSION = Extension(name="verl_tools")
