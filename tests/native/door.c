/* zcpool.h, function by function, for tests in Python: every call is made with the GIL, or after the module was
 * told so by without_gil(True), without it. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include "zcpool.h"
#include "zcpool.h" /* twice is as good as once */

static const zc_api *api;
static int gil_is_left;

#define CALL(expression)                                         \
    do {                                                         \
        PyThreadState *left = gil_is_left ? PyEval_SaveThread() : NULL; \
        expression;                                              \
        if (left)                                                \
            PyEval_RestoreThread(left);                          \
    } while (0)

typedef unsigned long long u64;

static PyObject *describe(const zc_block *b)
{
    if (!b)
        Py_RETURN_NONE;
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:i,s:K}", "token", (u64)zc_token(b), "data", (u64)(uintptr_t)b->data,
                         "nbytes", (u64)b->nbytes, "capacity", (u64)b->capacity, "block", (u64)(uintptr_t)b, "bucket",
                         (int)b->bucket, "index", (u64)zc_index(b));
}

static PyObject *without_gil(PyObject *self, PyObject *flag)
{
    (void)self;
    gil_is_left = PyObject_IsTrue(flag);
    Py_RETURN_NONE;
}

static PyObject *acquire(PyObject *self, PyObject *args)
{
    u64 pool, nbytes;
    const zc_block *b;
    (void)self;
    if (!PyArg_ParseTuple(args, "KK", &pool, &nbytes))
        return NULL;
    CALL(b = api->acquire(pool, (size_t)nbytes));
    return describe(b);
}

static PyObject *acquire_with(PyObject *self, PyObject *args)
{
    u64 pool, nbytes, alignment;
    int flags;
    long long timeout;
    const zc_block *b;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKKiL", &pool, &nbytes, &alignment, &flags, &timeout))
        return NULL;
    CALL(b = api->acquire_with(pool, (size_t)nbytes, (size_t)alignment, flags, timeout));
    return describe(b);
}

static PyObject *acquire_fast(PyObject *self, PyObject *args)
{
    u64 cache, pool, nbytes;
    const zc_block *b;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKK", &cache, &pool, &nbytes))
        return NULL;
    CALL(b = zc_acquire_fast(api, (zc_cache *)(uintptr_t)cache, pool, (size_t)nbytes));
    return describe(b);
}

static PyObject *release_fast(PyObject *self, PyObject *args)
{
    u64 cache, block;
    int result;
    (void)self;
    if (!PyArg_ParseTuple(args, "KK", &cache, &block))
        return NULL;
    CALL(result = zc_release_fast(api, (zc_cache *)(uintptr_t)cache, (const zc_block *)(uintptr_t)block));
    return PyLong_FromLong(result);
}

static PyObject *release_after(PyObject *self, PyObject *args)
{
    u64 token;
    int fd, result;
    (void)self;
    if (!PyArg_ParseTuple(args, "Ki", &token, &fd))
        return NULL;
    CALL(result = api->release_after(token, fd));
    return PyLong_FromLong(result);
}

#define OF_TOKEN(name)                                           \
    static PyObject *name(PyObject *self, PyObject *arg)         \
    {                                                            \
        u64 token = PyLong_AsUnsignedLongLong(arg);              \
        int result;                                              \
        (void)self;                                              \
        if (PyErr_Occurred())                                    \
            return NULL;                                         \
        CALL(result = api->name(token));                         \
        return PyLong_FromLong(result);                          \
    }
OF_TOKEN(release)
OF_TOKEN(pin)
OF_TOKEN(unpin)

static PyObject *pin_often(PyObject *self, PyObject *args)
{
    u64 token, i;
    unsigned long done = 0, count;
    (void)self;
    if (!PyArg_ParseTuple(args, "Kk", &token, &count))
        return NULL;
    CALL(for (i = 0; i < count && api->pin(token) == 0; i++) done++);
    return PyLong_FromUnsignedLong(done);
}

static PyObject *unpin_often(PyObject *self, PyObject *args)
{
    u64 token, i;
    unsigned long done = 0, count;
    (void)self;
    if (!PyArg_ParseTuple(args, "Kk", &token, &count))
        return NULL;
    CALL(for (i = 0; i < count && api->unpin(token) == 0; i++) done++);
    return PyLong_FromUnsignedLong(done);
}

static PyObject *sync_(PyObject *self, PyObject *args)
{
    u64 token;
    int direction, result;
    (void)self;
    if (!PyArg_ParseTuple(args, "Ki", &token, &direction))
        return NULL;
    CALL(result = api->sync(token, direction));
    return PyLong_FromLong(result);
}

static PyObject *find(PyObject *self, PyObject *arg)
{
    u64 token = PyLong_AsUnsignedLongLong(arg);
    const zc_block *b;
    (void)self;
    if (PyErr_Occurred())
        return NULL;
    CALL(b = api->find(token));
    return describe(b);
}

