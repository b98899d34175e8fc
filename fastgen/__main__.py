"""`python -m fastgen` says whether this installation accelerates, then versions, patches and operators.

Exit status: 0 where it accelerates, 1 where it does not.
"""

import sys

import fastgen
from fastgen import selfcheck

if __name__ == "__main__":
    # The check imports Transformers, so that patches are applied: the status shows whether they fit.
    line, accelerates = selfcheck.line()
    print(line, fastgen.status(), sep="\n\n")
    sys.exit(not accelerates)
