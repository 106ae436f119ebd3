// The records, and the hook by which Python sees chosen calls as they happen.
#include "device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static struct record *records;
static size_t num_records, capacity;
static bool recording;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static void (*observer)(const struct record *);
static uint32_t observed;

bool computes(void) {
  static int known = -1;
  if (known < 0) {
    const char *value = getenv("NULL_DEVICE_COMPUTES");
    known = value != NULL && value[0] == '1';
  }
  return known;
}

void note(enum kind kind, void *stream, const char *name, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
  struct record made = {kind, (uint32_t)current_device(), (uint64_t)(uintptr_t)stream, name, a, b, c, d};
  if (capture(made)) return;
  if (!recording && !(observer && observed >> kind & 1)) return;
  if (recording) {
    pthread_mutex_lock(&mutex);
    if (num_records == capacity) {
      capacity = capacity ? 2 * capacity : 1 << 16;
      records = realloc(records, capacity * sizeof *records);
    }
    records[num_records++] = made;
    pthread_mutex_unlock(&mutex);
  }
  // Outside the lock: the hook takes Python's, and may call the device again.
  if (observer && observed >> kind & 1) observer(&made);
}

void note_accesses(void *stream, const char *name, const void *read, size_t read_bytes, const void *written,
                   size_t written_bytes) {
  if (read && read_bytes) note(READ, stream, name, (uint64_t)(uintptr_t)read, read_bytes, 0, 0);
  if (written && written_bytes) note(WRITE, stream, name, (uint64_t)(uintptr_t)written, written_bytes, 0, 0);
}

int unknown_call(const char *name) {
  note(UNKNOWN, NULL, name, 0, 0, 0, 0);
  return 0;
}

// Python's side.
void null_recording(int on) { recording = on; }
size_t null_count(void) { return num_records; }
void null_copy(size_t first, size_t count, struct record *into) {
  pthread_mutex_lock(&mutex);  // others may be noting, which moves the records
  memcpy(into, records + first, count * sizeof *records);
  pthread_mutex_unlock(&mutex);
}
void null_observe(void (*hook)(const struct record *), uint32_t kinds) {
  observed = kinds;
  observer = hook;
}
static const char *kept(const char *name) {
  static char *names[4096];
  int i = 0;
  pthread_mutex_lock(&mutex);
  while (i < 4095 && names[i] && strcmp(names[i], name)) i++;
  if (!names[i]) names[i] = strdup(name);
  pthread_mutex_unlock(&mutex);
  return names[i];
}
// A Triton kernel whose launch is checked and not made.
void null_note_triton(const char *name, void *stream, uint64_t x, uint64_t y, uint64_t z, uint64_t threads) {
  note(TRITON, stream, kept(name), x, y, z, threads);
}
// What Python knows of memory that an operation or a Triton kernel reads or writes. Of the host's, only pinned memory.
void null_note_access(uint32_t kind, uint64_t stream, uint64_t address, uint64_t bytes, uint64_t what,
                      uint64_t before) {
  if (!bytes || (stream == HOST_STREAM && memory_kind((void *)(uintptr_t)address) != 1)) return;
  note(kind, (void *)(uintptr_t)stream, "", address, bytes, what, before);
}
// An operation that would launch a kernel and wait for a number, and is computed elsewhere.
void null_note_wait(const char *name, void *stream) {
  note(LAUNCH, stream, kept(name), 1, 1, 1, 1);
  note(COPY, stream, "DtoH pinned", 8, 0, 0, 0);
  note(HOST_WAIT, stream, "cudaStreamSynchronize", 0, 0, 0, 0);
}
