# What Cython code cimports: from zcpool cimport Pool, Buffer
from zcpool._backend cimport Backend
from zcpool._buffer cimport Buffer
from zcpool._fence cimport Fence
from zcpool._pool cimport Pool
