// CUDA graphs: what is launched between the begin and the end of a capture is recorded and not made, and each launch of
// the graph records the same accesses of memory again. What CUDA refuses in a capture is refused, and ends it.
//
// Numbers are computed by Python (`computing.py`), which is called when a graph is launched.
#include "device.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define OK return cudaSuccess
#define MOST_STREAMS 16
#define MOST_CAPTURES 16
#define MOST_EVENTS 4096

// Streams are known by their place in the capture; a clock counts the work of each that comes before.
struct clock { size_t of[MOST_STREAMS]; };
struct graph {
  uint64_t number;
  struct record *nodes;
  size_t num_nodes, capacity, num_work;
  cudaStream_t streams[MOST_STREAMS];  // the first is where the capture began
  struct clock clocks[MOST_STREAMS];
  int num_streams;
  enum cudaStreamCaptureMode mode;
  pthread_t thread;
  bool invalid;
  int owners;
};
struct event { cudaEvent_t event; struct graph *graph; struct clock clock; };

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct graph *captures[MOST_CAPTURES];
static int num_captures;
static struct event events[MOST_EVENTS];
static int num_events;
static uint64_t next_number = 1;
static __thread enum cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;
static void (*launched)(uint64_t number);

// All below are called with the lock held, unless they take it.
static struct graph *find(cudaStream_t stream, int *place) {
  for (int i = 0; i < num_captures; i++)
    for (int j = 0; j < captures[i]->num_streams; j++)
      if (captures[i]->streams[j] == stream) {
        if (place) *place = j;
        return captures[i];
      }
  return NULL;
}
static int place_of_event(cudaEvent_t event) {
  for (int i = 0; i < num_events; i++)
    if (events[i].event == event) return i;
  return -1;
}
static void append(struct graph *graph, int place, struct record made) {
  if (graph->num_nodes == graph->capacity) {
    graph->capacity = graph->capacity ? 2 * graph->capacity : 1024;
    graph->nodes = realloc(graph->nodes, graph->capacity * sizeof *graph->nodes);
  }
  graph->nodes[graph->num_nodes++] = made;
  if (made.kind <= FILL) graph->clocks[place].of[place]++, graph->num_work++;
}
static void let_go(struct graph *graph) {
  if (--graph->owners) return;
  free(graph->nodes);
  free(graph);
}

bool capture(struct record made) {
  if (!num_captures || !made.stream || made.stream == HOST_STREAM) return false;
  int place;
  pthread_mutex_lock(&mutex);
  struct graph *graph = find((cudaStream_t)(uintptr_t)made.stream, &place);
  if (graph && !graph->invalid) append(graph, place, made);
  pthread_mutex_unlock(&mutex);
  return graph != NULL;
}
bool captures_stream(void *stream) {
  if (!num_captures) return false;
  pthread_mutex_lock(&mutex);
  bool found = find(stream, NULL) != NULL;
  pthread_mutex_unlock(&mutex);
  return found;
}
int refused_on(void *stream) {
  int error = cudaSuccess;
  if (!num_captures) return error;
  pthread_mutex_lock(&mutex);
  struct graph *graph = find(stream, NULL);
  if (graph) {
    error = graph->invalid ? cudaErrorStreamCaptureInvalidated : cudaErrorStreamCaptureUnsupported;
    graph->invalid = true;
  }
  pthread_mutex_unlock(&mutex);
  return error;
}
int invalid_on(void *stream) {
  if (!num_captures) return cudaSuccess;
  pthread_mutex_lock(&mutex);
  struct graph *graph = find(stream, NULL);
  int error = graph && graph->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
  pthread_mutex_unlock(&mutex);
  return error;
}
// Of cudaStreamCaptureMode: a thread in global mode minds its own captures and global ones of others; in thread-local
// mode its own; in relaxed mode none. A relaxed capture minds nothing.
int refused_here(bool always) {
  int error = cudaSuccess;
  if (!num_captures || (thread_mode == cudaStreamCaptureModeRelaxed && !always)) return error;
  pthread_mutex_lock(&mutex);
  for (int i = 0; i < num_captures; i++) {
    struct graph *graph = captures[i];
    bool own = pthread_equal(graph->thread, pthread_self());
    bool minds = own ? graph->mode != cudaStreamCaptureModeRelaxed
                     : graph->mode == cudaStreamCaptureModeGlobal && thread_mode == cudaStreamCaptureModeGlobal;
    if (always || minds) graph->invalid = true, error = cudaErrorStreamCaptureUnsupported;
  }
  pthread_mutex_unlock(&mutex);
  return error;
}

