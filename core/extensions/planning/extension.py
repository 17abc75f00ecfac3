"""See the README of core for what this folder holds."""

from core.config.extensions import Extension

EXTENSION = Extension(name="planning")
