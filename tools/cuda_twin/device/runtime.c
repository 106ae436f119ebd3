// The CUDA runtime: devices, memory, streams, events, launches. NVIDIA's own headers check the signatures.
#include "device.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define OK return cudaSuccess

// Devices: as an H100 SXM5 of 80 GB in all but their name, so that no figure is taken for one of a GPU.
static __thread int device;
int current_device(void) { return device; }
// All, or none where CUDA is told to see none.
int num_devices(void) {
  const char *count = getenv("NULL_DEVICE_COUNT"), *visible = getenv("CUDA_VISIBLE_DEVICES");
  if (visible && (!*visible || *visible == '-')) return 0;
  return count ? atoi(count) : 1;
}
int device_attribute(int attribute) {
  switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: return 1024;
    case cudaDevAttrMaxBlockDimZ: return 64;
    case cudaDevAttrMaxGridDimX: return 2147483647;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: return 65535;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 49152;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrMaxRegistersPerBlock: return 65536;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMemoryClockRate: return 2619000;
    case cudaDevAttrGlobalMemoryBusWidth: return 5120;
    case cudaDevAttrL2CacheSize: return 50 << 20;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return 2048;
    case cudaDevAttrUnifiedAddressing: return 1;
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrComputeCapabilityMinor: return 0;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return 233472;
    case cudaDevAttrMaxRegistersPerMultiprocessor: return 65536;
    case cudaDevAttrCooperativeLaunch: return 1;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 232448;
    case 102: return 1; // driver: virtual addresses, for expandable segments
    case 106: return 32;
  }
  return 0;
}
cudaError_t cudaGetDeviceCount(int *count) { *count = num_devices(); OK; }
cudaError_t cudaGetDevice(int *current) { *current = device; OK; }
cudaError_t cudaSetDevice(int wanted) {
  if (wanted < 0 || wanted >= num_devices()) return cudaErrorInvalidDevice;
  device = wanted;
  OK;
}
cudaError_t cudaDriverGetVersion(int *version) { *version = 13000; OK; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = 13000; OK; }
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int number) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "null device of the CUDA twin");
  p->uuid.bytes[0] = (char)(number + 1);
  p->totalGlobalMem = device_bytes();
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->sharedMemPerMultiprocessor = 233472;
  p->regsPerBlock = p->regsPerMultiprocessor = 65536;
  p->warpSize = 32;
  p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  p->totalConstMem = 65536;
  p->major = 9;
  p->multiProcessorCount = 132;
  p->l2CacheSize = 50 << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->concurrentKernels = p->unifiedAddressing = p->canMapHostMemory = 1;
  p->asyncEngineCount = 3;
  OK;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int number) {
  *value = device_attribute(attribute);
  OK;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; OK; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = 1; OK; }
cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int number) {
  snprintf(text, length, "0000:%02x:00.0", number + 1);
  OK;
}
static bool of_captures(cudaError_t error) {
  return error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread;
}
const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation               ? "out of memory"
         : error == cudaErrorStreamCaptureIsolation       ? "dependency created on uncaptured work in another stream"
         : error == cudaErrorStreamCaptureImplicit        ? "operation would make the legacy stream depend on a capture"
         : error == cudaErrorStreamCaptureUnjoined        ? "capturing stream has unjoined work"
         : error == cudaErrorStreamCaptureInvalidated     ? "operation failed due to a previous error during capture"
         : of_captures(error)                             ? "operation not permitted when stream is capturing"
         : error                                          ? "error of the null device"
                                                          : "no error";
}
const char *cudaGetErrorName(cudaError_t error) {
  return of_captures(error) ? "cudaErrorStreamCapture" : error ? "cudaErrorOfNullDevice" : "cudaSuccess";
}
static __thread cudaError_t last_error;
static cudaError_t fail(cudaError_t error) { return last_error = error; }
// Ends the function with an error, if there is one.
#define TRY(call)                          \
  do {                                     \
    cudaError_t error_ = (cudaError_t)call; \
    if (error_) return fail(error_);       \
  } while (0)
cudaError_t cudaDeviceSynchronize(void) {
  TRY(refused_here(true));
  note(HOST_WAIT, NULL, "cudaDeviceSynchronize", 0, 0, 0, 0);
  OK;
}
cudaError_t cudaGetLastError(void) { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }

