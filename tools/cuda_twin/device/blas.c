// cuBLAS and cuBLASLt: matrix products, recorded by their sizes. No header of theirs is at hand: signatures are those of
// the documentation of cuBLAS 13, and handles are opaque.
#include "device.h"

#include <stdlib.h>
#include <string.h>

#define OK return 0
static int handle;
static __thread void *stream;
int cublasCreate_v2(void **made) { *made = &handle; OK; }
int cublasSetStream_v2(void *of, void *wanted) { stream = wanted; OK; }
int cublasGetStream_v2(void *of, void **current) { *current = stream; OK; }
int cublasGetMathMode(void *of, int *mode) { *mode = 0; OK; }
int cublasGetPointerMode_v2(void *of, int *mode) { *mode = 0; OK; }
const char *cublasGetStatusString(int status) { return "status of the null device"; }
const char *cublasGetStatusName(int status) { return "status of the null device"; }

// (handle, transposed A, transposed B, m, n, k, ...): the rest says where and in which type.
#define PRODUCT_OF(name) \
  int name(void *of, int ta, int tb, int m, int n, int k, ...) { \
    note(PRODUCT, stream, #name, m, n, k, 1); \
    OK; \
  }
PRODUCT_OF(cublasGemmEx)
PRODUCT_OF(cublasSgemm_v2)
PRODUCT_OF(cublasDgemm_v2)
PRODUCT_OF(cublasSgemmEx)
int cublasSgemmStridedBatched(void *of, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda,
                              long long sa, const void *b, int ldb, long long sb, const void *beta, void *c, int ldc,
                              long long sc, int batch) {
  note(PRODUCT, stream, "cublasSgemmStridedBatched", m, n, k, batch);
  OK;
}
int cublasDgemmStridedBatched(void *of, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int lda,
                              long long sa, const void *b, int ldb, long long sb, const void *beta, void *c, int ldc,
                              long long sc, int batch) {
  note(PRODUCT, stream, "cublasDgemmStridedBatched", m, n, k, batch);
  OK;
}
int cublasGemmStridedBatchedEx(void *of, int ta, int tb, int m, int n, int k, const void *alpha, const void *a,
                               int a_type, int lda, long long sa, const void *b, int b_type, int ldb, long long sb,
                               const void *beta, void *c, int c_type, int ldc, long long sc, int batch, int compute,
                               int algorithm) {
  note(PRODUCT, stream, "cublasGemmStridedBatchedEx", m, n, k, batch);
  OK;
}

// cuBLASLt: descriptors are ours, of which a layout keeps its rows, columns and matrices.
struct layout { uint64_t rows, columns; int32_t matrices; };
enum { LAYOUT_BATCH_COUNT = 5 };
int cublasLtCreate(void **made) { *made = &handle; OK; }
size_t cublasLtGetVersion(void) { return 130000; }
int cublasLtMatmulDescCreate(void **made, int compute, int scale) { *made = calloc(1, 512); OK; }
int cublasLtMatmulDescDestroy(void *gone) { free(gone); OK; }
int cublasLtMatrixLayoutCreate(void **made, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  struct layout *layout = calloc(1, 512);
  layout->rows = rows, layout->columns = columns, layout->matrices = 1;
  *made = layout;
  OK;
}
int cublasLtMatrixLayoutSetAttribute(void *of, int attribute, const void *value, size_t bytes) {
  if (attribute == LAYOUT_BATCH_COUNT) ((struct layout *)of)->matrices = *(const int32_t *)value;
  OK;
}
int cublasLtMatrixLayoutDestroy(void *gone) { free(gone); OK; }
int cublasLtMatmulPreferenceCreate(void **made) { *made = calloc(1, 512); OK; }
int cublasLtMatmulPreferenceDestroy(void *gone) { free(gone); OK; }
int cublasLtMatmulAlgoGetHeuristic(void *of, void *product, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *found) {
  memset(results, 0, 64);
  *found = 1;
  OK;
}
int cublasLtMatmul(void *of, void *product, const void *alpha, const void *a, struct layout *a_layout, const void *b,
                   struct layout *b_layout, const void *beta, const void *c, struct layout *c_layout, void *d,
                   struct layout *d_layout, const void *algorithm, void *workspace, size_t bytes, void *on) {
  uint64_t m = d_layout->rows, k = a_layout->rows == m ? a_layout->columns : a_layout->rows;
  note(PRODUCT, on, "cublasLtMatmul", m, d_layout->columns, k, d_layout->matrices);
  OK;
}
