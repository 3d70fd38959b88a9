// A part of a captured CUDA graph that runs only where a flag in device memory is not 0 when the graph reaches it.
// CUDA programming guide, "Conditional Graph Nodes". Needs CUDA 12.4 and, for the device call, linking with the device runtime.
#include "ffi.cuh"

namespace santa {

__global__ void set_condition(cudaGraphConditionalHandle handle, const int* flag) { cudaGraphSetConditional(handle, *flag != 0); }

// Where a capture stands: the graph, and what the next node will depend on.
struct Capture {
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t count = 0;

  explicit Capture(cudaStream_t stream) {
    cudaStreamCaptureStatus status;
#if CUDART_VERSION >= 13000
    check(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph, &nodes, &edges, &count), "capture query");
#else
    check(cudaStreamGetCaptureInfo_v3(stream, &status, nullptr, &graph, &nodes, &edges, &count), "capture query");
#endif
    TVM_FFI_ICHECK(status == cudaStreamCaptureStatusActive) << "conditional parts exist only in a stream that is being captured";
  }
};

// flag: int32, one element on the device. From here to conditional_end, what is launched on `body` runs only if flag is not 0.
void conditional_begin(TensorView flag, int64_t body) {
  const DLDevice device = flag.device();
  ffi::CUDADeviceGuard guard(device.device_id);
  const cudaStream_t stream = get_stream(device);
  cudaGraphConditionalHandle handle;
  check(cudaGraphConditionalHandleCreate(&handle, Capture(stream).graph, 0, cudaGraphCondAssignDefault), "conditional handle");
  set_condition<<<1, 1, 0, stream>>>(handle, data<const int>(flag));
  check(cudaGetLastError(), "set_condition");
  const Capture at(stream);
  cudaGraphNodeParams params = {cudaGraphNodeTypeConditional};
  params.conditional.handle = handle;
  params.conditional.type = cudaGraphCondTypeIf;
  params.conditional.size = 1;
  cudaGraphNode_t node;
#if CUDART_VERSION >= 13000
  check(cudaGraphAddNode(&node, at.graph, at.nodes, at.edges, at.count, &params), "conditional node");
  check(cudaStreamUpdateCaptureDependencies(stream, &node, nullptr, 1, cudaStreamSetCaptureDependencies), "conditional node");
#else
  check(cudaGraphAddNode_v2(&node, at.graph, at.nodes, at.edges, at.count, &params), "conditional node");
  check(cudaStreamUpdateCaptureDependencies(stream, &node, 1, cudaStreamSetCaptureDependencies), "conditional node");
#endif
  check(cudaStreamBeginCaptureToGraph(reinterpret_cast<cudaStream_t>(body), params.conditional.phGraph_out[0], nullptr, nullptr, 0,
                                      cudaStreamCaptureModeRelaxed),
        "capture of a conditional part");
}

void conditional_end(int64_t body) {
  cudaGraph_t graph;
  check(cudaStreamEndCapture(reinterpret_cast<cudaStream_t>(body), &graph), "end of a conditional part");
}

}  // namespace santa

TVM_FFI_DLL_EXPORT_TYPED_FUNC(conditional_begin, santa::conditional_begin);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(conditional_end, santa::conditional_end);
