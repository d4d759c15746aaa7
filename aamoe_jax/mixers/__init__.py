"""The mixers of stacks, one file each. All files of this folder are imported, and so register their mixers."""

import importlib
import pkgutil

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")
