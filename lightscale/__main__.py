"""``python -m lightscale`` is the ``lightscale`` command.

The guard matters: writers of checkpoints and loaders of data spawn processes that import this module again.
"""

import sys

from lightscale.cli import main

if __name__ == "__main__":
    sys.exit(main())
