/* What the files of the stand-in driver share; fake_cuda.c says what it is. */
#ifndef FAKE_CUDA_H
#define FAKE_CUDA_H

#include <stddef.h>
#include <stdint.h>

enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_CONTEXT = 201, LOST = 700, PEER_ENABLED = 704,
       NOT_PERMITTED = 800 };
enum { DEVICES = 2, LIMIT = 64 << 20, MOST = 256 };

#pragma GCC visibility push(hidden)
extern int contexts[DEVICES]; /* what a context points to is its device's */
int ready(void);              /* OK, or why nothing works before cuInit or without a current context */
int here(void);               /* the device of the current context */
int told(const char *what);   /* whether $FAKE_CUDA_FAIL is `what` */
int on(int device, uint64_t at, size_t size); /* whether that is memory of `device` */
int is_host(const void *at, size_t size);     /* whether it is memory of no device */
#pragma GCC visibility pop

#endif
