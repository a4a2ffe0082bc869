"""What crosses the wire: the only package that imports hivemind."""

import importlib
import sys
from types import ModuleType


def _import_when_used(name: str) -> None:
    """Puts a stand-in in a module's place that imports it at the first look into it."""
    stand_in = ModuleType(name)

    def look(attribute: str) -> object:
        if attribute.startswith("__"):  # asked of every module that there is
            raise AttributeError(attribute)
        if sys.modules.get(name) is stand_in:
            del sys.modules[name]
        return getattr(importlib.import_module(name), attribute)

    stand_in.__getattr__ = look  # type: ignore[method-assign]
    sys.modules.setdefault(name, stand_in)


# hivemind imports it for its averager, which no peer uses: 0.4 s at the start of each program.
_import_when_used("scipy.optimize")
