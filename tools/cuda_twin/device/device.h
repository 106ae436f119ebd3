// The null device: what its parts share, and what Python calls (`null_*`).
//
// A library that answers to the names of NVIDIA's runtime, driver, cuBLAS and NCCL. It accepts every launch and computes
// none; device memory is host memory that nothing commits until it is written, so that 80 GB cost nothing. What is asked
// of it is recorded in order, with its stream.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// In the order of `Kind` in tools/cuda_twin/kinds.py.
enum kind {
  LAUNCH = 1,  // a, b, c: grid; d: threads of a block. Name: of the C++ function
  TRITON,      // the same; name: of the Triton kernel
  PRODUCT,     // a, b, c: m, n, k; d: matrices
  COLLECTIVE,  // a: bytes that this rank gives; b: ranks; c: communicator; d: the other rank of a message
  COPY,        // a: bytes. Name: direction, and whether host memory is pinned
  FILL,        // a: bytes
  HOST_WAIT,   // the host waits for the device. Name: of the call
  EVENT,       // a: event, recorded on the stream
  WAIT,        // a: event that the stream waits for
  ALLOCATE,    // a: bytes; real allocations and releases wait for the device. Name: of the call
  UNKNOWN,     // a call that the null device knows by name only, and answers with success
  READ,        // a, b: address and bytes that the work before it on the stream reads; c: what Python knows it by
  WRITE,       // the same, written
  FRESH,       // the same, handed out by the allocator of the stream; d: the record before which it was
  SHARED,      // the same; its memory is not handed out again before what the stream has got is done
  GRAPH,       // a: launches, products, copies and fills in it; b: its number. Launched by the host, in one call
};
// The stream of what the host itself reads and writes in pinned memory.
#define HOST_STREAM (~0ull)

struct record {
  uint32_t kind;
  uint32_t device;
  uint64_t stream;
  const char *name;
  uint64_t a, b, c, d;
};

void note(enum kind kind, void *stream, const char *name, uint64_t a, uint64_t b, uint64_t c, uint64_t d);
// That the work noted last on the stream reads and writes so much; where it does neither, an address is NULL.
void note_accesses(void *stream, const char *name, const void *read, size_t read_bytes, const void *written,
                   size_t written_bytes);
// Graphs (graphs.c). Errors are CUDA's; 0: none.
// Whether the record is of a stream that is captured: it is in the graph then.
bool capture(struct record made);
bool captures_stream(void *stream);
// Of what cannot be captured, on this stream: the capture ends. And of work on a stream whose capture has so ended.
int refused_on(void *stream);
int invalid_on(void *stream);
// Of what no stream is given, and what the mode of this thread decides, unless `always`.
int refused_here(bool always);
int record_captured(void *event, void *stream);
int wait_captured(void *stream, void *event);
int refused_of_event(void *event);
void forget_event(void *event);
// For the generated stubs of calls that nothing here models.
int unknown_call(const char *name);

// Whether bytes are moved, whatever their number, and exchanged between processes: the computing twin's device.
bool computes(void);
// In a null device, copies above this size move nothing: they would commit memory.
#define MOVED_BYTES (1u << 25)

int current_device(void);
int num_devices(void);
size_t device_bytes(void);
void *device_memory(size_t bytes);
void *host_memory(size_t bytes);
void release_memory(void *address);
// 0: not ours, or pageable; 1: pinned; 2: of the device.
int memory_kind(const void *address);
void move_bytes(void *to, const void *from, size_t bytes);
void fill_bytes(void *to, int value, size_t bytes);
int device_attribute(int attribute);
// NULL for a grid that the device takes, else what is wrong with it.
const char *grid_fault(uint64_t x, uint64_t y, uint64_t z, uint64_t threads, uint64_t shared_bytes);
