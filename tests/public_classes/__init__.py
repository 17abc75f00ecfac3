"""Files of the kinds that people write for verl, and what becomes of each here.

``rewards/``, ``tools/`` and ``interactions/`` mirror the kinds of a hundred public files, and were written anew.
``python -m tests.public_classes`` loads each as a run does, scores two answers with it or plays an episode, and prints
what came of it.
"""
