/* Streams and asynchronous copies of the stand-in driver, and the host memory that is page-locked for them. */
#include "fake_cuda.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct Copy { struct Copy *next; char *to; const char *from; char *staged; size_t size; } Copy;
typedef struct { int device; Copy *copies; } Stream;
typedef struct { int device; Stream *after; } Event;

static int registered, asked;
static struct { const char *at; size_t size; } pinned[MOST];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* --- host memory --- */

int cuMemHostRegister_v2(void *at, size_t size, unsigned flags)
{
    if (ready() || flags != 1 || registered == MOST || told("pin"))
        return ready() ? ready() : NOT_PERMITTED;
    pinned[registered].at = at;
    pinned[registered++].size = size;
    return OK;
}

int cuMemHostUnregister(void *at)
{
    for (int i = 0; i < registered; i++)
        if (pinned[i].at == at)
            return pinned[i].at = NULL, ready();
    return INVALID;
}

static int is_pinned(const char *at, size_t size)
{
    for (int i = 0; i < registered; i++)
        if (pinned[i].at && pinned[i].at <= at && at + size <= pinned[i].at + pinned[i].size)
            return 1;
    return 0;
}

/* --- streams --- */

int cuStreamCreate(void **made, unsigned flags)
{
    Stream *stream = calloc(1, sizeof *stream);
    stream->device = here();
    *made = stream;
    return flags == 1 ? ready() : INVALID;
}

int cuEventCreate(void **made, unsigned flags)
{
    Event *event = calloc(1, sizeof *event);
    event->device = here();
    *made = event;
    return flags == 3 ? ready() : INVALID;
}

int cuStreamDestroy_v2(void *stream) { free(stream); return ready(); }
int cuEventDestroy_v2(void *event) { free(event); return ready(); }

static int later(Stream *stream, void *to, const void *from, size_t size, int staged)
{
    if (ready() || stream->device != here())
        return ready() ? ready() : INVALID;
    if (++asked == 2 && told("copy"))
        return INVALID;
    Copy *copy = calloc(1, sizeof *copy), **end = &stream->copies;
    *copy = (Copy){NULL, to, from, NULL, size};
    if (staged)
        copy->from = copy->staged = memcpy(malloc(size), from, size);
    pthread_mutex_lock(&lock);
    while (*end)
        end = &(*end)->next;
    *end = copy;
    pthread_mutex_unlock(&lock);
    return OK;
}

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, Stream *stream)
{
    return on(here(), from, size) && is_host(to, size) ? later(stream, to, (void *)from, size, 0) : INVALID;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, Stream *stream)
{
    if (!on(here(), to, size) || !is_host(from, size))
        return INVALID;
    return later(stream, (void *)to, from, size, !is_pinned(from, size));
}

int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t size, Stream *stream)
{
    int right = on(here(), to, size) && on(here(), from, size);
    return right ? later(stream, (void *)to, (void *)from, size, 0) : INVALID;
}

int cuMemcpyPeerAsync(uint64_t to, int *there, uint64_t from, int *source, size_t size, Stream *stream)
{
    int right = on((int)(there - contexts), to, size) && on((int)(source - contexts), from, size) && there != source;
    return right ? later(stream, (void *)to, (void *)from, size, 0) : INVALID;
}

int cuEventRecord(Event *event, Stream *stream)
{
    event->after = stream;
    return event->device == stream->device && stream->device == here() ? ready() : INVALID;
}

int cuEventSynchronize(Event *event)
{
    if (ready() || told("wait"))
        return ready() ? ready() : LOST;
    pthread_mutex_lock(&lock);
    for (Copy *copy; (copy = event->after->copies);) {
        memcpy(copy->to, copy->from, copy->size);
        event->after->copies = copy->next;
        free(copy->staged);
        free(copy);
    }
    pthread_mutex_unlock(&lock);
    return OK;
}
