"""Check an installed zcpool against its source tree: nothing forgotten, every extension loads.

usage: python check_package.py SOURCE_TREE, with the Python that has zcpool installed and from another folder
"""

import importlib
import sys
import sysconfig
from pathlib import Path

SHIPPED = {".py", ".pyi", ".pxd", ".h", ".typed"}

source = Path(sys.argv[1]).resolve() / "zcpool"
import zcpool  # noqa: E402

installed = Path(zcpool.__file__).resolve().parent
if source == installed:
    sys.exit("this is the source tree itself, not an installed package")

missing = []
for path in sorted(source.rglob("*")):
    relative = path.relative_to(source)
    if path.suffix == ".pyx":
        wanted = relative.with_suffix(sysconfig.get_config_var("EXT_SUFFIX"))
    elif path.suffix in SHIPPED:
        wanted = relative
    else:
        continue
    if not (installed / wanted).exists():
        missing.append(str(wanted))
    elif path.suffix == ".pyx":  # some .py need what is optional
        importlib.import_module(".".join(("zcpool", *relative.with_suffix("").parts)))
if missing:
    sys.exit("not in the installed package: " + ", ".join(missing))
print(f"zcpool {zcpool.__version__} is complete in {installed}")
