/* binding/tensor_functions.c - the module's functions on a caller's tensors. tinsmith.ops adds
 * shapes and names.
 *
 * Each function borrows its arrays, releases the GIL, and takes its turn on the device where they
 * are. Its results are there too; small arrays may come from host memory. */
#include "tensor_functions.h"

#include "../functional/tensor_ops.h"
#include "arrays.h"
#include "dlpack.h"
#include "place.h"
#include "status.h"

/* Rows and, unless it is None, their weight. */
typedef struct Source {
    Tensor rows, weight;
    TensorRows view;
} Source;

/* Numbers besides the rows: in host memory, in the device's memory, or both. */
typedef struct Given {
    Tensor tensor;
    Borrowed array;
    const void *host, *data; /* data: for the device, in its turn */
    void *memory;            /* a copy on the device, if the numbers were uploaded */
    size_t bytes;
} Given;

typedef struct Result {
    PyObject *object;
    DeviceArray *array; /* NULL: NumPy's */
    void *data;         /* for the device, in its turn */
} Result;

enum { GIVEN = 3, RESULTS = 4 };

typedef struct TensorCall {
    Place place;
    Source rows, teacher;
    Given given[GIVEN];
    Borrowed keep;
    Result result[RESULTS];
    int K;
    Jsd how;
} TensorCall;

typedef Status Work(Device *dev, TensorCall *call);

/* ---- arguments ---- */

static void source_drop(Source *source)
{
    tensor_drop(&source->rows);
    tensor_drop(&source->weight);
}

static int is_float(const Tensor *tensor, const char *name)
{
    if (tensor->element == ELEMENT_F32 || tensor->element == ELEMENT_BF16) return 1;
    PyErr_Format(PyExc_TypeError, "%s must be float32 or bfloat16, not of integers", name);
    return 0;
}

/* The first array of a call decides the place of all. */
static int source_take(Source *source, Place place, PyObject *rows, PyObject *weight,
                       const char *name, const char *weight_name)
{
    Tensor *x = &source->rows, *w = &source->weight;
    if (tensor_borrow(rows, name, place, x) < 0 || !is_float(x, name)) return -1;
    if (x->dims < 1 || x->shape[x->dims - 1] < 1 || x->shape[x->dims - 1] > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s must have a last dimension of at least 1", name);
        return -1;
    }
    int width = (int)x->shape[x->dims - 1];
    source->view = (TensorRows){.rows = x->data,
                                .type = x->element == ELEMENT_F32 ? DTYPE_F32 : DTYPE_BF16,
                                .N = x->length / width,
                                .V = width,
                                .D = width};
    if (weight == Py_None) return 0;
    if (tensor_borrow(weight, weight_name, place, w) < 0 || !is_float(w, weight_name)) return -1;
    if (w->dims != 2 || w->shape[1] != width || w->shape[0] < 1 || w->shape[0] > INT32_MAX) {
        PyErr_Format(PyExc_ValueError,
                     "%s must be (V, %d), for %s has rows of %d; it has %d dimensions, the last of "
                     "%lld",
                     weight_name, width, name, width, w->dims,
                     w->dims ? (long long)w->shape[w->dims - 1] : 0LL);
        return -1;
    }
    source->view.weight = w->data;
    source->view.weight_type = w->element == ELEMENT_F32 ? DTYPE_F32 : DTYPE_BF16;
    source->view.V = (int)w->shape[0];
    return 0;
}

/* A float32 array of `length` numbers, or None, in host memory or where the rows are. */
static int floats_take(TensorCall *call, Given *given, PyObject *object, const char *name,
                       int64_t length)
{
    Place place;
    Tensor *tensor = &given->tensor;
    if (object == Py_None) return 0;
    if (tensor_place(object, name, &place) < 0) return -1;
    if (tensor_borrow(object, name, place == PLACE_CPU ? place : call->place, tensor) < 0)
        return -1;
    if (tensor->element != ELEMENT_F32 || tensor->length != length) {
        PyErr_Format(PyExc_ValueError, "%s must be float32 with %lld numbers; it has %lld", name,
                     (long long)length, (long long)tensor->length);
        return -1;
    }
    given->bytes = (size_t)length * sizeof(float);
    given->data = tensor->data;
    if (place == PLACE_CPU) given->host = tensor->data;
    return 0;
}

static int ids_take(TensorCall *call, Given *given, PyObject *ids)
{
    if (borrow_copy(ids, KIND_INT32, "ids", &given->array) < 0) return -1;
    int64_t count = call->rows.view.N * call->K;
    if (given->array.length != count) {
        PyErr_Format(PyExc_ValueError, "ids must be %lld numbers, %d for each row; they are %lld",
                     (long long)count, call->K, (long long)given->array.length);
        return -1;
    }
    given->host = given->data = given->array.data;
    given->bytes = (size_t)count * sizeof(int32_t);
    return 0;
}

/* ---- results ---- */

