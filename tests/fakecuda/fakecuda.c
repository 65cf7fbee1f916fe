/* The part of libcuda that the engine calls, over memory files and mprotect.
 *
 * It keeps the driver's rules: whole granules, no offset, no mapping over another one, unmapping of
 * whole mappings only, nothing reachable before its access is set, memory that lives as long as it
 * is mapped or held, a current context in every thread. Streams run as late as they may: a copy
 * whose end was not waited for has not happened. A copy that meets unmapped memory spoils the
 * context for ever, as on a device.
 *
 * What the tests turn: memory, granularity, refused calls, latency, what mapping does to work that
 * is queued, errors that stay (fake_*, at the end).
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef REAL_CUDA_H /* only to compare the shapes of what is passed */
#include <cuda.h>
#endif

typedef unsigned long long u64;
typedef int Result;
enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712, NOT_REGISTERED = 713, NOT_PERMITTED = 800, NOT_SUPPORTED = 801
};

typedef struct { int type, id; } Location;
typedef struct {
    int type, handle_types;
    Location location;
    void *win32;
    unsigned char flags[8];
} Prop;
typedef struct { Location location; int flags; } Access;
typedef struct { int source_order; Location source, target; unsigned flags; } CopyAttributes;

#ifdef REAL_CUDA_H
_Static_assert(sizeof(Prop) == sizeof(CUmemAllocationProp), "CUmemAllocationProp");
_Static_assert(sizeof(Access) == sizeof(CUmemAccessDesc), "CUmemAccessDesc");
_Static_assert(sizeof(CopyAttributes) == sizeof(CUmemcpyAttributes), "CUmemcpyAttributes");
_Static_assert(offsetof(Prop, flags) == offsetof(CUmemAllocationProp, allocFlags), "allocFlags");
#else

/* Physical memory, and who keeps it alive. */
typedef struct { int fd; size_t size, charged; int handles, mappings; } Memory;
typedef struct { u64 address; size_t size; Memory *memory; int access; } Mapping;
typedef struct { u64 address; size_t size; } Span;
typedef struct Event Event;
typedef struct Stream Stream;
typedef enum { COPY, MARK, BEHIND, WRITE, WAIT } Kind;
typedef struct {
    Kind kind; u64 to, from; size_t size; Event *event; Stream *other; u64 ticket, behind;
    unsigned value;
} Op;
struct Event { Stream *stream; u64 recorded, done; long asked; };
struct Stream { Op *ops; size_t num, room; };

