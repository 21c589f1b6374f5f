/* py/tensor_ops.c - the module's functions on one's own tensors: tinsmith.ops gives them their
 * shapes and names.
 *
 * Each borrows its arrays, lets go of the GIL, and takes its turn on one CPU device, which is
 * opened at the first call and stays: its threads belong to the process. */
#include "tensor_ops.h"

#include <pthread.h>

#include "../tensor_ops.h"
#include "arrays.h"
#include "dlpack.h"
#include "module.h"

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static Device *shared;

/* Takes the turn and the device; device_end gives the turn back, whatever came. */
static Status device_begin(Device **dev)
{
    pthread_mutex_lock(&turn);
    Status status = shared ? STATUS_OK : device_open(&shared, "cpu", 0);
    *dev = shared;
    return status;
}

static void device_end(void)
{
    pthread_mutex_unlock(&turn);
}

/* ---- arguments ---- */

/* Rows and, unless it is None, their weight. */
typedef struct Source {
    Tensor rows, weight;
    Rows view;
} Source;

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

static int source_take(Source *source, PyObject *rows, PyObject *weight, const char *name,
                       const char *weight_name)
{
    *source = (Source){0};
    Tensor *x = &source->rows, *w = &source->weight;
    if (tensor_borrow(rows, name, x) < 0 || !is_float(x, name)) goto failed;
    if (x->dims < 1 || x->shape[x->dims - 1] < 1 || x->shape[x->dims - 1] > INT32_MAX) {
        PyErr_Format(PyExc_ValueError, "%s must have a last dimension of at least 1", name);
        goto failed;
    }
    int width = (int)x->shape[x->dims - 1];
    source->view = (Rows){.rows = x->data,
                          .type = x->element == ELEMENT_F32 ? DTYPE_F32 : DTYPE_BF16,
                          .N = x->length / width,
                          .V = width,
                          .D = width};
    if (weight == Py_None) return 0;
    if (tensor_borrow(weight, weight_name, w) < 0 || !is_float(w, weight_name)) goto failed;
    if (w->dims != 2 || w->shape[1] != width || w->shape[0] < 1 || w->shape[0] > INT32_MAX) {
        PyErr_Format(PyExc_ValueError,
                     "%s must be (V, %d), for %s has rows of %d; it has %d dimensions, the last of "
                     "%lld",
                     weight_name, width, name, width, w->dims,
                     w->dims ? (long long)w->shape[w->dims - 1] : 0LL);
        goto failed;
    }
    source->view.weight = w->data;
    source->view.weight_type = w->element == ELEMENT_F32 ? DTYPE_F32 : DTYPE_BF16;
    source->view.V = (int)w->shape[0];
    return 0;
failed:
    source_drop(source);
    return -1;
}

/* A float32 array of so many numbers, or None. */
static int floats_take(Tensor *tensor, PyObject *object, const char *name, int64_t length)
{
    *tensor = (Tensor){0};
    if (object == Py_None) return 0;
    if (tensor_borrow(object, name, tensor) < 0) return -1;
    if (tensor->element == ELEMENT_F32 && tensor->length == length) return 0;
    PyErr_Format(PyExc_ValueError, "%s must be float32 with %lld numbers; it has %lld", name,
                 (long long)length, (long long)tensor->length);
    tensor_drop(tensor);
    return -1;
}

/* ---- results ---- */

/* New arrays for the gradients that are wanted. */
static int gradient_new(const Source *source, int want_rows, int want_weight, PyObject **rows,
                        PyObject **weight, RowsGradient *out)
{
    const Rows *v = &source->view;
    int half = v->type == DTYPE_BF16;
    *out = (RowsGradient){0};
    *rows = *weight = NULL;
    if (want_rows) {
        *rows = array_new(half ? KIND_UINT16 : KIND_FLOAT32, v->N, v->weight ? v->D : v->V, NULL);
        if (!*rows) return -1;
        out->rows = array_data(*rows);
    }
    if (want_weight) {
        *weight = array_new(KIND_FLOAT32, v->V, v->D, NULL);
        if (!*weight) return -1;
        out->weight = array_data(*weight);
    }
    return 0;
}

/* A tuple of new references, None for NULL; on a failed status, its exception. */
static PyObject *results(Status status, PyObject *a, PyObject *b, PyObject *c)
{
    if (!status && a)
        return Py_BuildValue("(NNN)", a, b ? b : Py_NewRef(Py_None), c ? c : Py_NewRef(Py_None));
    Py_XDECREF(a);
    Py_XDECREF(b);
    Py_XDECREF(c);
    return status ? raise_status(status) : NULL;
}

/* ---- the functions ---- */

PyObject *core_topk(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *rows, *weight;
    int K;
    Source source;
    if (!PyArg_ParseTuple(args, "OOi:topk", &rows, &weight, &K)) return NULL;
    if (source_take(&source, rows, weight, weight == Py_None ? "logits" : "hidden", "weight") < 0)
        return NULL;
    Status status = STATUS_OK;
    PyObject *ids = NULL, *logp = NULL;
    if (K < 0 || K > source.view.V) {
        PyErr_Format(PyExc_ValueError, "k must be 0 to the vocabulary's %d, not %d", source.view.V,
                     K);
    } else if ((ids = array_new(KIND_INT32, source.view.N, K, NULL)) &&
               (logp = array_new(KIND_FLOAT32, source.view.N, K, NULL))) {
        Device *dev;
        int32_t *to = array_data(ids);
        float *to_logp = array_data(logp);
        Py_BEGIN_ALLOW_THREADS status = device_begin(&dev);
        if (!status) status = tensor_topk(dev, to, to_logp, &source.view, K);
        device_end();
        Py_END_ALLOW_THREADS
    }
    source_drop(&source);
    if (!logp) Py_CLEAR(ids);
    return results(status, ids, logp, NULL);
}

