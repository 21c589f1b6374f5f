"""The wire's protobuf messages: the SDK's own file of them, without importing the SDK.

`import tinker` imports torch and takes seconds; its messages need only protobuf, so a server starts
without it. A process that has both has each message once: protobuf keeps one class for a
description, however often its file is executed.
"""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinsmith.system.install_hints import pip_install

if TYPE_CHECKING:
    from tinker.proto import tinker_public_pb2 as pb
else:

    def _load() -> Any:
        known = sys.modules.get("tinker.proto.tinker_public_pb2")
        if known is not None:
            return known
        package = find_spec("tinker")  # found, not imported
        if package is None or not package.submodule_search_locations:
            raise ImportError(f"the server needs tinker: {pip_install('server')}")
        file = Path(package.submodule_search_locations[0]) / "proto" / "tinker_public_pb2.py"
        spec = spec_from_file_location("tinker_public_pb2", file)
        assert spec is not None and spec.loader is not None
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    pb = _load()

__all__ = ["pb"]