#define TABLE(type, name) static type *name; static size_t num_##name, room_##name
#define ADD(name) (num_##name == room_##name ? (void)(room_##name = room_##name * 2 + 64, \
    name = realloc(name, room_##name * sizeof *name)) : (void)0, &name[num_##name++])
#define TAKE_OUT(name, i) (name[i] = name[--num_##name])

TABLE(Mapping, maps);
TABLE(Span, spans);
TABLE(Span, pinned);
TABLE(Span, registered); /* pinned, too, but not ours */
TABLE(Stream *, streams);

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static size_t granularity = 2 << 20, total = 1ull << 30, used;
static long num_calls, fails_from = -1, fails_to = -1;
static int fails_with = OUT_OF_MEMORY, is_initialized, spoiled;
static long call_ns, gib_ns, graph_ns, num_graphs, spent_ns, num_memories;
static u64 tickets;
static int sleeps = 1; /* else time is only counted */
static int driver_version = 13000, has_virtual_memory = 1, num_devices = 1, capability = 90;
static long num_asked = 3; /* a mark that is asked for so often has come about */
static int gives_pinned = 1;
static int can_export = 1, gives_exportable = 1, has_values = 1;
static enum { IGNORE, STALL, FAULT } beside_work; /* what mapping and unmapping do to queued work */
static long num_beside_work;
static _Thread_local int has_context;

static Result enter(int needs_context) {
    pthread_mutex_lock(&lock);
    if (!is_initialized) return NOT_INITIALIZED;
    if (needs_context && !has_context) return INVALID_CONTEXT;
    if (spoiled) return spoiled;
    long call = num_calls++;
    return call >= fails_from && call < fails_to ? fails_with : OK;
}
static Result leave(Result result) { pthread_mutex_unlock(&lock); return result; }
#define ENTER Result entered = enter(1); if (entered) return leave(entered)
#define REFUSE_IF(condition) if (condition) return leave(INVALID_VALUE)

static void take_time(size_t num_bytes) {
    long ns = call_ns + (long)((double)gib_ns * (double)num_bytes / (1 << 30));
    ns += graph_ns * num_graphs; /* some drivers look through all graphs that are alive */
    spent_ns += ns;
    if (!sleeps) return;
    struct timespec left = {ns / 1000000000, ns % 1000000000};
    if (ns) nanosleep(&left, NULL);
}

/* ---- devices and contexts ---- */

Result cuInit(unsigned flags) { is_initialized = 1; return flags ? INVALID_VALUE : OK; }
Result cuDriverGetVersion(int *version) { *version = driver_version; return OK; }
Result cuDeviceGetCount(int *count) { *count = num_devices; return is_initialized ? OK : NOT_INITIALIZED; }
Result cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal >= num_devices ? INVALID_DEVICE : OK;
}
Result cuDeviceGetName(char *name, int size, int device) {
    snprintf(name, (size_t)size, "fake %d", device);
    return OK;
}
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = (attribute == 103 && can_export) || (attribute == 102 && has_virtual_memory);
    if (attribute == 75) *value = capability / 10;
    if (attribute == 76) *value = capability % 10;
    return device >= num_devices ? INVALID_DEVICE : OK;
}
Result cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = total;
    return device >= num_devices ? INVALID_DEVICE : OK;
}
Result cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &total;
    return device ? INVALID_DEVICE : OK;
}
Result cuDevicePrimaryCtxRelease_v2(int device) { return device ? INVALID_DEVICE : OK; }
Result cuCtxSetCurrent(void *context) { has_context = context == &total; return OK; }
Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    ENTER;
    *free_bytes = total - used;
    *total_bytes = total;
    return leave(OK);
}
Result cuGetErrorName(Result error, const char **name) {
    switch (error) {
    case OK: *name = "CUDA_SUCCESS"; return OK;
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; return OK;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return OK;
    case NOT_INITIALIZED: *name = "CUDA_ERROR_NOT_INITIALIZED"; return OK;
    case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; return OK;
    case INVALID_HANDLE: *name = "CUDA_ERROR_INVALID_HANDLE"; return OK;
    case NOT_READY: *name = "CUDA_ERROR_NOT_READY"; return OK;
    case NOT_PERMITTED: *name = "CUDA_ERROR_NOT_PERMITTED"; return OK;
    case NOT_SUPPORTED: *name = "CUDA_ERROR_NOT_SUPPORTED"; return OK;
    case ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; return OK;
    default: *name = NULL; return INVALID_VALUE;
    }
}

/* ---- virtual memory ---- */

static int is_good(const Prop *prop) {
    return prop->type == 1 && prop->location.type == 1 && prop->location.id == 0 && !prop->win32 &&
           (prop->handle_types == 0 || prop->handle_types == 1);
}
static int is_whole(u64 value) { return value % granularity == 0; }
static int overlaps(u64 a, size_t a_size, u64 b, size_t b_size) {
    return a < b + b_size && b < a + a_size;
}
static Span *span_of(u64 address, size_t size) {
    for (size_t i = 0; i < num_spans; i++)
        if (address >= spans[i].address && address + size <= spans[i].address + spans[i].size)
            return &spans[i];
    return NULL;
}
static Mapping *mapping_at(u64 address) {
    for (size_t i = 0; i < num_maps; i++)
        if (address - maps[i].address < maps[i].size) return &maps[i];
    return NULL;
}
/* Whether [address, address + size) is mapped from end to end, with that access if wanted. */
static int covers(u64 address, size_t size, int wants_access) {
    for (u64 at = address; at < address + size;) {
        Mapping *mapping = mapping_at(at);
        if (!mapping || (wants_access && mapping->access != 3)) return 0;
        at = mapping->address + mapping->size;
    }
    return 1;
}
static void run(Stream *stream, u64 ticket);
/* Page tables change while streams have work: some drivers wait for it, and on some devices the
 * running kernel faults although its addresses are others. */
