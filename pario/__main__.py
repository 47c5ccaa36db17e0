"""python -m pario"""

import sys

from pario.cli import main

if __name__ == "__main__":
    sys.exit(main())
