"""``python -m core.plan RECIPE key=value ... --gpu H100``: memory, time and disk of a run before it starts."""

import sys

from core.planning.estimate import main

if __name__ == "__main__":
    sys.exit(main())
