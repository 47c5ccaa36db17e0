"""On the path of a recording run: every Python process of it, also those that tests start, notes which lines it ran.

The note says for which test: PARIO_MUTANTS_TEST, which plugin.py sets.
"""

import os

if os.environ.get("COVERAGE_PROCESS_START"):
    import coverage

    coverage.process_startup()