static void change_tables(void) {
    int is_busy = 0;
    for (size_t i = 0; i < num_streams; i++)
        for (size_t j = 0; j < streams[i]->num; j++) is_busy |= streams[i]->ops[j].kind == COPY;
    num_beside_work += is_busy;
    if (!is_busy || beside_work == IGNORE) return;
    if (beside_work == FAULT) spoiled = ILLEGAL_ADDRESS;
    else for (size_t i = 0; i < num_streams; i++) run(streams[i], tickets);
}
static void let_go(Memory *memory) {
    if (memory->handles || memory->mappings) return;
    used -= memory->charged;
    close(memory->fd);
    num_memories--;
    free(memory);
}

Result cuMemGetAllocationGranularity(size_t *size, const Prop *prop, int option) {
    ENTER;
    REFUSE_IF(!is_good(prop) || (option != 0 && option != 1));
    *size = granularity;
    return leave(OK);
}
Result cuMemAddressReserve(u64 *at, size_t size, size_t alignment, u64 hint, u64 flags) {
    ENTER;
    REFUSE_IF(!size || !is_whole(size) || flags || (alignment & (alignment - 1)));
    size_t align = alignment > granularity ? alignment : granularity;
    char *raw = mmap(NULL, size + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return leave(OUT_OF_MEMORY);
    u64 start = ((u64)raw + align - 1) / align * align;
    if (start > (u64)raw) munmap(raw, start - (u64)raw);
    munmap((void *)(start + size), (u64)raw + align - start);
    *ADD(spans) = (Span){start, size};
    *at = start;
    (void)hint;
    return leave(OK);
}
Result cuMemAddressFree(u64 address, size_t size) {
    ENTER;
    for (size_t i = 0; i < num_maps; i++)
        REFUSE_IF(overlaps(address, size, maps[i].address, maps[i].size));
    for (size_t i = 0; i < num_spans; i++)
        if (spans[i].address == address && spans[i].size == size) {
            munmap((void *)address, size);
            TAKE_OUT(spans, i);
            return leave(OK);
        }
    return leave(INVALID_VALUE);
}
static Memory *new_memory(int fd, size_t size, size_t charged) {
    Memory *memory = calloc(1, sizeof *memory);
    *memory = (Memory){fd, size, charged, 1, 0};
    used += charged;
    num_memories++;
    return memory;
}
Result cuMemCreate(u64 *handle, size_t size, const Prop *prop, u64 flags) {
    ENTER;
    REFUSE_IF(!size || !is_whole(size) || !is_good(prop) || flags);
    if (prop->handle_types && !(can_export && gives_exportable)) return leave(NOT_SUPPORTED);
    if (used + size > total) return leave(OUT_OF_MEMORY);
    int fd = memfd_create("fakecuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, (off_t)size)) return leave(OUT_OF_MEMORY);
    *handle = (u64)new_memory(fd, size, size);
    return leave(OK);
}
Result cuMemRelease(u64 handle) {
    ENTER;
    Memory *memory = (Memory *)handle;
    if (!memory || !memory->handles) return leave(INVALID_HANDLE);
    memory->handles--;
    let_go(memory);
    return leave(OK);
}
Result cuMemRetainAllocationHandle(u64 *handle, u64 address) {
    ENTER;
    Mapping *mapping = mapping_at(address);
    REFUSE_IF(!mapping);
    mapping->memory->handles++;
    *handle = (u64)mapping->memory;
    return leave(OK);
}
Result cuMemMap(u64 address, size_t size, size_t offset, u64 handle, u64 flags) {
    ENTER;
    Memory *memory = (Memory *)handle;
    if (!memory || !memory->handles) return leave(INVALID_HANDLE);
    REFUSE_IF(offset || flags || size != memory->size || !is_whole(address));
    REFUSE_IF(!span_of(address, size));
    for (size_t i = 0; i < num_maps; i++)
        REFUSE_IF(overlaps(address, size, maps[i].address, maps[i].size));
    change_tables();
    if (mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, memory->fd, 0) == MAP_FAILED)
        return leave(OUT_OF_MEMORY);
    memory->mappings++;
    *ADD(maps) = (Mapping){address, size, memory, 0};
    take_time(size);
    return leave(OK);
}
Result cuMemSetAccess(u64 address, size_t size, const Access *access, size_t count) {
    ENTER;
    REFUSE_IF(count != 1 || access->location.type != 1 || access->location.id != 0);
    REFUSE_IF(access->flags != 0 && access->flags != 1 && access->flags != 3);
    REFUSE_IF(!size || !covers(address, size, 0));
    int prot = access->flags == 3 ? PROT_READ | PROT_WRITE : access->flags ? PROT_READ : PROT_NONE;
    for (size_t i = 0; i < num_maps; i++)
        if (overlaps(address, size, maps[i].address, maps[i].size)) {
            REFUSE_IF(maps[i].address < address);
            REFUSE_IF(maps[i].address + maps[i].size > address + size);
        }
    for (size_t i = 0; i < num_maps; i++)
        if (overlaps(address, size, maps[i].address, maps[i].size)) maps[i].access = access->flags;
    mprotect((void *)address, size, prot);
    take_time(size);
    return leave(OK);
}
Result cuMemUnmap(u64 address, size_t size) {
    ENTER;
    REFUSE_IF(!size || !covers(address, size, 0));
    for (size_t i = 0; i < num_maps; i++)
        if (overlaps(address, size, maps[i].address, maps[i].size)) {
            REFUSE_IF(maps[i].address < address);
            REFUSE_IF(maps[i].address + maps[i].size > address + size);
        }
    change_tables();
    mmap((void *)address, size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (size_t i = 0; i < num_maps;)
        if (overlaps(address, size, maps[i].address, maps[i].size)) {
            maps[i].memory->mappings--;
            let_go(maps[i].memory);
            TAKE_OUT(maps, i);
        } else {
            i++;
        }
    take_time(size);
    return leave(OK);
}
Result cuMemExportToShareableHandle(void *fd, u64 handle, int type, u64 flags) {
    ENTER;
    Memory *memory = (Memory *)handle;
    if (!memory || !memory->handles) return leave(INVALID_HANDLE);
    REFUSE_IF(type != 1 || flags);
    *(int *)fd = fcntl(memory->fd, F_DUPFD_CLOEXEC, 0);
    return leave(*(int *)fd < 0 ? OUT_OF_MEMORY : OK);
}
Result cuMemImportFromShareableHandle(u64 *handle, void *os_handle, int type) {
    ENTER;
    REFUSE_IF(type != 1);
    struct stat info;
    int fd = fcntl((int)(intptr_t)os_handle, F_DUPFD_CLOEXEC, 0);
    REFUSE_IF(fd < 0 || fstat(fd, &info));
    *handle = (u64)new_memory(fd, (size_t)info.st_size, 0); /* the exporter is charged */
    return leave(OK);
}

/* What Triton's launcher asks of every pointer, and what it gives up at: the first byte. */
Result cuPointerGetAttribute(void *value, int attribute, u64 address) {
    ENTER;
    REFUSE_IF(attribute != 3); /* CU_POINTER_ATTRIBUTE_DEVICE_POINTER */
    REFUSE_IF(span_of(address, 1) && !covers(address, 1, 1));
    *(u64 *)value = address;
    return leave(OK);
}

/* ---- pinned memory, streams, events ---- */

Result cuMemHostAlloc(void **at, size_t size, unsigned flags) {
    ENTER;
    *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*at == MAP_FAILED) return leave(OUT_OF_MEMORY);
    *ADD(pinned) = (Span){(u64)*at, size};
    (void)flags;
    return leave(OK);
}
Result cuMemFreeHost(void *at) {
    ENTER;
    for (size_t i = 0; i < num_pinned; i++)
        if (pinned[i].address == (u64)at) {
            munmap(at, pinned[i].size);
            TAKE_OUT(pinned, i);
            return leave(OK);
        }
    return leave(INVALID_VALUE);
}
Result cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
    ENTER;
    REFUSE_IF(!size || flags || (u64)at % 4096 || size % 4096);
    if (!gives_pinned) return leave(NOT_PERMITTED);
    for (size_t i = 0; i < num_registered; i++)
        if (overlaps((u64)at, size, registered[i].address, registered[i].size))
            return leave(ALREADY_REGISTERED);
    *ADD(registered) = (Span){(u64)at, size};
    return leave(OK);
}
Result cuMemHostUnregister(void *at) {
    ENTER;
    for (size_t i = 0; i < num_registered; i++)
        if (registered[i].address == (u64)at) {
            TAKE_OUT(registered, i);
            return leave(OK);
        }
    return leave(NOT_REGISTERED);
}
static int lies_in(const Span *some, size_t num, u64 address, size_t size) {
    for (size_t i = 0; i < num; i++)
        if (address >= some[i].address && address + size <= some[i].address + some[i].size)
            return 1;
    return 0;
}
static int is_pinned(u64 address, size_t size) {
    return lies_in(pinned, num_pinned, address, size) ||
           lies_in(registered, num_registered, address, size);
}
static void begin_at(Stream *stream, size_t done) {
    memmove(stream->ops, stream->ops + done, (stream->num - done) * sizeof *stream->ops);
    stream->num -= done;
}
/* Run a stream's operations up to that ticket. Where one waits for a word the stream stands still,
 * and everything else goes on. */
