// The CUDA driver, as PyTorch and Triton use it.
#include "device.h"

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define OK return CUDA_SUCCESS
void *reserve_addresses(size_t bytes);
void free_addresses(void *start, size_t bytes);
bool take_bytes(size_t bytes);
void give_bytes(size_t bytes);
void map_addresses(void *start, size_t bytes);
void unmap_addresses(void *start, size_t bytes);

static int context;
CUresult cuInit(unsigned flags) { OK; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; OK; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; OK; }
CUresult cuDeviceGetCount(int *count) { *count = num_devices(); OK; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = device_attribute(attribute);
  OK;
}
CUresult cuCtxGetCurrent(CUcontext *current) { *current = (CUcontext)&context; OK; }
CUresult cuCtxSetCurrent(CUcontext current) { OK; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = current_device(); OK; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; OK; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { OK; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *made, CUdevice device) { *made = (CUcontext)&context; OK; }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) { *flags = 0; *active = 1; OK; }
CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = error ? "error of the null device" : "no error";
  OK;
}
CUresult cuGetErrorName(CUresult error, const char **text) { *text = error ? "CUDA_ERROR" : "CUDA_SUCCESS"; OK; }

// Triton: a module is nothing, a function its name.
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)&context; OK; }
CUresult cuModuleUnload(CUmodule module) { OK; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)strdup(name);
  OK;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
  OK;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { OK; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { OK; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) {
  *count = 1;
  OK;
}
static CUresult launch(const char *name, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned shared,
                       CUstream stream) {
  const char *fault = grid_fault(x, y, z, threads, shared);
  note(TRITON, stream, name, x, y, z, threads);
  if (!fault) OK;
  fprintf(stderr, "null device: %s: %s: grid %u %u %u, threads %u, shared memory %u\n", fault, name, x, y, z, threads,
          shared);
  return CUDA_ERROR_INVALID_VALUE;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction function, void **args, void **extra) {
  return launch((const char *)function, c->gridDimX, c->gridDimY, c->gridDimZ,
                c->blockDimX * c->blockDimY * c->blockDimZ, c->sharedMemBytes, c->hStream);
}
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                        unsigned bz, unsigned shared, CUstream stream, void **args, void **extra) {
  return launch((const char *)function, gx, gy, gz, bx * by * bz, shared, stream);
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
  if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) {
    *(CUdeviceptr *)value = address;
    return memory_kind((void *)address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
  }
  *(int *)value = attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE ? CU_MEMORYTYPE_DEVICE : 0;
  OK;
}

// Virtual addresses: what expandable segments of PyTorch's allocator stand on. A handle is its size.
CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *of,
                                       CUmemAllocationGranularity_flags flags) {
  *bytes = 2 << 20;
  OK;
}
CUresult cuMemAddressReserve(CUdeviceptr *made, size_t bytes, size_t alignment, CUdeviceptr wanted,
                             unsigned long long flags) {
  *made = (CUdeviceptr)reserve_addresses(bytes);
  return *made ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemAddressFree(CUdeviceptr start, size_t bytes) { free_addresses((void *)start, bytes); OK; }
CUresult cuMemCreate(CUmemGenericAllocationHandle *made, size_t bytes, const CUmemAllocationProp *of,
                     unsigned long long flags) {
  note(ALLOCATE, NULL, "cuMemCreate", bytes, 0, 0, 0);
  *made = bytes;
  return take_bytes(bytes) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) { give_bytes(handle); OK; }
CUresult cuMemMap(CUdeviceptr start, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  map_addresses((void *)start, bytes);
  OK;
}
CUresult cuMemSetAccess(CUdeviceptr start, size_t bytes, const CUmemAccessDesc *to, size_t count) { OK; }
CUresult cuMemUnmap(CUdeviceptr start, size_t bytes) {
  note(ALLOCATE, NULL, "cuMemUnmap", bytes, 0, 0, 0);
  unmap_addresses((void *)start, bytes);
  OK;
}