PyObject *core_gather(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *rows, *weight, *ids, *dlogp, *logp = NULL, *drows = NULL, *dweight = NULL;
    int K, want_rows, want_weight;
    Source source;
    Borrowed own = {0};
    Tensor slope = {0};
    if (!PyArg_ParseTuple(args, "OOOiOpp:gather", &rows, &weight, &ids, &K, &dlogp, &want_rows,
                          &want_weight))
        return NULL;
    if (source_take(&source, rows, weight, weight == Py_None ? "logits" : "hidden", "weight") < 0)
        return NULL;
    Status status = STATUS_OK;
    RowsGradient gradient = {0};
    int64_t count = source.view.N * K;
    if (borrow(ids, KIND_INT32, "ids", &own) < 0) goto done;
    if (own.length != count) {
        PyErr_Format(PyExc_ValueError, "ids must be %lld numbers, %d for each row; they are %lld",
                     (long long)count, K, (long long)own.length);
        goto done;
    }
    if (floats_take(&slope, dlogp, "dlogp", count) < 0) goto done;
    want_weight = want_weight && source.view.weight;
    int wanted = slope.capsule && (want_rows || want_weight);
    if (wanted && gradient_new(&source, want_rows, want_weight, &drows, &dweight, &gradient) < 0)
        goto done;
    logp = array_new(KIND_FLOAT32, source.view.N, K, NULL);
    if (!logp) goto done;
    Device *dev;
    float *to = array_data(logp);
    Py_BEGIN_ALLOW_THREADS status = device_begin(&dev);
    if (!status && gradient.weight)
        dev->zero(dev, gradient.weight, (size_t)source.view.V * (size_t)source.view.D * 4);
    if (!status)
        status =
            tensor_gather(dev, to, gradient, &source.view, own.data, wanted ? slope.data : NULL, K);
    device_end();
    Py_END_ALLOW_THREADS done : source_drop(&source);
    tensor_drop(&slope);
    Py_XDECREF(own.owner);
    return results(status, logp, drows, dweight);
}

typedef struct JsdArguments {
    Source student, teacher;
    Tensor scale;
    Borrowed keep;
    Jsd how;
    int64_t losses; /* numbers of a row */
} JsdArguments;

static int jsd_check(JsdArguments *a, PyObject *keep, PyObject *scale)
{
    const Rows *p = &a->student.view, *q = &a->teacher.view;
    if (p->V != q->V || p->N != q->N) {
        PyErr_Format(PyExc_ValueError,
                     "student has %lld rows over a vocabulary of %d, teacher %lld over %d",
                     (long long)p->N, p->V, (long long)q->N, q->V);
        return -1;
    }
    if (a->how.top_k > p->V) {
        PyErr_Format(PyExc_ValueError, "top_k must be at most the vocabulary's %d, not %d", p->V,
                     (int)a->how.top_k);
        return -1;
    }
    a->losses = !a->how.each ? 1 : a->how.top_k ? a->how.top_k : p->V;
    if (keep != Py_None && borrow(keep, KIND_UINT8, "keep", &a->keep) < 0) return -1;
    if (a->keep.owner && a->keep.length != p->N) {
        PyErr_Format(PyExc_ValueError, "labels must be %lld, one for each row; they are %lld",
                     (long long)p->N, (long long)a->keep.length);
        return -1;
    }
    return floats_take(&a->scale, scale, "scale", p->N * a->losses);
}

PyObject *core_jsd(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *object[6], *loss = NULL, *drows = NULL, *dweight = NULL;
    int want_rows, want_weight;
    JsdArguments a = {0};
    RowsGradient gradient = {0};
    Status status = STATUS_OK;
    if (!PyArg_ParseTuple(args, "OOOOOO(fffipp)pp:jsd", &object[0], &object[1], &object[2],
                          &object[3], &object[4], &object[5], &a.how.beta, &a.how.temperature,
                          &a.how.clip, &a.how.top_k, &a.how.probs, &a.how.each, &want_rows,
                          &want_weight))
        return NULL;
    if (source_take(&a.student, object[0], object[1], "student", "the student's weight") < 0 ||
        source_take(&a.teacher, object[2], object[3], "teacher", "the teacher's weight") < 0 ||
        jsd_check(&a, object[4], object[5]) < 0)
        goto done;
    want_weight = want_weight && a.student.view.weight;
    int wanted = a.scale.capsule && (want_rows || want_weight);
    if (wanted && gradient_new(&a.student, want_rows, want_weight, &drows, &dweight, &gradient) < 0)
        goto done;
    const Rows *p = &a.student.view;
    loss = array_new(KIND_FLOAT32, p->N, a.losses, NULL);
    if (!loss) goto done;
    Device *dev;
    float *to = array_data(loss);
    Py_BEGIN_ALLOW_THREADS status = device_begin(&dev);
    if (!status && gradient.weight)
        dev->zero(dev, gradient.weight, (size_t)p->V * (size_t)p->D * 4);
    if (!status)
        status = tensor_jsd(dev, to, gradient, p, &a.teacher.view, a.keep.data,
                            wanted ? a.scale.data : NULL, a.how);
    device_end();
    Py_END_ALLOW_THREADS done : source_drop(&a.student);
    source_drop(&a.teacher);
    tensor_drop(&a.scale);
    Py_XDECREF(a.keep.owner);
    return results(status, loss, drows, dweight);
}
