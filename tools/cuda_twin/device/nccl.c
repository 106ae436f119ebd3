// NCCL. On a null device one process stands for its rank, and every other rank does as this one. On a device that
// computes, processes exchange bytes through shared memory: a collective is done when its call returns.
// No header is at hand: signatures are those of the documentation of NCCL 2.29.
#define _GNU_SOURCE
#include "device.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, CUDA_ERROR = 1, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6 };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, NUM_TYPES };
enum { SUM, PROD, MAX, MIN, AVG, NUM_OPS };
static const int sizes[NUM_TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
typedef struct { char internal[128]; } unique_id;

// What the ranks of a communicator share: a meeting point, a slot of each rank, and a pipe from each to each.
#define MAX_RANKS 16
#define SLOT_BYTES (1u << 20)
#define PIPE_BYTES (1u << 24)
struct shared {
  volatile int ready;
  pthread_mutex_t mutex;
  pthread_cond_t changed;
  int joined, arrived;
  uint64_t meeting;
  volatile uint64_t sent[MAX_RANKS][MAX_RANKS], received[MAX_RANKS][MAX_RANKS];
  char slots[MAX_RANKS][SLOT_BYTES];
  char pipes[MAX_RANKS][MAX_RANKS][PIPE_BYTES];  // a file with holes: only what is used takes memory
};

struct communicator {
  int number, rank, ranks;
  struct shared *shared;  // NULL: this process stands for all
};

static int seconds_to_wait(void) {
  const char *value = getenv("NULL_DEVICE_TIMEOUT_S");
  return value ? atoi(value) : 120;
}

int ncclGetVersion(int *version) { *version = 22907; return SUCCESS; }
const char *ncclGetErrorString(int error) { return error ? "error of the null device" : "no error"; }
const char *ncclGetLastError(void *communicator) { return ""; }
int ncclGetUniqueId(unique_id *made) {
  return getrandom(made, sizeof *made, 0) == sizeof *made ? SUCCESS : SYSTEM_ERROR;
}

static struct shared *join(const unique_id *id, int ranks) {
  char name[64];
  const uint64_t *words = (const uint64_t *)id->internal;
  snprintf(name, sizeof name, "/null-nccl-%016lx%016lx", (unsigned long)words[0], (unsigned long)words[1]);
  int file = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
  bool is_first = file >= 0;
  if (!is_first) file = shm_open(name, O_RDWR, 0600);
  if (file < 0 || ftruncate(file, sizeof(struct shared))) return NULL;
  struct shared *shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (shared == MAP_FAILED) return NULL;
  if (is_first) {
    pthread_mutexattr_t mutex;
    pthread_mutexattr_init(&mutex);
    pthread_mutexattr_setpshared(&mutex, PTHREAD_PROCESS_SHARED);
    pthread_mutex_init(&shared->mutex, &mutex);
    pthread_condattr_t changed;
    pthread_condattr_init(&changed);
    pthread_condattr_setpshared(&changed, PTHREAD_PROCESS_SHARED);
    pthread_condattr_setclock(&changed, CLOCK_MONOTONIC);
    pthread_cond_init(&shared->changed, &changed);
    __sync_synchronize();
    shared->ready = 1;
  }
  while (!shared->ready) usleep(1000);
  pthread_mutex_lock(&shared->mutex);
  // The last one: nobody looks for the name any more.
  if (++shared->joined == ranks) shm_unlink(name);
  pthread_mutex_unlock(&shared->mutex);
  return shared;
}

// What a communicator was made from, by its number, for the records: 0 where the number is too large.
#define MOST_KNOWN 8192
static uint64_t identifiers[MOST_KNOWN];
static int next_number;
uint64_t null_communicator_identifier(int number) { return number < MOST_KNOWN ? identifiers[number] : 0; }

int ncclCommInitRankConfig(struct communicator **made, int ranks, unique_id id, int rank, const void *config) {
  struct communicator *c = calloc(1, sizeof *c);
  c->number = ++next_number, c->rank = rank, c->ranks = ranks;
  if (computes() && ranks > 1) {
    if (ranks > MAX_RANKS || !(c->shared = join(&id, ranks))) return SYSTEM_ERROR;
  }
  if (c->number < MOST_KNOWN) memcpy(&identifiers[c->number], id.internal, sizeof identifiers[0]);
  *made = c;
  return SUCCESS;
}
int ncclCommInitRank(struct communicator **made, int ranks, unique_id id, int rank) {
  return ncclCommInitRankConfig(made, ranks, id, rank, NULL);
}
int ncclCommInitRankScalable(struct communicator **made, int ranks, int rank, int ids, unique_id *id,
                             const void *config) {
  return ncclCommInitRankConfig(made, ranks, *id, rank, config);
}
int ncclCommGetAsyncError(struct communicator *c, int *error) { *error = SUCCESS; return SUCCESS; }
int ncclCommUserRank(struct communicator *c, int *rank) { *rank = c->rank; return SUCCESS; }
int ncclCommCount(struct communicator *c, int *ranks) { *ranks = c->ranks; return SUCCESS; }
int ncclCommCuDevice(struct communicator *c, int *device) { *device = current_device(); return SUCCESS; }

// All ranks wait here for each other; false: one has not come in time.
static bool meet(struct communicator *c) {
  struct shared *s = c->shared;
  struct timespec until;
  clock_gettime(CLOCK_MONOTONIC, &until);
  until.tv_sec += seconds_to_wait();
  pthread_mutex_lock(&s->mutex);
  uint64_t meeting = s->meeting;
  int error = 0;
  if (++s->arrived == c->ranks) {
    s->arrived = 0;
    s->meeting++;
    pthread_cond_broadcast(&s->changed);
  } else {
    while (s->meeting == meeting && !error) error = pthread_cond_timedwait(&s->changed, &s->mutex, &until);
  }
  pthread_mutex_unlock(&s->mutex);
  if (error) fprintf(stderr, "null device: rank %d of %d waits alone in communicator %d\n", c->rank, c->ranks, c->number);
  return !error;
}

static float of_bfloat16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}
static uint16_t to_bfloat16(float value) {
  uint32_t wide;
  memcpy(&wide, &value, 4);
  if (value != value) return 0x7fc0;
  return (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);  // to nearest, ties to even
}

