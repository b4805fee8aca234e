"""Say what this Python lacks to build zcpool in a virtual environment. Runs on any Python, however old."""

import os
import sys

MINIMUM = (3, 9)


def lacks():
    """Yield what is missing, in words that help."""
    if sys.version_info < MINIMUM:
        yield "it is too old: Python %d.%d or newer is needed; name one with PYTHON=..." % MINIMUM
        return

    import shlex
    import shutil
    import sysconfig

    try:
        import ensurepip  # noqa: F401
        import venv  # noqa: F401
    except ImportError:
        yield "it cannot make virtual environments (Debian and Ubuntu: install python3-venv)"
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.exists(header):
        yield "its C headers are missing, %s (Debian and Ubuntu: install python3-dev)" % header
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    if not shutil.which(compiler):
        yield "its C compiler is missing, %s (Debian and Ubuntu: install gcc; or name one with CC=...)" % compiler


missing = list(lacks())
for line in missing:
    sys.stderr.write("%s (Python %s): %s\n" % (sys.executable, sys.version.split()[0], line))
sys.exit(bool(missing))
