"""`python -m molflt`."""

import sys

from molflt.cli import main

sys.exit(main())