// Half precision is summed in fp32 and rounded once.
#define DEFINE_REDUCE(NAME, STORED, WIDE, LOAD, STORE) \
  static void reduce_##NAME(struct communicator *c, void *to, size_t count, int op) { \
    for (size_t i = 0; i < count; i++) { \
      WIDE total = LOAD(((const STORED *)c->shared->slots[0])[i]); \
      for (int r = 1; r < c->ranks; r++) { \
        WIDE one = LOAD(((const STORED *)c->shared->slots[r])[i]); \
        total = op == PROD ? total * one : op == MAX ? (one > total ? one : total) \
              : op == MIN ? (one < total ? one : total) : total + one; \
      } \
      ((STORED *)to)[i] = STORE(op == AVG ? total / (WIDE)c->ranks : total); \
    } \
  }
#define SAME(value) (value)
DEFINE_REDUCE(int8, int8_t, int8_t, SAME, SAME)
DEFINE_REDUCE(uint8, uint8_t, uint8_t, SAME, SAME)
DEFINE_REDUCE(int32, int32_t, int32_t, SAME, SAME)
DEFINE_REDUCE(uint32, uint32_t, uint32_t, SAME, SAME)
DEFINE_REDUCE(int64, int64_t, int64_t, SAME, SAME)
DEFINE_REDUCE(uint64, uint64_t, uint64_t, SAME, SAME)
DEFINE_REDUCE(float16, _Float16, float, (float), (_Float16))
DEFINE_REDUCE(float32, float, float, SAME, SAME)
DEFINE_REDUCE(float64, double, double, SAME, SAME)
DEFINE_REDUCE(bfloat16, uint16_t, float, of_bfloat16, to_bfloat16)
// Of all ranks' slots, in the order of the ranks, so that all get the same bits.
static void reduce(struct communicator *c, void *into, size_t count, int type, int op) {
  static void (*const by_type[NUM_TYPES])(struct communicator *, void *, size_t, int) = {
    reduce_int8, reduce_uint8, reduce_int32, reduce_uint32, reduce_int64, reduce_uint64,
    reduce_float16, reduce_float32, reduce_float64, reduce_bfloat16};
  by_type[type](c, into, count, op);
}

