/* no_cuda.c: what a build without nvcc answers when asked for a GPU. */
#include "backend.h"
#include "error.h"

int qx_backend_cuda_create(struct qx_backend **out, int device, struct qx_error *err)
{
    (void)device;
    *out = NULL;
    return qx_fail(err, QX_E_DEVICE, "no-cuda",
                   "this qx was built without CUDA; build it where nvcc is installed, or use the cpu");
}

int qx_backend_cuda_count(void)
{
    return 0;
}
