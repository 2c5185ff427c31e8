"""The mark of compiled classes that classes of other modules may extend.

mypyc reads it when it compiles. At run time it does nothing, and is not needed: an engine's process may have Headway
without what Headway depends on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**attributes: bool):
        return lambda marked: marked
