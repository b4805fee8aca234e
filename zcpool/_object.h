/* What Cython's own code for a Buffer costs too much for: making one, taking it back, and the way to the four
 * methods that are called for every frame. See _buffer.pyx and _pool.pyx. */
#ifndef ZC_OBJECT_H
#define ZC_OBJECT_H

#include "_atomics.h"
#include <Python.h>

/* Replaces the C function behind a method that takes arguments as an array and a tuple of keywords; returns the
 * one that was there, or NULL (and changes nothing) where the method is not of that kind. */
static inline void *zc_method_replace(PyObject *type, const char *name, void *function)
{
    PyObject *descriptor = PyDict_GetItemString(((PyTypeObject *)type)->tp_dict, name); /* borrowed */
    void *was;
    PyMethodDef *def;
    if (!descriptor || Py_TYPE(descriptor) != &PyMethodDescr_Type)
        return NULL;
    def = ((PyMethodDescrObject *)descriptor)->d_method;
    if (def->ml_flags != (METH_FASTCALL | METH_KEYWORDS))
        return NULL;
    was = (void *)def->ml_meth;
    def->ml_meth = (PyCFunction)function;
    return was;
}

/* The same for an object's end; returns what was there. Dead objects are kept by the new one under the GIL, and are
 * not of types that live on the heap, whose references they would count: elsewhere nothing is replaced. */
static inline destructor zc_dealloc_replace(PyObject *type, destructor function)
{
    destructor was = ((PyTypeObject *)type)->tp_dealloc;
#ifndef Py_GIL_DISABLED
    if (!(((PyTypeObject *)type)->tp_flags & Py_TPFLAGS_HEAPTYPE))
        ((PyTypeObject *)type)->tp_dealloc = function;
#endif
    return was;
}

/* What every deallocator does first. */
static inline void zc_object_leave(PyObject *o)
{
    PyObject_GC_UnTrack(o);
    if (ZC_UNLIKELY(*(PyObject **)((char *)o + Py_TYPE(o)->tp_weaklistoffset) != NULL))
        PyObject_ClearWeakRefs(o);
}

/* Gives an object that had died another life, of a static type with garbage collection. */
static inline PyObject *zc_object_revive(PyObject *o, PyObject *type)
{
    (void)PyObject_Init(o, (PyTypeObject *)type);
    PyObject_GC_Track(o);
    return o;
}

#endif
