"""The recipes, a folder each; a folder ``recipes/`` without ``__init__.py`` elsewhere on Python's path adds its own."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
