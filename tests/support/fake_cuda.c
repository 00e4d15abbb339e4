/* A CUDA driver whose device memory is files in $FAKE_CUDA_DIR: enough of it for pools and their handles between
 * processes. Built as libcuda.so.1 by tests/unit/pool/test_cuda_ipc.py. Like the real one it refuses to open a handle in
 * the process that exported it, and does nothing before cuInit or without a current context. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_CONTEXT = 201, LIMIT = 1 << 20 };
typedef struct { char name[64]; } Handle;

static int started;
static __thread void *current;
static int context;
static struct { uint64_t at; size_t size; char name[64]; } held[16];
static int count;

static int ready(void) { return !started ? NOT_INITIALIZED : current != &context ? NO_CONTEXT : OK; }

static char *path(char *into, const char *name)
{
    snprintf(into, 512, "%s/%s", getenv("FAKE_CUDA_DIR"), name);
    return into;
}

static int map(uint64_t *at, size_t size, const char *name)
{
    char full[512];
    int file = open(path(full, name), O_RDWR);
    if (file < 0)
        return INVALID;
    struct stat found;
    fstat(file, &found);
    void *memory = mmap(0, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    *at = (uint64_t)memory;
    held[count].at = *at, held[count].size = size ? size : (size_t)found.st_size;
    strcpy(held[count++].name, name);
    return OK;
}

int cuInit(unsigned flags) { started = 1; return flags; }
int cuGetErrorName(int code, const char **text) { *text = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR"; return OK; }
int cuDeviceGetCount(int *found) { *found = 2; return started ? OK : NOT_INITIALIZED; }
int cuDeviceGet(int *device, int index) { *device = index + 100; return OK; }
int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, device, 16); return OK; }
int cuDevicePrimaryCtxRetain(void **made, int device) { *made = &context; return device < 100; }
int cuCtxSetCurrent(void *made) { current = made; return OK; }
int cuCtxSynchronize(void) { return ready(); }
int cuMemGetInfo_v2(size_t *unused, size_t *total) { *unused = *total = LIMIT; return ready(); }

int cuMemAlloc_v2(uint64_t *at, size_t size)
{
    char full[512], name[64];
    if (ready() || size > LIMIT)
        return ready() ? ready() : OUT_OF_MEMORY;
    snprintf(name, sizeof name, "%d-%d", getpid(), count);
    int file = open(path(full, name), O_RDWR | O_CREAT, 0600);
    if (ftruncate(file, size))
        return OUT_OF_MEMORY;
    close(file);
    return map(at, size, name);
}

int cuMemFree_v2(uint64_t at) { return at ? ready() : INVALID; }
int cuMemsetD8_v2(uint64_t at, unsigned char value, size_t size) { memset((void *)at, value, size); return ready(); }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) { memcpy(to, (void *)from, size); return ready(); }
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) { memcpy((void *)to, from, size); return ready(); }

int cuIpcGetMemHandle(Handle *handle, uint64_t at)
{
    for (int i = 0; i < count; i++)
        if (held[i].at == at)
            return memcpy(handle->name, held[i].name, 64), ready();
    return INVALID;
}

int cuIpcOpenMemHandle_v2(uint64_t *at, Handle handle, unsigned flags)
{
    if (ready() || flags != 1 || atoi(handle.name) == getpid())
        return ready() ? ready() : INVALID;
    return map(at, 0, handle.name);
}

int cuIpcCloseMemHandle(uint64_t at)
{
    for (int i = 0; i < count; i++)
        if (held[i].at == at)
            return munmap((void *)at, held[i].size), ready();
    return INVALID;
}
