"""The public names of `tools/xray/`. The module itself can be called: `minddp.xray(ddp)` is `XRay(ddp)`."""

import importlib
import sys
from types import ModuleType
from typing import Any

from minddp.tools.xray.recording import Recording
from minddp.tools.xray.result import Result, load
from minddp.tools.xray.xray import XRay

__all__ = ["Recording", "Result", "XRay", "load"]


class _CallableModule(ModuleType):
    """`minddp.xray` is a module, so that names can be imported from it, and there can be only one `minddp.xray`."""

    def __call__(self, *args: Any, **kwargs: Any) -> XRay:
        return XRay(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return importlib.import_module, (self.__name__,)


sys.modules[__name__].__class__ = _CallableModule
