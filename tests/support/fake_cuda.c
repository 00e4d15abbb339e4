/* A CUDA driver whose device memory is files in $FAKE_CUDA_DIR: enough of it for pools, their handles between processes
 * and copies (fake_cuda_copies.c). Built as libcuda.so.1 by tests/support/fake_cuda.py.
 *
 * Like the real one it refuses to open a handle in the process that exported it, or once that has ended; keeps memory
 * for as long as any process has it; does nothing before cuInit or without a current context; knows which GPU a pointer
 * is of; and carries asynchronous copies out late: here when an event behind them is waited for. Only what pageable host
 * memory holds is read at once.
 *
 * $FAKE_CUDA_FAIL: `copy` refuses the second asynchronous copy, `wait` loses the device at the first wait, `pin`
 * refuses to page-lock. */
#include "fake_cuda.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct { char name[64]; } Handle;
typedef struct { uint64_t at; size_t size; int device, file, exported; char name[64]; } Memory;

int contexts[DEVICES];
static int started, count, peers[DEVICES][DEVICES];
static __thread int *current;
static Memory held[MOST];

int ready(void) { return !started ? NOT_INITIALIZED : !current ? NO_CONTEXT : OK; }
int here(void) { return (int)(current - contexts); }

int told(const char *what)
{
    const char *fault = getenv("FAKE_CUDA_FAIL");
    return fault && !strcmp(fault, what);
}

static char *path(char *into, const char *name)
{
    snprintf(into, 512, "%s/%s", getenv("FAKE_CUDA_DIR"), name);
    return into;
}

static Memory *find(uint64_t at, size_t size)
{
    for (int i = 0; i < count; i++)
        if (held[i].at && held[i].at <= at && at + size <= held[i].at + held[i].size)
            return &held[i];
    return NULL;
}

int on(int device, uint64_t at, size_t size)
{
    Memory *found = find(at, size);
    return found && found->device == device;
}

int is_host(const void *at, size_t size) { return !find((uint64_t)at, size); }

/* A lock on the file says that this process has the memory; the kernel drops it with the process. */
static int map(uint64_t *at, const char *name, int device, int exported)
{
    char full[512];
    struct stat found;
    int file = open(path(full, name), O_RDWR | O_CLOEXEC);
    if (file < 0 || count == MOST)
        return INVALID;
    flock(file, LOCK_SH);
    fstat(file, &found);
    *at = (uint64_t)mmap(0, found.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    held[count] = (Memory){*at, found.st_size, device, file, exported, ""};
    strcpy(held[count++].name, name);
    return OK;
}

static int unmap(uint64_t at, int exported)
{
    Memory *found = find(at, 0);
    if (ready() || !found || found->at != at || found->exported != exported || found->device != here())
        return ready() ? ready() : INVALID;
    munmap((void *)at, found->size);
    close(found->file);
    found->at = 0;
    return OK;
}

int cuInit(unsigned flags) { started = 1; return flags; }
int cuDeviceGetCount(int *found) { *found = DEVICES; return started ? OK : NOT_INITIALIZED; }
int cuDeviceGet(int *device, int index) { *device = index + 100; return OK; }
int cuDeviceGetUuid_v2(char *uuid, int device) { memset(uuid, device, 16); return OK; }
int cuDeviceCanAccessPeer(int *can, int device, int other) { *can = device != other; return OK; }
int cuDevicePrimaryCtxRetain(void **made, int device) { *made = &contexts[device - 100]; return OK; }
int cuCtxSetCurrent(void *made) { current = made; return OK; }
int cuCtxSynchronize(void) { return ready(); }

int cuGetErrorName(int code, const char **text)
{
    *text = code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY"
            : code == LOST        ? "CUDA_ERROR_ILLEGAL_ADDRESS"
                                  : "CUDA_ERROR";
    return OK;
}

int cuCtxEnablePeerAccess(void *other, unsigned flags)
{
    int *enabled = &peers[here()][(int *)other - contexts];
    return flags || current == other ? INVALID : (*enabled)++ ? PEER_ENABLED : OK;
}

int cuMemGetInfo_v2(size_t *unused, size_t *total)
{
    char full[512];
    DIR *folder = opendir(getenv("FAKE_CUDA_DIR"));
    *unused = *total = LIMIT;
    for (struct dirent *entry; (entry = readdir(folder));) {
        int device, file;
        struct stat found;
        if (sscanf(entry->d_name, "memory-%*d-%*d-%d", &device) != 1 || device != here())
            continue;
        file = open(path(full, entry->d_name), O_RDWR | O_CLOEXEC);
        fstat(file, &found);
        if (flock(file, LOCK_EX | LOCK_NB))
            *unused -= found.st_size;
        close(file);
    }
    closedir(folder);
    return ready();
}

int cuMemAlloc_v2(uint64_t *at, size_t size)
{
    static int made;
    char full[512], name[64];
    size_t unused, total;
    if (ready())
        return ready();
    cuMemGetInfo_v2(&unused, &total);
    if (size > unused)
        return OUT_OF_MEMORY;
    snprintf(name, sizeof name, "memory-%d-%d-%d", getpid(), made++, here());
    int file = open(path(full, name), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (ftruncate(file, size))
        return OUT_OF_MEMORY;
    close(file);
    return map(at, name, here(), 0);
}

int cuMemFree_v2(uint64_t at) { return unmap(at, 0); }

int cuMemsetD8_v2(uint64_t at, unsigned char value, size_t size)
{
    if (ready() || !on(here(), at, size))
        return ready() ? ready() : INVALID;
    memset((void *)at, value, size);
    return OK;
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size)
{
    if (ready() || !find(from, size))
        return ready() ? ready() : INVALID;
    memcpy(to, (void *)from, size);
    return OK;
}

int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size)
{
    if (ready() || !find(to, size))
        return ready() ? ready() : INVALID;
    memcpy((void *)to, from, size);
    return OK;
}

/* --- handles between processes --- */

int cuIpcGetMemHandle(Handle *handle, uint64_t at)
{
    Memory *found = find(at, 0);
    if (ready() || !found || found->at != at || found->size % (2 << 20))
        return ready() ? ready() : INVALID;
    memcpy(handle->name, found->name, 64);
    return OK;
}

int cuIpcOpenMemHandle_v2(uint64_t *at, Handle handle, unsigned flags)
{
    int owner, device;
    if (ready() || flags != 1 || sscanf(handle.name, "memory-%d-%*d-%d", &owner, &device) != 2)
        return ready() ? ready() : INVALID;
    if (owner == getpid() || kill(owner, 0) || device != here())
        return INVALID;
    for (int i = 0; i < count; i++)
        if (held[i].at && !strcmp(held[i].name, handle.name))
            return INVALID;
    return map(at, handle.name, device, 1);
}

int cuIpcCloseMemHandle(uint64_t at) { return unmap(at, 1); }