// In slices that fit a slot: every rank with `give` writes its own, then those with `take` read what they want.
static int exchange(struct communicator *c, const char *own, size_t count, int type, int op, bool gives, char *into,
                    size_t stride, int from) {
  size_t slice = SLOT_BYTES / sizes[type];
  for (size_t done = 0; done < count; done += slice) {
    size_t n = count - done < slice ? count - done : slice, bytes = n * sizes[type], at = done * sizes[type];
    if (gives) memcpy(c->shared->slots[c->rank], own + at, bytes);
    if (!meet(c)) return REMOTE_ERROR;
    if (into && op >= 0) reduce(c, into + at, n, type, op);
    else if (into && from >= 0) memcpy(into + at, c->shared->slots[from], bytes);
    else if (into)
      for (int r = 0; r < c->ranks; r++) memcpy(into + r * stride + at, c->shared->slots[r], bytes);
    if (!meet(c)) return REMOTE_ERROR;
  }
  return SUCCESS;
}
enum { NO_OP = -1, ALL = -1 };
// NCCL's own collectives can be captured; these, of which other processes take part, are not.
#define REFUSED_IN_CAPTURES(stream) if (refused_on(stream)) return CUDA_ERROR

// Of a collective that reads and writes so much; `given` counts in the records, whether it exchanges is returned.
static bool collective(struct communicator *c, const char *name, size_t given, const void *from, size_t read, void *to,
                       size_t written, void *stream) {
  note(COLLECTIVE, stream, name, given, c->ranks, c->number, 0);
  note_accesses(stream, name, from, read, to, written);
  return c->shared != NULL;
}
static void keep(void *to, const void *from, size_t bytes) {
  if (to != from) move_bytes(to, from, bytes);
}

int ncclAllReduce(const void *from, void *to, size_t count, int type, int op, struct communicator *c, void *stream) {
  REFUSED_IN_CAPTURES(stream);
  size_t bytes = count * sizes[type];
  if (op >= NUM_OPS) return INVALID_ARGUMENT;
  if (collective(c, "AllReduce", bytes, from, bytes, to, bytes, stream))
    return exchange(c, from, count, type, op, true, to, 0, ALL);
  keep(to, from, bytes);
  return SUCCESS;
}
int ncclAllGather(const void *from, void *to, size_t count, int type, struct communicator *c, void *stream) {
  REFUSED_IN_CAPTURES(stream);
  size_t bytes = count * sizes[type];
  if (collective(c, "AllGather", bytes, from, bytes, to, bytes * c->ranks, stream))
    return exchange(c, from, count, type, NO_OP, true, to, bytes, ALL);
  if (bytes * c->ranks <= MOVED_BYTES || computes())
    for (int r = 0; r < c->ranks; r++) keep((char *)to + r * bytes, from, bytes);
  return SUCCESS;
}
int ncclReduceScatter(const void *from, void *to, size_t count, int type, int op, struct communicator *c,
                      void *stream) {
  REFUSED_IN_CAPTURES(stream);
  size_t bytes = count * sizes[type];
  if (op >= NUM_OPS) return INVALID_ARGUMENT;
  if (!collective(c, "ReduceScatter", bytes * c->ranks, from, bytes * c->ranks, to, bytes, stream)) {
    keep(to, (const char *)from + c->rank * bytes, bytes);
    return SUCCESS;
  }
  // In place, `to` lies in `from`: this rank's own part, which is read before it is written.
  for (int r = 0, error; r < c->ranks; r++)
    if ((error = exchange(c, (const char *)from + r * bytes, count, type, op, true, r == c->rank ? to : NULL, 0, ALL)))
      return error;
  return SUCCESS;
}
int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, struct communicator *c, void *stream) {
  REFUSED_IN_CAPTURES(stream);
  size_t bytes = count * sizes[type];
  if (collective(c, "Broadcast", bytes, c->rank == root ? from : NULL, bytes, to, bytes, stream))
    return exchange(c, from, count, type, NO_OP, c->rank == root, to, 0, root);
  keep(to, from, bytes);
  return SUCCESS;
}
int ncclBcast(void *buffer, size_t count, int type, int root, struct communicator *c, void *stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, c, stream);
}
int ncclReduce(const void *from, void *to, size_t count, int type, int op, int root, struct communicator *c,
               void *stream) {
  REFUSED_IN_CAPTURES(stream);
  size_t bytes = count * sizes[type];
  if (op >= NUM_OPS) return INVALID_ARGUMENT;
  if (collective(c, "Reduce", bytes, from, bytes, c->rank == root ? to : NULL, bytes, stream))
    return exchange(c, from, count, type, op, true, c->rank == root ? to : NULL, 0, ALL);
  keep(to, from, bytes);
  return SUCCESS;
}
int ncclAlltoAll(const void *from, void *to, size_t count, int type, struct communicator *c, void *stream) {
  REFUSED_IN_CAPTURES(stream);
  size_t bytes = count * sizes[type];
  if (!collective(c, "AlltoAll", bytes * c->ranks, from, bytes * c->ranks, to, bytes * c->ranks, stream)) {
    keep(to, from, bytes * c->ranks);
    return SUCCESS;
  }
  for (int r = 0, error; r < c->ranks; r++)
    if ((error = exchange(c, (const char *)from + r * bytes, count, type, NO_OP, true, r == c->rank ? to : NULL, bytes,
                          ALL)))
      return error;
  return SUCCESS;
}

