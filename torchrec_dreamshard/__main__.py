"""``python -m torchrec_dreamshard``: the same as the ``dreamshard`` command."""

import sys

from torchrec_dreamshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
