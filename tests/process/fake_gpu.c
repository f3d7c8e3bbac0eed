/* A GPU and an NCCL that compute nothing, so that torch's own engines for NCCL can be run where there is no GPU.
 *
 * Loaded before libcudart and libnccl (LD_PRELOAD). A kernel runs for as long as the file $FAKE_GPU/busy exists, unless
 * the communicator is aborted. What else the folder $FAKE_GPU says:
 *   connecting   made by whoever connects, which waits for ever while the file "lost" exists
 *   error        communicators tell an error of a remote host
 *   aborted      made when a communicator was aborted
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static volatile int is_aborted, rank_, size_;

static void path_of(const char *name, char *path) { snprintf(path, 4096, "%s/%s", getenv("FAKE_GPU"), name); }

static int has(const char *name) {
    char path[4096];
    path_of(name, path);
    return access(path, F_OK) == 0;
}

static void note(const char *name) {
    char path[4096];
    path_of(name, path);
    close(open(path, O_CREAT | O_WRONLY, 0600));
}

static int is_busy(void) { return has("busy") && !is_aborted; }

static int wait_for_kernels(void) {
    while (is_busy()) usleep(5000);
    return 0;
}

/* the driver */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return 0; }

/* the runtime */
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13020; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13020; return 0; }
int cudaGetDeviceProperties(int *properties, int device) { memset(properties, 0, 512); return 0; }
int cudaGetDeviceProperties_v2(int *properties, int device) { return cudaGetDeviceProperties(properties, device); }
int cudaMemGetInfo(size_t *available, size_t *total) { *available = *total = (size_t)1 << 33; return 0; }
int cudaMalloc(void **memory, size_t bytes) { *memory = malloc(bytes); return 0; }
int cudaFree(void *memory) { free(memory); return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { *stream = (void *)16; return 0; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status) { *status = 0; return 0; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = (void *)32; return 0; }
int cudaEventQuery(void *event) { return is_busy() ? 600 : 0; } /* cudaErrorNotReady */
int cudaEventElapsedTime(float *ms, void *one, void *other) { *ms = 1; return 0; }
int cudaStreamQuery(void *stream) { return is_busy() ? 600 : 0; }
int cudaEventSynchronize(void *event) { return wait_for_kernels(); }
int cudaStreamSynchronize(void *stream) { return wait_for_kernels(); }
int cudaDeviceSynchronize(void) { return wait_for_kernels(); }
const char *cudaGetErrorString(int error) { return "fake"; }
const char *cudaGetErrorName(int error) { return "fake"; }
#define NOTHING(name) int name(void) { return 0; }
NOTHING(cudaSetDevice) NOTHING(cudaGetLastError) NOTHING(cudaPeekAtLastError) NOTHING(cudaEventDestroy)
NOTHING(cudaEventRecord) NOTHING(cudaEventRecordWithFlags) NOTHING(cudaStreamWaitEvent) NOTHING(cudaStreamDestroy)
NOTHING(cudaThreadExchangeStreamCaptureMode) NOTHING(cudaGetDriverEntryPointByVersion) NOTHING(cudaLaunchKernel)
NOTHING(cudaMemcpyAsync) NOTHING(cudaMemsetAsync) NOTHING(cudaDeviceCanAccessPeer) NOTHING(cudaFuncGetAttributes)
NOTHING(cudaLaunchHostFunc) NOTHING(cudaHostUnregister)

/* NCCL; what is not here is of the real library, and not called */
int ncclGetVersion(int *version) { *version = 23007; return 0; }
struct id { char bytes[128]; };
int ncclGetUniqueId(struct id *id) { memset(id, 1, 128); return 0; }
int ncclCommInitRankConfig(void **comm, int size, struct id id, int rank, void *config) {
    rank_ = rank;
    size_ = size;
    note("connecting");
    while (has("lost")) usleep(5000);
    is_aborted = 0;
    *comm = (void *)64;
    return 0;
}
int ncclCommUserRank(void *comm, int *rank) { *rank = rank_; return 0; }
int ncclCommCount(void *comm, int *size) { *size = size_; return 0; }
int ncclCommGetAsyncError(void *comm, int *error) { *error = has("error") ? 6 : 0; return 0; } /* ncclRemoteError */
int ncclCommAbort(void *comm) { is_aborted = 1; note("aborted"); return 0; }
const char *ncclGetErrorString(int error) { return "fake error of a remote host"; }
const char *ncclGetLastError(void *comm) { return "fake"; }
NOTHING(ncclGroupStart) NOTHING(ncclGroupEnd) NOTHING(ncclAllReduce) NOTHING(ncclBroadcast) NOTHING(ncclCommDestroy)
NOTHING(ncclCommFinalize) NOTHING(ncclCommRegister) NOTHING(ncclCommDeregister)
