// Memory of the devices and pinned memory of the host: anonymous mappings, committed when they are written.
#include "device.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct allocation {
  char *start;
  size_t bytes;
  bool on_host;
  int device;
};

static struct allocation *allocations;  // by address
static size_t num_allocations, capacity;
static size_t used[64];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

size_t device_bytes(void) {
  const char *gib = getenv("NULL_DEVICE_GIB");
  return (size_t)((gib ? atof(gib) : 79.1) * (1ull << 30));  // what an H100 of 80 GB gives
}

static size_t pages(size_t bytes) { return (bytes + 4095) & ~(size_t)4095; }

// The last allocation that starts at or before `address`; -1: none.
static long place_of(const char *address) {
  long low = 0, high = (long)num_allocations;
  while (low < high) {
    long middle = (low + high) / 2;
    if (allocations[middle].start <= address) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

static long find(const char *address) {
  long place = place_of(address);
  return place >= 0 && address < allocations[place].start + allocations[place].bytes ? place : -1;
}

static void insert(struct allocation made) {
  if (num_allocations == capacity) {
    capacity = capacity ? 2 * capacity : 1024;
    allocations = realloc(allocations, capacity * sizeof *allocations);
  }
  long place = place_of(made.start) + 1;
  memmove(allocations + place + 1, allocations + place, (num_allocations - place) * sizeof *allocations);
  allocations[place] = made;
  num_allocations++;
}

static void *allocate(size_t bytes, bool on_host) {
  int device = current_device();
  if (bytes == 0) bytes = 512;
  pthread_mutex_lock(&mutex);
  void *start = NULL;
  if (on_host || used[device] + bytes <= device_bytes()) {
    start = mmap(NULL, pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) start = NULL;
  }
  if (start) {
    insert((struct allocation){start, bytes, on_host, device});
    if (!on_host) used[device] += bytes;
  }
  pthread_mutex_unlock(&mutex);
  return start;
}

void *device_memory(size_t bytes) { return allocate(bytes, false); }
void *host_memory(size_t bytes) { return allocate(bytes, true); }

void release_memory(void *address) {
  pthread_mutex_lock(&mutex);
  long place = find(address);
  if (place >= 0) {
    struct allocation gone = allocations[place];
    munmap(gone.start, pages(gone.bytes));
    if (!gone.on_host) used[gone.device] -= gone.bytes;
    num_allocations--;
    memmove(allocations + place, allocations + place + 1, (num_allocations - place) * sizeof *allocations);
  }
  pthread_mutex_unlock(&mutex);
}

int memory_kind(const void *address) {
  pthread_mutex_lock(&mutex);
  long place = find(address);
  int kind = place < 0 ? 0 : allocations[place].on_host ? 1 : 2;
  pthread_mutex_unlock(&mutex);
  return kind;
}

void move_bytes(void *to, const void *from, size_t bytes) {
  if (bytes <= MOVED_BYTES || computes()) memmove(to, from, bytes);
}
void fill_bytes(void *to, int value, size_t bytes) {
  if (bytes <= MOVED_BYTES || computes()) memset(to, value, bytes);
}

// Expandable segments: addresses first, memory behind them later. Handles hold the bytes; `map` makes them usable.
void *reserve_addresses(size_t bytes) {
  void *start = mmap(NULL, pages(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return start == MAP_FAILED ? NULL : start;
}
void free_addresses(void *start, size_t bytes) { munmap(start, pages(bytes)); }
bool take_bytes(size_t bytes) {
  int device = current_device();
  pthread_mutex_lock(&mutex);
  bool fits = used[device] + bytes <= device_bytes();
  if (fits) used[device] += bytes;
  pthread_mutex_unlock(&mutex);
  return fits;
}
void give_bytes(size_t bytes) {
  pthread_mutex_lock(&mutex);
  used[current_device()] -= bytes;
  pthread_mutex_unlock(&mutex);
}
void map_addresses(void *start, size_t bytes) {
  mprotect(start, bytes, PROT_READ | PROT_WRITE);
  pthread_mutex_lock(&mutex);
  insert((struct allocation){start, bytes, false, current_device()});
  pthread_mutex_unlock(&mutex);
}
void unmap_addresses(void *start, size_t bytes) {
  pthread_mutex_lock(&mutex);
  for (char *at = start; at < (char *)start + bytes;) {
    long place = find(at);
    if (place < 0) break;
    at = allocations[place].start + allocations[place].bytes;
    num_allocations--;
    memmove(allocations + place, allocations + place + 1, (num_allocations - place) * sizeof *allocations);
  }
  pthread_mutex_unlock(&mutex);
  madvise(start, bytes, MADV_DONTNEED);
  mprotect(start, bytes, PROT_NONE);
}

size_t used_bytes(void) { return used[current_device()]; }