static void run(Stream *stream, u64 ticket) {
    size_t done = 0;
    while (done < stream->num && stream->ops[done].ticket <= ticket) {
        Op op = stream->ops[done];
        if ((op.kind == WRITE || op.kind == WAIT) && !covers(op.to, 4, 1)) {
            spoiled = ILLEGAL_ADDRESS;
        } else if (op.kind == WRITE) {
            __atomic_store_n((unsigned *)op.to, op.value, __ATOMIC_RELEASE);
        } else if (op.kind == WAIT &&
                   (int)(__atomic_load_n((unsigned *)op.to, __ATOMIC_ACQUIRE) - op.value) < 0) {
            begin_at(stream, done);
            done = 0;
            pthread_mutex_unlock(&lock);
            nanosleep(&(struct timespec){0, 20000}, NULL);
            pthread_mutex_lock(&lock);
            continue;
        }
        done++;
        if (op.kind == MARK) op.event->done = op.ticket;
        for (size_t i = 0; op.kind == BEHIND && i < num_streams; i++)
            if (streams[i] == op.other && op.other != stream) run(op.other, op.behind);
        if (op.kind != COPY) continue;
        int is_there = (is_pinned(op.to, op.size) || covers(op.to, op.size, 1)) &&
                       (is_pinned(op.from, op.size) || covers(op.from, op.size, 1));
        if (is_there) memmove((void *)op.to, (void *)op.from, op.size);
        else spoiled = ILLEGAL_ADDRESS;
    }
    begin_at(stream, done);
}
static void queue(Stream *stream, Op op) {
    if (stream->num == stream->room) {
        stream->room = stream->room * 2 + 64;
        stream->ops = realloc(stream->ops, stream->room * sizeof *stream->ops);
    }
    op.ticket = ++tickets;
    stream->ops[stream->num++] = op;
}
Result cuStreamCreate(Stream **stream, unsigned flags) {
    ENTER;
    REFUSE_IF(flags > 1);
    *stream = calloc(1, sizeof **stream);
    *ADD(streams) = *stream;
    return leave(OK);
}
Result cuStreamDestroy_v2(Stream *stream) {
    ENTER;
    run(stream, tickets);
    for (size_t i = 0; i < num_streams; i++)
        if (streams[i] == stream) { TAKE_OUT(streams, i); break; }
    free(stream->ops);
    free(stream);
    return leave(OK);
}
Result cuStreamSynchronize(Stream *stream) {
    ENTER;
    run(stream, tickets);
    return leave(spoiled);
}
Result cuEventCreate(Event **event, unsigned flags) {
    ENTER;
    *event = calloc(1, sizeof **event);
    (void)flags;
    return leave(OK);
}
Result cuEventDestroy_v2(Event *event) {
    ENTER;
    if (event->done < event->recorded) run(event->stream, event->recorded);
    free(event);
    return leave(OK);
}
Result cuEventRecord(Event *event, Stream *stream) {
    ENTER;
    queue(stream, (Op){.kind = MARK, .event = event});
    event->stream = stream;
    event->recorded = tickets;
    event->asked = 0;
    return leave(OK);
}
/* Without a wait nothing happens, but for time going by: so many questions. */
Result cuEventQuery(Event *event) {
    ENTER;
    if (event->done >= event->recorded) return leave(OK);
    if (++event->asked < num_asked) return leave(NOT_READY);
    run(event->stream, event->recorded);
    return leave(spoiled);
}
Result cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) {
    ENTER;
    REFUSE_IF(flags);
    if (event->recorded)
        queue(stream, (Op){.kind = BEHIND, .other = event->stream, .behind = event->recorded});
    return leave(OK);
}
Result cuEventSynchronize(Event *event) {
    ENTER;
    if (event->done < event->recorded) run(event->stream, event->recorded);
    return leave(spoiled);
}
static Result copy(u64 to, u64 from, size_t size, Stream *stream, int to_host, int from_host) {
    ENTER;
    REFUSE_IF(!to_host && !covers(to, size, 1));
    REFUSE_IF(!from_host && !covers(from, size, 1));
    if ((to_host && !is_pinned(to, size)) || (from_host && !is_pinned(from, size))) {
        run(stream, tickets); /* pageable memory: done on return */
        memmove((void *)to, (void *)from, size);
        return leave(spoiled);
    }
    queue(stream, (Op){.kind = COPY, .to = to, .from = from, .size = size});
    return leave(OK);
}
Result cuMemcpyHtoDAsync_v2(u64 to, const void *from, size_t size, Stream *stream) {
    return copy(to, (u64)from, size, stream, 0, 1);
}
Result cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t size, Stream *stream) {
    return copy((u64)to, from, size, stream, 1, 0);
}
Result cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t size, Stream *stream) {
    return copy(to, from, size, stream, 0, 0);
}
/* In the order that callers expect least: there is none in a batch. */
Result cuMemcpyBatchAsync_v2(u64 *to, u64 *from, size_t *sizes, size_t count,
                             CopyAttributes *attributes, size_t *firsts, size_t num, Stream *stream) {
    ENTER;
    REFUSE_IF(!stream || !count || num != 1 || firsts[0] || attributes->source_order != 1);
    for (size_t i = 0; i < count; i++) {
        REFUSE_IF(!is_pinned(to[i], sizes[i]) && !covers(to[i], sizes[i], 1));
        REFUSE_IF(!is_pinned(from[i], sizes[i]) && !covers(from[i], sizes[i], 1));
    }
    for (size_t i = count; i--;)
        queue(stream, (Op){.kind = COPY, .to = to[i], .from = from[i], .size = sizes[i]});
    return leave(OK);
}
static Result value_at(Kind kind, Stream *stream, u64 at, unsigned value, unsigned flags) {
    ENTER;
    if (!has_values) return leave(NOT_SUPPORTED);
    REFUSE_IF(flags || at % 4 || !covers(at, 4, 1));
    queue(stream, (Op){.kind = kind, .to = at, .value = value});
    return leave(OK);
}
Result cuStreamWriteValue32_v2(Stream *stream, u64 at, unsigned value, unsigned flags) {
    return value_at(WRITE, stream, at, value, flags);
}
Result cuStreamWaitValue32_v2(Stream *stream, u64 at, unsigned value, unsigned flags) {
    return value_at(WAIT, stream, at, value, flags);
}

