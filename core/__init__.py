"""What two recipes share: one trainer, and the packages that its loop goes through (README.md beside this file)."""

from core.requirements_check import explain_failed_imports

explain_failed_imports()
