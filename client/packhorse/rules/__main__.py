"""``python -m packhorse.rules > docs/rules.md``."""

import sys

from packhorse.rules.document import page

sys.stdout.write(page())