/* ---- for the tests ---- */

/* What a process is to find whose test cannot call it. */
__attribute__((constructor)) static void read_environment(void) {
    const char *size = getenv("FAKECUDA_GRANULARITY_BYTES");
    if (size) granularity = strtoull(size, NULL, 10);
}
void fake_configure(size_t granularity_bytes, size_t total_bytes) {
    granularity = granularity_bytes;
    total = total_bytes;
    spoiled = 0;
    num_calls = 0;
    fails_from = fails_to = -1;
    call_ns = gib_ns = graph_ns = num_graphs = spent_ns = 0;
    sleeps = 1;
    driver_version = 13000;
    has_virtual_memory = num_devices = can_export = gives_exportable = has_values = 1;
    beside_work = IGNORE;
    num_beside_work = 0;
    num_asked = 3;
    gives_pinned = 1;
    capability = 90;
}
void fake_describe(int version, int has_vmm, int count, int computes, int exports) {
    can_export = exports;
    driver_version = version;
    has_virtual_memory = has_vmm;
    num_devices = count;
    capability = computes;
}
/* Refuse `count` calls, the first of them `after` calls from now. */
void fake_refuse(long after, long count, int code) {
    fails_from = num_calls + after;
    fails_to = fails_from + count;
    fails_with = code;
}
void fake_delay(long ns_per_call, long ns_per_gib) { call_ns = ns_per_call; gib_ns = ns_per_gib; }
/* As many graphs are alive, each of which makes mapping slower. Time is counted and not slept. */
void fake_graphs(long count, long ns_per_graph) {
    num_graphs = count;
    graph_ns = ns_per_graph;
    sleeps = 0;
}
long fake_spent_ns(void) { return spent_ns; }
/* From now on every call fails with that error, as after a kernel's illegal access. */
void fake_spoil(int code) { spoiled = code; }
/* Memory that can be exported is refused although the device says that it has it. */
void fake_refuse_exportable(void) { gives_exportable = 0; }
void fake_refuse_pinning(void) { gives_pinned = 0; }
/* Work whose end is asked for and not waited for has ended at the last of so many questions. */
void fake_answer_after(long questions) { num_asked = questions; }
/* Streams neither write words nor wait for them. */
void fake_refuse_values(void) { has_values = 0; }
/* 0: nothing; 1: mapping waits for queued work; 2: queued work faults. */
void fake_beside_work(int what) { beside_work = what; }
long fake_changes_beside_work(void) { return num_beside_work; }
long fake_calls(void) { return num_calls; }
size_t fake_used(void) { return used; }
/* What is left: memories, mappings, reservations, pinned areas, streams. */
void fake_left(long *counts) {
    counts[0] = num_memories;
    counts[1] = (long)num_maps;
    counts[2] = (long)num_spans;
    counts[3] = (long)(num_pinned + num_registered);
    counts[4] = (long)num_streams;
}
#endif
