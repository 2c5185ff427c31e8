"""The mark of compiled classes that classes of other modules may extend.

mypyc reads the mark when it compiles a class. At run time the mark does nothing, so `mypy_extensions` is not imported:
vLLM's process may run Headway's policies without Headway's dependencies.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:

    def mypyc_attr(**attributes: bool):
        return lambda marked: marked