// Memory.
static size_t used_now(void) { size_t used_bytes(void); return used_bytes(); }
cudaError_t cudaMalloc(void **made, size_t bytes) {
  TRY(refused_here(false));
  note(ALLOCATE, NULL, "cudaMalloc", bytes, 0, 0, 0);
  *made = device_memory(bytes);
  return *made ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaFree(void *address) {
  TRY(refused_here(false));
  if (address) note(ALLOCATE, NULL, "cudaFree", 0, 0, 0, 0);
  release_memory(address);
  OK;
}
cudaError_t cudaMallocAsync(void **made, size_t bytes, cudaStream_t stream) { return cudaMalloc(made, bytes); }
cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) { return cudaFree(address); }
cudaError_t cudaHostAlloc(void **made, size_t bytes, unsigned flags) {
  TRY(refused_here(false));
  note(ALLOCATE, NULL, "cudaHostAlloc", bytes, 0, 0, 0);
  *made = host_memory(bytes);
  return *made ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaFreeHost(void *address) {
  TRY(refused_here(false));
  release_memory(address);
  OK;
}
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) {
  *total = device_bytes();
  *free = *total - used_now();
  OK;
}
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *of, const void *address) {
  static const enum cudaMemoryType types[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeHost, cudaMemoryTypeDevice};
  int kind = memory_kind(address);
  memset(of, 0, sizeof *of);
  of->type = types[kind];
  of->device = kind == 2 ? device : -2;
  if (kind) of->devicePointer = of->hostPointer = (void *)address;
  OK;
}
static const char *direction(const void *to, const void *from) {
  static const char *const names[3][3] = {
    {"HtoH", "HtoH", "HtoD pageable"}, {"HtoH", "HtoH", "HtoD pinned"}, {"DtoH pageable", "DtoH pinned", "DtoD"}};
  return names[memory_kind(from)][memory_kind(to)];
}
// Pageable memory is the host's business alone: the driver has read or written it when the call returns.
static void note_copied(const void *to, const void *from, size_t to_bytes, size_t from_bytes, cudaStream_t stream) {
  note_accesses(stream, "copy", memory_kind(from) ? from : NULL, from_bytes, memory_kind(to) ? to : NULL, to_bytes);
}
// A graph would read or write pageable memory whenever it is launched, and nobody waits for it.
static cudaError_t refused_copy(const void *to, const void *from, cudaStream_t stream) {
  return memory_kind(to) && memory_kind(from) ? invalid_on(stream) : refused_on(stream);
}
static cudaError_t copy(void *to, const void *from, size_t bytes, cudaStream_t stream) {
  TRY(refused_copy(to, from, stream));
  note(COPY, stream, direction(to, from), bytes, 0, 0, 0);
  note_copied(to, from, bytes, bytes, stream);
  if (!captures_stream(stream)) move_bytes(to, from, bytes);
  OK;
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  TRY(refused_here(false));
  TRY(copy(to, from, bytes, NULL));
  note(HOST_WAIT, NULL, "cudaMemcpy", 0, 0, 0, 0);
  OK;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int one, const void *from, int other, size_t bytes, cudaStream_t stream) {
  return copy(to, from, bytes, stream);
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  TRY(refused_copy(to, from, stream));
  note(COPY, stream, direction(to, from), width * height, 0, 0, 0);
  if (height) note_copied(to, from, (height - 1) * to_pitch + width, (height - 1) * from_pitch + width, stream);
  for (size_t row = 0; row < height && !captures_stream(stream); row++)
    move_bytes((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  OK;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  TRY(invalid_on(stream));
  note(FILL, stream, "memset", bytes, 0, 0, 0);
  note_accesses(stream, "memset", NULL, 0, to, bytes);
  if (!captures_stream(stream)) fill_bytes(to, value, bytes);
  OK;
}
cudaError_t cudaMemset(void *to, int value, size_t bytes) { return cudaMemsetAsync(to, value, bytes, NULL); }

// Streams: numbers, and nothing that they would wait for. Events: when they were recorded, by the host's clock, since
// whatever is computed is computed at once.
static uintptr_t next_stream = 0x10;
cudaError_t cudaStreamCreate(cudaStream_t *made) { *made = (cudaStream_t)next_stream++; OK; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) { return cudaStreamCreate(made); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority) {
  return cudaStreamCreate(made);
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { OK; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; OK; }
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  TRY(refused_on(stream));
  OK;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  TRY(refused_on(stream));
  TRY(refused_here(false));
  note(HOST_WAIT, stream, "cudaStreamSynchronize", 0, 0, 0, 0);
  OK;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
  TRY(wait_captured(stream, event));
  note(WAIT, stream, "cudaStreamWaitEvent", (uint64_t)(uintptr_t)event, 0, 0, 0);
  OK;
}
cudaError_t cudaEventCreate(cudaEvent_t *made) {
  *made = calloc(1, sizeof(struct timespec));
  return *made ? cudaSuccess : fail(cudaErrorMemoryAllocation);
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) { return cudaEventCreate(made); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  forget_event(event);
  free(event);
  OK;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  TRY(record_captured(event, stream));
  clock_gettime(CLOCK_MONOTONIC, (struct timespec *)event);
  note(EVENT, stream, "cudaEventRecord", (uint64_t)(uintptr_t)event, 0, 0, 0);
  OK;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
  return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  TRY(refused_of_event(event));
  OK;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  TRY(refused_of_event(event));
  note(HOST_WAIT, NULL, "cudaEventSynchronize", (uint64_t)(uintptr_t)event, 0, 0, 0);
  OK;
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t first, cudaEvent_t last) {
  const struct timespec *from = (void *)first, *to = (void *)last;
  *ms = (float)((to->tv_sec - from->tv_sec) * 1e3 + (to->tv_nsec - from->tv_nsec) * 1e-6);
  OK;
}

// Kernels. The C++ functions of a library are registered with their names when it is loaded.
struct function { const void *stub; const char *name; };
static struct function *functions;
static size_t num_functions, capacity;
static bool sorted;
static int by_address(const void *one, const void *other) {
  const char *x = ((const struct function *)one)->stub, *y = ((const struct function *)other)->stub;
  return x < y ? -1 : x > y;
}
static const char *name_of(const void *stub) {
  if (!sorted) qsort(functions, num_functions, sizeof *functions, by_address), sorted = true;
  struct function wanted = {stub, NULL};
  struct function *found = bsearch(&wanted, functions, num_functions, sizeof *functions, by_address);
  return found ? found->name : "?";
}
void **__cudaRegisterFatBinary(void *binary) { static void *handle[1]; return handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
char __cudaInitModule(void **handle) { return 1; }
void __cudaRegisterVar(void **handle, char *variable, char *address, const char *name, int external, size_t bytes,
                       int constant, int global) {}
void __cudaRegisterFunction(void **handle, const char *stub, char *function, const char *name, int limit, void *a,
                            void *b, void *c, void *d, int *size) {
  if (num_functions == capacity) {
    capacity = capacity ? 2 * capacity : 1 << 17;
    functions = realloc(functions, capacity * sizeof *functions);
  }
  functions[num_functions++] = (struct function){stub, name};
  sorted = false;
}
static __thread struct { dim3 grid, block; size_t shared; cudaStream_t stream; } configured;
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configured.grid = grid, configured.block = block, configured.shared = shared, configured.stream = stream;
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, cudaStream_t *stream) {
  *grid = configured.grid, *block = configured.block, *shared = configured.shared, *stream = configured.stream;
  OK;
}
const char *grid_fault(uint64_t x, uint64_t y, uint64_t z, uint64_t threads, uint64_t shared_bytes) {
  if (!x || !y || !z) return "a grid without blocks";
  if (x > 2147483647 || y > 65535 || z > 65535) return "a grid that is too large";
  if (!threads || threads > 1024) return "a block of too many threads";
  return shared_bytes > 232448 ? "more shared memory than a block can have" : NULL;
}
static cudaError_t launch(const void *stub, dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  uint64_t threads = (uint64_t)block.x * block.y * block.z;
  const char *name = name_of(stub), *fault = grid_fault(grid.x, grid.y, grid.z, threads, shared);
  TRY(invalid_on(stream));
  note(LAUNCH, stream, name, grid.x, grid.y, grid.z, threads);
  if (!fault) OK;
  fprintf(stderr, "null device: %s: %s: grid %u %u %u, block %u %u %u, shared memory %zu\n", fault, name, grid.x,
          grid.y, grid.z, block.x, block.y, block.z, shared);
  return fail(cudaErrorInvalidConfiguration);
}
cudaError_t cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
  return launch(stub, grid, block, shared, stream);
}
cudaError_t __cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **args, size_t shared,
                               cudaStream_t stream) {
  return launch(stub, grid, block, shared, stream);
}
cudaError_t cudaLaunchCooperativeKernel(const void *stub, dim3 grid, dim3 block, void **args, size_t shared,
                                        cudaStream_t stream) {
  return launch(stub, grid, block, shared, stream);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *stub, void **args) {
  return launch(stub, config->gridDim, config->blockDim, config->dynamicSmemBytes, config->stream);
}
cudaError_t __cudaGetKernel(void **kernel, const void *stub) { *kernel = (void *)stub; OK; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *of, const void *stub) {
  memset(of, 0, sizeof *of);
  of->maxThreadsPerBlock = 1024;
  of->numRegs = 32;
  of->binaryVersion = of->ptxVersion = 90;
  OK;
}
cudaError_t cudaFuncSetAttribute(const void *stub, enum cudaFuncAttribute attribute, int value) { OK; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *stub, int threads, size_t shared) {
  *blocks = 2;
  OK;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *stub, int threads,
                                                                   size_t shared, unsigned flags) {
  *blocks = 2;
  OK;
}
static int accept(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  void *found = dlsym(RTLD_DEFAULT, symbol);
  *function = found ? found : (void *)accept;
  if (result) *result = cudaDriverEntryPointSuccess;
  OK;
}
