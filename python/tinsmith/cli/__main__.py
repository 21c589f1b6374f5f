"""`python -m tinsmith.cli` is the `tinsmith` command."""

import sys

from tinsmith.cli.commands import main

sys.exit(main())
