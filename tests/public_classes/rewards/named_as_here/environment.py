"""A module with the name of a folder of this repository, as projects keep their settings in."""

POINTS = 0.5