static int result_new(TensorCall *call, int index, Kind kind, int64_t rows, int64_t cols)
{
    Result *r = &call->result[index];
    r->object = call->place == PLACE_CPU ? array_new(kind, rows, cols, NULL)
                                         : device_array_new(call->place, kind, rows * cols);
    if (!r->object) return -1;
    r->array = device_array_of(r->object);
    if (!r->array) r->data = array_data(r->object);
    return 0;
}

static Kind kind_of(DType type)
{
    return type == DTYPE_F32 ? KIND_FLOAT32 : KIND_UINT16;
}

/* New arrays for the requested gradients: the second and third result. */
static int gradient_new(TensorCall *call, int want_rows, int want_weight)
{
    const TensorRows *v = &call->rows.view;
    if (want_rows && result_new(call, 1, kind_of(v->type), v->N, v->weight ? v->D : v->V) < 0)
        return -1;
    if (!want_weight || !v->weight) return 0;
    return result_new(call, 2, kind_of(v->weight_type), v->V, v->D);
}

static RowsGradient gradient_of(const TensorCall *call)
{
    return (RowsGradient){call->result[1].data, call->result[2].data};
}

/* ---- a call ---- */

/* Allocates device memory for results and for numbers from the host. */
static Status call_place(TensorCall *call, Device *dev)
{
    for (Result *r = call->result; r < call->result + RESULTS; r++) {
        if (!r->array) continue;
        TRY(device_array_fill(dev, r->array));
        r->data = r->array->memory;
    }
    for (Given *g = call->given; g < call->given + GIVEN; g++) {
        if (call->place == PLACE_CPU || !g->host) continue;
        TRY(dev->alloc(dev, &g->memory, g->bytes));
        dev->upload(dev, g->memory, g->host, g->bytes);
        g->data = g->memory;
    }
    return STATUS_OK;
}

static Status call_turn(TensorCall *call, Work *work)
{
    Device *dev;
    Status status = turn_begin(call->place, &dev);
    if (!status) status = call_place(call, dev);
    if (!status) status = work(dev, call);
    for (Given *g = call->given; g < call->given + GIVEN; g++)
        if (g->memory) dev->release(dev, g->memory, g->bytes);
    turn_end();
    return status;
}

static void call_drop(TensorCall *call)
{
    source_drop(&call->rows);
    source_drop(&call->teacher);
    for (Given *g = call->given; g < call->given + GIVEN; g++) {
        tensor_drop(&g->tensor);
        Py_CLEAR(g->array.owner);
    }
    Py_CLEAR(call->keep.owner);
}

/* For a failed call, with the exception set. */
static PyObject *call_refuse(TensorCall *call)
{
    for (Result *r = call->result; r < call->result + RESULTS; r++) Py_CLEAR(r->object);
    call_drop(call);
    return NULL;
}

/* Does the work without the GIL; returns a tuple of the first `count` results, None for those not
 * requested. */
static PyObject *call_run(TensorCall *call, Work *work, int count)
{
    Status status;
    Py_BEGIN_ALLOW_THREADS;
    status = call_turn(call, work);
    Py_END_ALLOW_THREADS;
    if (status) {
        raise_status(status);
        return call_refuse(call);
    }
    call_drop(call);
    PyObject *out = PyTuple_New(count);
    for (int i = 0; i < count; i++) {
        PyObject *object = call->result[i].object;
        if (out)
            PyTuple_SetItem(out, i, object ? object : Py_NewRef(Py_None));
        else
            Py_XDECREF(object);
    }
    return out;
}

/* ---- the functions ---- */

static Status topk_work(Device *dev, TensorCall *call)
{
    return tensor_topk(dev, call->result[0].data, call->result[1].data, &call->rows.view, call->K);
}

PyObject *core_topk(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *rows, *weight;
    TensorCall call = {0};
    if (!PyArg_ParseTuple(args, "OOO&:topk", &rows, &weight, whole_from, &call.K)) return NULL;
    const char *name = weight == Py_None ? "logits" : "hidden";
    if (tensor_place(rows, name, &call.place) < 0 ||
        source_take(&call.rows, call.place, rows, weight, name, "weight") < 0)
        return call_refuse(&call);
    const TensorRows *v = &call.rows.view;
    if (call.K < 0 || call.K > v->V) {
        PyErr_Format(PyExc_ValueError, "k must be 0 to the vocabulary's %d, not %d", v->V, call.K);
        return call_refuse(&call);
    }
    if (result_new(&call, 0, KIND_INT32, v->N, call.K) < 0 ||
        result_new(&call, 1, KIND_FLOAT32, v->N, call.K) < 0)
        return call_refuse(&call);
    return call_run(&call, topk_work, 2);
}

