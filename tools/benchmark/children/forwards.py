"""`ramstream` whose passes take their units in the order of the files, the second as well.

python forwards.py WORDS...
"""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from ramstream import cli
from ramstream.engine import merging
from ramstream.engine.passes import run_pass


def forwards(title: str, books: Any, units: Sequence[int], *rest: Any) -> None:
    run_pass(title, books, sorted(units), *rest)


with patch.object(merging, "run_pass", forwards):
    cli.main()
