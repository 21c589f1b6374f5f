/* cuda/weights/weight_load.cuh - the device's services for frozen weights, and the table of those
 * with blocks. */
#ifndef TINSMITH_CUDA_WEIGHTS_WEIGHT_LOAD_CUH
#define TINSMITH_CUDA_WEIGHTS_WEIGHT_LOAD_CUH

#include "packed.cuh"

/* The device's services of these names, its table, and the removal of entries when memory is
 * released. */
size_t device_frozen_bytes(Device *dev, DType kept, int rows, int cols);
int device_frozen_continues(Device *dev, const frozen *w, const frozen *next, int rows, int cols);
int device_frozen_load(Device *dev, frozen *to, DType kept, const void *from, DType type, int rows,
                       int cols);
Status frozen_open(CudaDevice *cuda);
void frozen_close(CudaDevice *cuda);
void frozen_forget(CudaDevice *cuda, const void *memory, size_t bytes);

/* The weight at that address, or false: it is bf16. */
bool packed_find(CudaDevice *cuda, const frozen *w, int cols, Packed *found);
/* A weight of that type at `data`; false if the device has no such type. */
bool packed_at(const void *data, DType type, int cols, Packed *made);

#endif