static Status gather_work(Device *dev, TensorCall *call)
{
    const TensorRows *rows = &call->rows.view;
    const int32_t *ids = call->given[0].host;
    int least = call->given[2].data ? -1 : 0; /* in a gradient -1 is −lse alone: no logit */
    for (int64_t i = 0; i < rows->N * call->K; i++)
        if (ids[i] < least || ids[i] >= rows->V)
            return fail(STATUS_INDEX, "ids[%lld] is %d, the vocabulary has %d ids", (long long)i,
                        (int)ids[i], rows->V);
    if (call->given[2].data)
        return tensor_gather_backward(dev, gradient_of(call), rows, call->given[0].data,
                                      call->given[1].data, call->given[2].data, call->K);
    return tensor_gather(dev, call->result[0].data, call->result[3].data, gradient_of(call), rows,
                         call->given[0].data, call->given[1].data, call->K);
}

PyObject *core_gather(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *rows, *weight, *ids, *dlogp, *lse;
    int want_rows, want_weight;
    TensorCall call = {0};
    if (!PyArg_ParseTuple(args, "OOOiOOpp:gather", &rows, &weight, &ids, &call.K, &dlogp, &lse,
                          &want_rows, &want_weight))
        return NULL;
    const char *name = weight == Py_None ? "logits" : "hidden";
    if (tensor_place(rows, name, &call.place) < 0 ||
        source_take(&call.rows, call.place, rows, weight, name, "weight") < 0 ||
        ids_take(&call, &call.given[0], ids) < 0 ||
        floats_take(&call, &call.given[1], dlogp, "dlogp", call.rows.view.N * call.K) < 0 ||
        floats_take(&call, &call.given[2], lse, "lse", 2 * call.rows.view.N) < 0)
        return call_refuse(&call);
    if (lse != Py_None && dlogp == Py_None) {
        PyErr_SetString(PyExc_ValueError, "with the rows' lse only a gradient is to be had: dlogp");
        return call_refuse(&call);
    }
    if ((lse == Py_None && (result_new(&call, 0, KIND_FLOAT32, call.rows.view.N, call.K) < 0 ||
                            result_new(&call, 3, KIND_FLOAT32, call.rows.view.N, 2) < 0)) ||
        (dlogp != Py_None && gradient_new(&call, want_rows, want_weight) < 0))
        return call_refuse(&call);
    return call_run(&call, gather_work, RESULTS);
}

/* The number of kept rows, or -1 with an exception. */
static int64_t jsd_check(TensorCall *call, PyObject *keep)
{
    const TensorRows *p = &call->rows.view, *q = &call->teacher.view;
    if (p->V != q->V || p->N != q->N) {
        PyErr_Format(PyExc_ValueError,
                     "student has %lld rows over a vocabulary of %d, teacher %lld over %d",
                     (long long)p->N, p->V, (long long)q->N, q->V);
        return -1;
    }
    if (call->how.top_k > p->V) {
        PyErr_Format(PyExc_ValueError, "top_k must be at most the vocabulary's %d, not %d", p->V,
                     (int)call->how.top_k);
        return -1;
    }
    if (keep == Py_None) return p->N;
    if (borrow_copy(keep, KIND_UINT8, "keep", &call->keep) < 0) return -1;
    if (call->keep.length != p->N) {
        PyErr_Format(PyExc_ValueError, "labels must be %lld, one for each row; they are %lld",
                     (long long)p->N, (long long)call->keep.length);
        return -1;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < p->N; i++) kept += ((const unsigned char *)call->keep.data)[i] != 0;
    return kept;
}

static Status jsd_work(Device *dev, TensorCall *call)
{
    return tensor_jsd(dev, call->result[0].data, gradient_of(call), &call->rows.view,
                      &call->teacher.view, call->keep.data, call->given[0].data, call->how);
}

PyObject *core_jsd(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *object[6];
    int want_rows, want_weight;
    TensorCall call = {0};
    Jsd *how = &call.how;
    if (!PyArg_ParseTuple(args, "OOOOOO(fffO&pp)pp:jsd", &object[0], &object[1], &object[2],
                          &object[3], &object[4], &object[5], &how->beta, &how->temperature,
                          &how->clip, whole_from, &how->top_k, &how->probs, &how->each, &want_rows,
                          &want_weight))
        return NULL;
    if (tensor_place(object[0], "student", &call.place) < 0 ||
        source_take(&call.rows, call.place, object[0], object[1], "student",
                    "the student's weight") < 0 ||
        source_take(&call.teacher, call.place, object[2], object[3], "teacher",
                    "the teacher's weight") < 0)
        return call_refuse(&call);
    int64_t kept = jsd_check(&call, object[4]);
    int64_t each = !how->each ? 1 : how->top_k ? how->top_k : call.rows.view.V;
    if (kept < 0 || floats_take(&call, &call.given[0], object[5], "scale", kept * each) < 0)
        return call_refuse(&call);
    if (result_new(&call, 0, KIND_FLOAT32, kept, each) < 0 ||
        (object[5] != Py_None && gradient_new(&call, want_rows, want_weight) < 0))
        return call_refuse(&call);
    return call_run(&call, jsd_work, 3);
}
