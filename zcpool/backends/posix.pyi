from typing_extensions import Self

from zcpool._backend import Backend

__all__ = ["PosixBackend"]

class PosixBackend(Backend):
    def __new__(cls, *, huge_pages: bool = False) -> Self: ...
    @property
    def huge_pages(self) -> bool: ...
