"""``python -m results.report RUN [RUN ...]``: a report of runs, side by side, as Markdown and one HTML page."""

import sys

from results.reporting.run_report import main

if __name__ == "__main__":
    sys.exit(main())
