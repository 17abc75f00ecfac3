"""The root of a project whose reward function imports the project's package."""
