/* Loaded before the runtime of a sanitizer, which ends the process when a library is opened with RTLD_DEEPBIND, as
 * LiteRT opens the plugins of its compiler: this one opens them without. */
#define _GNU_SOURCE
#include <dlfcn.h>

void *dlopen(const char *file, int flags)
{
    void *(*next)(const char *, int);
    *(void **)&next = dlsym(RTLD_NEXT, "dlopen");
    return next(file, flags & ~RTLD_DEEPBIND);
}
