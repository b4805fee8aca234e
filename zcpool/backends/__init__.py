"""Where memory comes from: the backends, by name.

``posix`` (host memory) comes with zcpool; other packages add theirs by an entry point in the group
``zcpool.backends`` or by `register`. Each backend's module is imported when it is first used.
"""

from zcpool._registry import available, names, register, unavailable

__all__ = ["available", "names", "register", "unavailable"]