static PyObject *place(PyObject *self, PyObject *arg)
{
    u64 token = PyLong_AsUnsignedLongLong(arg);
    zc_place p;
    int result;
    (void)self;
    if (PyErr_Occurred())
        return NULL;
    CALL(result = api->place(token, &p));
    if (result)
        Py_RETURN_NONE;
    return Py_BuildValue("{s:i,s:K,s:K,s:K}", "fd", p.fd, "offset", (u64)p.offset, "region_bytes",
                         (u64)p.region_bytes, "region_data", (u64)(uintptr_t)p.region_data);
}

static PyObject *stats(PyObject *self, PyObject *arg)
{
    u64 pool = PyLong_AsUnsignedLongLong(arg);
    zc_stats s;
    int result;
    (void)self;
    if (PyErr_Occurred())
        return NULL;
    CALL(result = api->stats(pool, &s));
    if (result)
        Py_RETURN_NONE;
#define FIELD(name) #name, (u64)s.name
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", FIELD(in_use_bytes),
                         FIELD(in_use_blocks), FIELD(cached_bytes), FIELD(cached_blocks), FIELD(retired_bytes),
                         FIELD(retired_blocks), FIELD(slack_bytes), FIELD(reserved_bytes), FIELD(handles),
                         FIELD(acquires), FIELD(misses), FIELD(failures), FIELD(backend_allocations),
                         FIELD(backend_frees));
}

static PyObject *trim(PyObject *self, PyObject *args)
{
    u64 pool, keep;
    size_t given;
    (void)self;
    if (!PyArg_ParseTuple(args, "KK", &pool, &keep))
        return NULL;
    CALL(given = api->trim(pool, (size_t)keep));
    return PyLong_FromSize_t(given);
}

static PyObject *error(PyObject *self, PyObject *unused)
{
    (void)self, (void)unused;
    return PyUnicode_FromString(api->error());
}

static PyObject *cache(PyObject *self, PyObject *arg)
{
    u64 pool = PyLong_AsUnsignedLongLong(arg);
    zc_cache *c;
    (void)self;
    if (PyErr_Occurred())
        return NULL;
    CALL(c = api->cache(pool));
    return PyLong_FromUnsignedLongLong((u64)(uintptr_t)c);
}

/* Whether a thread's cache holds a block, and whether it keeps to its bound. */
static PyObject *keeps(PyObject *self, PyObject *args)
{
    u64 cache, pool, nbytes, held = 0;
    const zc_cache *c;
    zc_block *b;
    (void)self;
    if (!PyArg_ParseTuple(args, "KKK", &cache, &pool, &nbytes))
        return NULL;
    c = (const zc_cache *)(uintptr_t)cache;
    for (int i = 0; i < ZC_CACHED_CLASSES; i++) {
        const zc_slot *s = &c->slots[i];
        b = s->hot > ZC_SHUT ? s->hot : s->head;
        held += b ? b->capacity * (s->count + (s->hot > ZC_SHUT)) : 0;
    }
    b = zc_cache_take((zc_cache *)(uintptr_t)cache, pool, (size_t)nbytes, ZC_HELD);
    if (b)
        zc_release_fast(api, (zc_cache *)(uintptr_t)cache, b);
    return Py_BuildValue("NK", PyBool_FromLong(b != NULL), held);
}

static PyMethodDef methods[] = {
    {"without_gil", without_gil, METH_O, NULL},   {"acquire", acquire, METH_VARARGS, NULL},
    {"acquire_with", acquire_with, METH_VARARGS, NULL}, {"acquire_fast", acquire_fast, METH_VARARGS, NULL},
    {"release_fast", release_fast, METH_VARARGS, NULL}, {"release", release, METH_O, NULL},
    {"release_after", release_after, METH_VARARGS, NULL}, {"pin", pin, METH_O, NULL},
    {"unpin", unpin, METH_O, NULL},               {"pin_often", pin_often, METH_VARARGS, NULL},
    {"unpin_often", unpin_often, METH_VARARGS, NULL}, {"sync", sync_, METH_VARARGS, NULL},
    {"find", find, METH_O, NULL},                 {"place", place, METH_O, NULL},
    {"stats", stats, METH_O, NULL},               {"trim", trim, METH_VARARGS, NULL},
    {"error", error, METH_NOARGS, NULL},          {"cache", cache, METH_O, NULL},
    {"keeps", keeps, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "door", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_door(void)
{
    PyObject *module;
    api = zc_import();
    if (!api)
        return NULL;
    module = PyModule_Create(&definition);
    if (module
        && (PyModule_AddIntConstant(module, "ABI", (long)api->abi) || PyModule_AddIntConstant(module, "SIZE", (long)api->size)
            || PyModule_AddIntConstant(module, "TABLE", (long)sizeof(zc_api))
            || PyModule_AddIntConstant(module, "BLOCK", (long)sizeof(zc_block))
            || PyModule_AddIntConstant(module, "EXCLUSIVE", ZC_EXCLUSIVE)
            || PyModule_AddIntConstant(module, "TO_DEVICE", ZC_TO_DEVICE)
            || PyModule_AddIntConstant(module, "FROM_DEVICE", ZC_FROM_DEVICE))) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
