"""What the stand-in libraries answer where nobody wrote a function for them.

"Not supported", unless a pattern here says that the function may succeed without
doing anything: because its only work is arithmetic on device memory, which the
stand-in leaves out, or because it sets or frees what nobody reads. A function that
has anything to fill in is not among them: it would lie.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

NOTHING = r"(?!)"


@dataclass(frozen=True)
class Answers:
    not_supported: int  # the library's own status of that name
    succeeds: str = NOTHING  # functions that do nothing and return 0
    makes_handle: str = NOTHING  # functions that write a new handle to argument 1


# cuBLAS in the letters of the BLAS: products, and updates in place.
BLAS = r"cublas[SDCZ](gemm|gemv|ger|axpy|scal|copy|swap|syrk|trsm|trmm)\w*"

LIBRARIES = {
    "libcudart.so.13": Answers(
        801,
        succeeds=r"cudaFuncSetAttribute|cudaKernelSetAttributeForDevice"
        r"|cudaLibraryUnload|cudaProfiler(Start|Stop)",
    ),
    "libcuda.so.1": Answers(801, succeeds=r"cuFuncSetCacheConfig"),
    "libcublas.so.13": Answers(
        15,
        succeeds=BLAS + r"|cublasGemmEx|cublasGemmStridedBatchedEx"
        r"|cublasSet(Stream|MathMode|PointerMode|Workspace|SmCountTarget)(_v2)?"
        r"|cublasDestroy_v2",
        makes_handle=r"cublasCreate_v2",
    ),
    "libcublasLt.so.13": Answers(
        15,
        succeeds=r"cublasLtMatmul|cublasLt\w+(Destroy|SetAttribute)",
        makes_handle=r"cublasLt\w+Create",
    ),
    "libcudnn.so.9": Answers(
        3000,
        succeeds=r"cudnnBackend(DestroyDescriptor|Execute|Finalize|SetAttribute)"
        r"|cudnnBatchNormalization\w+|cudnnDestroy\w+"
        r"|cudnnSet(Stream|(Tensor|Filter|Convolution)NdDescriptor"
        r"|ActivationDescriptor)",
        makes_handle=r"cudnnCreate(?!RNN|CTC)\w*",
    ),
    "libnvrtc.so.13": Answers(
        11,
        succeeds=r"nvrtc(AddNameExpression|CompileProgram|DestroyProgram)"
        r"|nvrtcGet(CUBIN|PTX)",
    ),
    "libcusolver.so.12": Answers(9),
    "libcusparse.so.12": Answers(10),
    "libcusparseLt.so.0": Answers(10),
    "libcufft.so.12": Answers(16),
    "libcurand.so.10": Answers(999),
    "libcufile.so.0": Answers(5001),
    "libcupti.so.13": Answers(27),
    "libnccl.so.2": Answers(5),
    "libnvidia-ml.so.1": Answers(3),
    "libnvshmem_host.so.3": Answers(1),
}


def stub(library: str, function: str) -> str:
    """The function in C. It takes what it is given, as C without prototypes may."""
    answers = LIBRARIES[library]
    if re.fullmatch(answers.makes_handle, function):
        body, supported = "*handle = standin_new_handle(); return 0;", 1
    elif re.fullmatch(answers.succeeds, function):
        body, supported = "return 0;", 1
    else:
        body, supported = f"return {answers.not_supported};", 0
    return (
        f"int {function}(void** handle) "
        f'{{ standin_called("{function}", {supported}); {body} }}\n'
    )
