"""``python -m core.export RUN_OR_CHECKPOINT OUT``: a checkpoint's policy as a Hugging Face folder."""

import sys

from core.learner.hf_export import main

if __name__ == "__main__":
    sys.exit(main())
