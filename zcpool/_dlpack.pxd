# DLPack: a one-dimensional uint8 tensor over a block.
#
# Layouts: dlpack.h 1.0 (dmlc/dlpack). The deleter may run on any thread, without the GIL, after the Buffer and
# even the Pool are gone: it holds a reference of the block, and nothing of Python.
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free

from zcpool._block cimport Block, block_ref, block_unref

cdef enum:
    DL_CPU = 1
    DL_UINT = 1
    DL_MAJOR = 1
    DL_MINOR = 0
    DL_IS_COPIED = 2


cdef struct DLDevice:
    int32_t device_type
    int32_t device_id

cdef struct DLDataType:
    uint8_t code
    uint8_t bits
    uint16_t lanes

cdef struct DLTensor:
    void* data
    DLDevice device
    int32_t ndim
    DLDataType dtype
    int64_t* shape
    int64_t* strides
    uint64_t byte_offset

cdef struct DLManagedTensor:
    DLTensor tensor
    void* context
    void (*deleter)(DLManagedTensor* self) noexcept nogil

cdef struct DLManagedTensorVersioned:
    uint32_t major
    uint32_t minor
    void* context
    void (*deleter)(DLManagedTensorVersioned* self) noexcept nogil
    uint64_t flags
    DLTensor tensor

cdef struct Export:
    DLManagedTensor old
    DLManagedTensorVersioned versioned
    int64_t shape
    int64_t stride
    Block* block


cdef inline void export_end(Export* e) noexcept nogil:
    if e.block != NULL:
        block_unref(e.block)
    free(e)

cdef inline void delete_old(DLManagedTensor* t) noexcept nogil:
    export_end(<Export*>t.context)

cdef inline void delete_versioned(DLManagedTensorVersioned* t) noexcept nogil:
    export_end(<Export*>t.context)

cdef inline void capsule_end(object capsule) noexcept:
    # A consumer renames the capsule; one that still has its name was never consumed.
    if PyCapsule_IsValid(capsule, "dltensor"):
        delete_old(<DLManagedTensor*>PyCapsule_GetPointer(capsule, "dltensor"))
    elif PyCapsule_IsValid(capsule, "dltensor_versioned"):
        delete_versioned(<DLManagedTensorVersioned*>PyCapsule_GetPointer(capsule, "dltensor_versioned"))

cdef inline void tensor_fill(DLTensor* t, Export* e, void* data) noexcept:
    t.data = data
    t.device.device_type = DL_CPU
    t.ndim = 1
    t.dtype.code = DL_UINT
    t.dtype.bits = 8
    t.dtype.lanes = 1
    t.shape = &e.shape
    t.strides = &e.stride

cdef inline object dlpack_capsule(Block* block, uint64_t owner, uint64_t nbytes, bint versioned, bint copied):
    """Return a capsule; `block` may be NULL (an empty buffer). Raises BufferError when the owner is gone."""
    cdef void* data = NULL if block == NULL else block.data     # dlpack.h: NULL when there are no elements
    cdef Export* e = <Export*>calloc(1, sizeof(Export))
    if e == NULL:
        raise MemoryError()
    if block != NULL:
        if not block_ref(block, owner):
            free(e)
            raise BufferError("the buffer was released, or a million views of it live")
        e.block = block
    e.shape = <int64_t>nbytes
    e.stride = 1
    tensor_fill(&e.old.tensor, e, data)
    tensor_fill(&e.versioned.tensor, e, data)
    e.old.context = e.versioned.context = e
    e.old.deleter = delete_old
    e.versioned.deleter = delete_versioned
    e.versioned.major = DL_MAJOR
    e.versioned.minor = DL_MINOR
    e.versioned.flags = DL_IS_COPIED if copied else 0
    try:
        if versioned:
            return PyCapsule_New(&e.versioned, "dltensor_versioned", <void (*)(object) noexcept>capsule_end)
        return PyCapsule_New(&e.old, "dltensor", <void (*)(object) noexcept>capsule_end)
    except BaseException:
        export_end(e)
        raise