// Events. One that is recorded in a capture stands for the work there, and for nothing that has been done.
int record_captured(void *event, void *stream) {
  if (!num_captures && !num_events) return cudaSuccess;
  int place;
  pthread_mutex_lock(&mutex);
  struct graph *graph = find(stream, &place);
  int known = place_of_event(event), error = graph && graph->invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
  if (graph && !error) {
    if (known < 0 && num_events < MOST_EVENTS) known = num_events++;
    if (known < 0) abort();
    events[known] = (struct event){event, graph, graph->clocks[place]};
  } else if (known >= 0) {
    events[known] = events[--num_events];
  }
  pthread_mutex_unlock(&mutex);
  return error;
}
int wait_captured(void *stream, void *event) {
  if (!num_captures) return cudaSuccess;
  int place, error = cudaSuccess;
  pthread_mutex_lock(&mutex);
  struct graph *graph = find(stream, &place);
  int known = place_of_event(event);
  struct graph *of = known < 0 ? NULL : events[known].graph;
  if (graph && graph->invalid) {
    error = cudaErrorStreamCaptureInvalidated;
  } else if (graph && !of) {
    error = cudaErrorStreamCaptureIsolation;
  } else if (graph && of != graph) {
    error = cudaErrorStreamCaptureMerge;
    of->invalid = true;
  } else if (!graph && of && !stream) {
    error = cudaErrorStreamCaptureImplicit;
    of->invalid = true;
  } else if (!graph && of) {
    // The stream joins the capture.
    if (of->num_streams == MOST_STREAMS) abort();
    graph = of, place = graph->num_streams++;
    graph->streams[place] = stream;
    memset(&graph->clocks[place], 0, sizeof(struct clock));
  }
  if (error && graph) graph->invalid = true;
  if (!error && of)
    for (int i = 0; i < MOST_STREAMS; i++)
      if (events[known].clock.of[i] > graph->clocks[place].of[i]) graph->clocks[place].of[i] = events[known].clock.of[i];
  pthread_mutex_unlock(&mutex);
  return error;
}
int refused_of_event(void *event) {
  pthread_mutex_lock(&mutex);
  int known = place_of_event(event);
  if (known >= 0) events[known].graph->invalid = true;
  pthread_mutex_unlock(&mutex);
  return known >= 0 ? cudaErrorCapturedEvent : refused_here(false);
}
void forget_event(void *event) {
  pthread_mutex_lock(&mutex);
  int known = place_of_event(event);
  if (known >= 0) events[known] = events[--num_events];
  pthread_mutex_unlock(&mutex);
}