// Messages. Those of one group go on together: which comes first on a rank must not matter.
struct message { struct communicator *c; bool sends; char *at; size_t left; int peer; };
static __thread struct message messages[256];
static __thread int num_messages, depth;

// Whether some bytes of message `m` have moved.
static bool advance(struct message *m) {
  int from = m->sends ? m->c->rank : m->peer, to = m->sends ? m->peer : m->c->rank;
  struct shared *s = m->c->shared;
  bool moved = false;
  pthread_mutex_lock(&s->mutex);
  for (;;) {
    uint64_t sent = s->sent[from][to], received = s->received[from][to];
    uint64_t at = m->sends ? sent : received, room = m->sends ? PIPE_BYTES - (sent - received) : sent - received;
    size_t n = PIPE_BYTES - at % PIPE_BYTES;
    if (n > room) n = room;
    if (n > m->left) n = m->left;
    if (!n) break;
    char *place = s->pipes[from][to] + at % PIPE_BYTES;
    memcpy(m->sends ? place : m->at, m->sends ? m->at : place, n);
    *(m->sends ? &s->sent[from][to] : &s->received[from][to]) += n;
    m->at += n, m->left -= n, moved = true;
  }
  pthread_mutex_unlock(&s->mutex);
  return moved;
}
static int finish_messages(void) {
  double waited_s = 0;
  for (bool moved = true, open = true; open;) {
    moved = open = false;
    for (int i = 0; i < num_messages; i++) {
      struct message *m = &messages[i];
      bool is_next = true;
      for (int j = 0; j < i; j++) {
        struct message *other = &messages[j];
        if (other->left && other->c == m->c && other->peer == m->peer && other->sends == m->sends) is_next = false;
      }
      if (m->left && is_next) moved |= advance(m);
      open |= m->left > 0;
    }
    if (open && !moved) {
      usleep(200);
      if ((waited_s += 200e-6) > seconds_to_wait()) {
        fprintf(stderr, "null device: rank %d: a message has no other side\n", messages[0].c->rank);
        return REMOTE_ERROR;
      }
    }
  }
  num_messages = 0;
  return SUCCESS;
}
static int message(struct communicator *c, const char *name, bool sends, void *at, size_t bytes, int peer,
                   void *stream) {
  note(COLLECTIVE, stream, name, bytes, c->ranks, c->number, peer);
  note_accesses(stream, name, sends ? at : NULL, bytes, sends ? NULL : at, bytes);
  if (!c->shared || !bytes) return SUCCESS;
  if (num_messages == 256) return INVALID_ARGUMENT;
  messages[num_messages++] = (struct message){c, sends, at, bytes, peer};
  return depth ? SUCCESS : finish_messages();
}
int ncclSend(const void *from, size_t count, int type, int peer, struct communicator *c, void *stream) {
  REFUSED_IN_CAPTURES(stream);
  return message(c, "Send", true, (void *)from, count * sizes[type], peer, stream);
}
int ncclRecv(void *to, size_t count, int type, int peer, struct communicator *c, void *stream) {
  REFUSED_IN_CAPTURES(stream);
  return message(c, "Recv", false, to, count * sizes[type], peer, stream);
}
int ncclGroupStart(void) { depth++; return SUCCESS; }
int ncclGroupEnd(void) { return --depth == 0 ? finish_messages() : SUCCESS; }