// Captures.
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
  // The legacy stream waits for all others, which nothing in a graph can.
  if (!stream) return cudaErrorStreamCaptureUnsupported;
  cudaError_t error = cudaSuccess;
  pthread_mutex_lock(&mutex);
  if (find(stream, NULL) || num_captures == MOST_CAPTURES) {
    error = cudaErrorIllegalState;
  } else {
    struct graph *graph = calloc(1, sizeof *graph);
    graph->number = next_number++;
    graph->streams[graph->num_streams++] = stream;
    graph->mode = mode, graph->thread = pthread_self(), graph->owners = 1;
    captures[num_captures++] = graph;
  }
  pthread_mutex_unlock(&mutex);
  return error;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *made) {
  *made = NULL;
  int place = 0;
  cudaError_t error = cudaSuccess;
  pthread_mutex_lock(&mutex);
  struct graph *graph = find(stream, &place);
  if (!graph || place) {
    pthread_mutex_unlock(&mutex);
    return graph ? cudaErrorStreamCaptureUnmatched : cudaErrorIllegalState;
  }
  bool other = graph->mode != cudaStreamCaptureModeRelaxed && !pthread_equal(graph->thread, pthread_self());
  if (other) error = cudaErrorStreamCaptureWrongThread;
  for (int i = 1; i < graph->num_streams; i++)
    if (graph->clocks[0].of[i] < graph->clocks[i].of[i]) error = cudaErrorStreamCaptureUnjoined;
  if (graph->invalid) error = cudaErrorStreamCaptureInvalidated;
  for (int i = 0; i < num_captures; i++)
    if (captures[i] == graph) captures[i] = captures[--num_captures];
  for (int i = num_events - 1; i >= 0; i--)
    if (events[i].graph == graph) events[i] = events[--num_events];
  if (error) let_go(graph);
  else *made = (cudaGraph_t)graph;
  pthread_mutex_unlock(&mutex);
  return error;
}
static enum cudaStreamCaptureStatus status_of(cudaStream_t stream, struct graph **found) {
  pthread_mutex_lock(&mutex);
  struct graph *graph = num_captures ? find(stream, NULL) : NULL;
  enum cudaStreamCaptureStatus status = !graph           ? cudaStreamCaptureStatusNone
                                        : graph->invalid ? cudaStreamCaptureStatusInvalidated
                                                         : cudaStreamCaptureStatusActive;
  pthread_mutex_unlock(&mutex);
  if (found) *found = graph;
  return status;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
  *status = status_of(stream, NULL);
  OK;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
  *status = (CUstreamCaptureStatus)status_of(stream, NULL);
  return CUDA_SUCCESS;
}
static cudaError_t capture_info(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                cudaGraph_t *graph, size_t *count) {
  struct graph *found;
  *status = status_of(stream, &found);
  if (id) *id = found ? found->number : 0;
  if (graph) *graph = (cudaGraph_t)found;
  if (count) *count = 0;
  OK;
}
// CUDA 12's headers rename this one to its second version, which has no edges, and have a third one with edges.
#if CUDART_VERSION < 13000
cudaError_t cudaStreamGetCaptureInfo_v2(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                        unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                        size_t *count) {
  return capture_info(stream, status, id, graph, count);
}
cudaError_t cudaStreamGetCaptureInfo_v3(
#else
cudaError_t cudaStreamGetCaptureInfo(
#endif
    cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
    const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
  return capture_info(stream, status, id, graph, count);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
  enum cudaStreamCaptureMode before = thread_mode;
  thread_mode = *mode, *mode = before;
  OK;
}

// Graphs.
cudaError_t cudaGraphGetNodes(cudaGraph_t of, cudaGraphNode_t *nodes, size_t *count) {
  *count = ((struct graph *)of)->num_work;
  OK;
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t of, unsigned long long flags) {
  pthread_mutex_lock(&mutex);
  ((struct graph *)of)->owners++;
  pthread_mutex_unlock(&mutex);
  *made = (cudaGraphExec_t)of;
  OK;
}
cudaError_t cudaGraphDestroy(cudaGraph_t gone) {
  pthread_mutex_lock(&mutex);
  let_go((struct graph *)gone);
  pthread_mutex_unlock(&mutex);
  OK;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t gone) { return cudaGraphDestroy((cudaGraph_t)gone); }
cudaError_t cudaGraphLaunch(cudaGraphExec_t of, cudaStream_t stream) {
  struct graph *graph = (struct graph *)of;
  note(GRAPH, stream, "cudaGraphLaunch", graph->num_work, graph->number, 0, 0);
  // Streams and events of the capture are the graph's own, beside those of the same names.
  uint64_t own = (graph->number | 1ull << 31) << 32, first = (uint64_t)(uintptr_t)graph->streams[0];
  for (size_t i = 0; i < graph->num_nodes; i++) {
    struct record node = graph->nodes[i];
    void *on = node.stream == first ? stream : (void *)(uintptr_t)(own ^ node.stream);
    if (node.kind == EVENT || node.kind == WAIT) note(node.kind, on, node.name, own ^ node.a, 0, 0, 0);
    // Memory of the graph is handed out once, in the capture.
    if (node.kind == FRESH || node.kind == WRITE) note(WRITE, on, node.name, node.a, node.b, node.c, 0);
    if (node.kind == READ || node.kind == SHARED) note(node.kind, on, node.name, node.a, node.b, node.c, 0);
  }
  if (launched) launched(graph->number);
  OK;
}

// Python's side: the graph that a stream is captured into, or 0; and what is called when one is launched.
uint64_t null_capture_of(void *stream) {
  struct graph *found;
  return status_of(stream, &found) == cudaStreamCaptureStatusActive ? found->number : 0;
}
void null_on_launch(void (*hook)(uint64_t number)) { launched = hook; }
