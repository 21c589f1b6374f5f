/* binding/module.c - the extension module: its state, its types and its tables. */
#include <Python.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../cpu/device.h"
#include "../registry/registry.h"
#include "arrays.h"
#include "checksum.h"
#include "dlpack.h"
#include "finite.h"
#include "place.h"
#include "status.h"
#include "tensor_functions.h"
#include "turn.h"

/* ---- tables ---- */

static int loss_inputs(const Loss *loss, PyObject *list)
{
    for (int j = 0; j < LOSS_INPUTS && loss->input[j].name; j++) {
        PyObject *item =
            Py_BuildValue("{s:s,s:N,s:z,s:d}", "name", loss->input[j].name, "required",
                          PyBool_FromLong(loss->input[j].required), "fallback", loss->input[j].from,
                          "default", (double)loss->input[j].missing);
        if (!item || PyList_Append(list, item) < 0) {
            Py_XDECREF(item);
            return -1;
        }
        Py_DECREF(item);
    }
    return 0;
}

static PyObject *loss_row(const Loss *loss)
{
    PyObject *inputs = PyList_New(0), *config = PyDict_New();
    if (!inputs || !config || loss_inputs(loss, inputs) < 0) goto failed;
    for (int j = 0; j < LOSS_KEYS && loss->key[j].name; j++) {
        PyObject *value = isnan(loss->key[j].initial) ? Py_NewRef(Py_None)
                                                      : PyFloat_FromDouble(loss->key[j].initial);
        if (!value || PyDict_SetItemString(config, loss->key[j].name, value) < 0) {
            Py_XDECREF(value);
            goto failed;
        }
        Py_DECREF(value);
    }
    const char *gate = loss->gate == UNGATED ? NULL : loss->input[loss->gate].name;
    return Py_BuildValue("{s:s,s:N,s:N,s:N,s:z,s:N,s:N}", "name", loss->name, "multi",
                         PyBool_FromLong(loss->multi), "taught", PyBool_FromLong(loss->taught),
                         "recorded", PyBool_FromLong(loss->recorded), "gate", gate, "inputs",
                         inputs, "config", config);
failed:
    Py_XDECREF(inputs);
    Py_XDECREF(config);
    return NULL;
}

static PyObject *core_losses(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    PyObject *list = PyList_New(0);
    for (int i = 0; list && loss_at(i); i++) {
        PyObject *row = loss_row(loss_at(i));
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *core_slot_groups(PyObject *module, PyObject *unused)
{
    (void)module, (void)unused;
    static const char *const name[] = {[ATTN] = "attn", [MLP] = "mlp", [UNEMBED] = "unembed"};
    static const struct {
        const char *slot;
        Group group;
    } matrix[] = {
#define MODEL_MATRIX(slot, rows, cols, present, group) {#slot, group},
#define LAYER_MATRIX(slot, count, rows, cols, present, group, factors) {#slot, group},
#include "../model/weights.inc"
    };
    PyObject *found = PyDict_New();
    for (size_t i = 0; found && i < sizeof matrix / sizeof *matrix; i++) {
        if (matrix[i].group == NONE) continue;
        PyObject *group = PyUnicode_FromString(name[matrix[i].group]);
        if (!group || PyDict_SetItemString(found, matrix[i].slot, group) < 0) Py_CLEAR(found);
        Py_XDECREF(group);
    }
    return found;
}

static PyObject *core_devices(PyObject *module, PyObject *args)
{
    (void)module;
    const char *only = NULL;
    if (!PyArg_ParseTuple(args, "|s:devices", &only)) return NULL;
    static const char *const names[] = {"cpu", "cpu-bf16", "cpu-int16", "cuda", "cuda-emulated"};
    PyObject *found = PyDict_New();
    size_t count = only ? 1 : sizeof names / sizeof *names;
    for (size_t i = 0; found && i < count; i++) {
        const char *name = only ? only : names[i];
        Device *dev;
        Status status;
        NO_GIL(status = device_open(&dev, name, 1));
        PyObject *reason = PyUnicode_FromString(status ? status_text() : "");
        if (!status) NO_GIL(dev->close(dev));
        if (!reason || PyDict_SetItemString(found, name, reason) < 0) Py_CLEAR(found);
        Py_XDECREF(reason);
    }
    return found;
}

static PyObject *core_cards(PyObject *module, PyObject *args)
{
    (void)module;
    const char *kind;
    if (!PyArg_ParseTuple(args, "s:cards", &kind)) return NULL;
    PyObject *list = PyList_New(0);
    DeviceCard card = {.count = 1};
    for (int i = 0; list && i < card.count; i++) {
        char name[64];
        Status status;
        snprintf(name, sizeof name, i ? "%.40s:%d" : "%.40s", kind, i);
        NO_GIL(status = device_card(&card, name));
        if (status) {
            Py_DECREF(list);
            return raise_status(status);
        }
        PyObject *row = Py_BuildValue("(ssn(ii))", name, card.name, (Py_ssize_t)card.bytes,
                                      card.major, card.minor);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *core_memory(PyObject *module, PyObject *args)
{
    (void)module;
    const char *name;
    Device *dev;
    size_t free_bytes, all_bytes;
    if (!PyArg_ParseTuple(args, "s:memory", &name)) return NULL;
    Status status = device_open(&dev, name, 1);
    if (status) return raise_status(status);
    dev->memory(dev, &free_bytes, &all_bytes);
    dev->close(dev);
    return Py_BuildValue("(nn)", (Py_ssize_t)free_bytes, (Py_ssize_t)all_bytes);
}

static PyObject *core_bf16_is_fast(PyObject *module, PyObject *args)
{
    (void)module;
    (void)args;
    return PyBool_FromLong(cpu_bf16_is_fast());
}

static PyObject *core_computes_with(PyObject *module, PyObject *args)
{
    (void)module;
    const char *name;
    if (!PyArg_ParseTuple(args, "s:computes_with", &name)) return NULL;
    for (CpuInputs inputs = 0; inputs < CPU_KINDS; inputs++)
        if (strcmp(name, cpu_names[inputs]) == 0)
            return PyUnicode_FromString(cpu_instructions(inputs));
    Device *dev;
    Status status;
    NO_GIL(status = device_open(&dev, name, 1));
    if (status) return PyUnicode_FromString("");
    PyObject *library = PyUnicode_DecodeFSDefault(dev->library ? dev->library : "");
    NO_GIL(dev->close(dev));
    return library;
}

static PyObject *core_use_isa(PyObject *module, PyObject *name)
{
    (void)module;
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);
    if (!text) return NULL;
    cpu_widest(text);
    Py_RETURN_NONE;
}

static PyMethodDef core_methods[] = {
    {"losses", core_losses, METH_NOARGS,
     "losses() -> list[dict]\n\nThe table of losses: name, multi, taught, recorded, gate, inputs, "
     "config (csrc/train/losses.c)."},
    {"slot_groups", core_slot_groups, METH_NOARGS,
     "slot_groups() -> dict[str, str]\n\nThe switch that trains beside each matrix's slot "
     "(csrc/model/weights.inc)."},
    {"devices", core_devices, METH_VARARGS,
     "devices(name=None) -> dict[str, str]\n\nDevice names, each with '' or the sentence that says "
     "why it can't be opened."},
    {"cards", core_cards, METH_VARARGS,
     "cards(kind) -> list[tuple]\n\nThe GPUs of this machine, for 'cuda': the device's name, the "
     "card's, its bytes of memory, and its compute capability. None is opened."},
    {"bf16_is_fast", core_bf16_is_fast, METH_NOARGS,
     "bf16_is_fast() -> bool\n\nWhether this processor's products are faster in bf16 than in f32."},
    {"use_isa", core_use_isa, METH_O,
     "use_isa(name) -> None\n\nThe widest instruction set of CPUs that are opened from now on."},
    {"computes_with", core_computes_with, METH_VARARGS,
     "computes_with(device) -> str\n\nA CPU's instruction set, or a GPU's library of products; '' "
     "where there is none, or the device can't be opened."},
    {"memory", core_memory, METH_VARARGS,
     "memory(device) -> (int, int)\n\nBytes that a device can give, and that it has in all."},
    {"topk", core_topk, METH_VARARGS,
     "topk(rows, weight or None, k) -> (ids, logprobs)\n\nSee tinsmith.ops."},
    {"gather", core_gather, METH_VARARGS,
     "gather(rows, weight or None, ids, K, dlogprobs or None, lse or None, want_rows, want_weight) "
     "-> (logprobs, drows, dweight, lse)\n\nSee tinsmith.ops."},
    {"jsd", core_jsd, METH_VARARGS,
     "jsd(student, weight, teacher, weight, keep, scale, how, want_rows, want_weight) -> "
     "(loss, drows, dweight)\n\nSee tinsmith.ops."},
    {"first_bad", core_first_bad, METH_O,
     "first_bad(array) -> int\n\nThe index of the first number that is not finite, or -1."},
    {"checksum", core_checksum, METH_O,
     "checksum(array) -> int\n\nA number of 64 bits that a changed byte changes."},
    {"weights_code", core_weights_code, METH_NOARGS,
     "weights_code() -> int\n\nOf the code by which weights become their bytes in memory."},
    {"dlpack_check", dlpack_check, METH_VARARGS,
     "dlpack_check(capsule, name, device_type)\n\nRefuses a capsule that describes no memory there "
     "can be, or another device's."},
    {"dlpack_lend", dlpack_lend, METH_VARARGS,
     "dlpack_lend(array, bf16, versioned, shape=None) -> capsule\n\nA NumPy array, or one on a GPU "
     "in this shape, as DLPack."},
    {"array_device", array_device, METH_O,
     "array_device(array) -> int\n\nThe ordinal of the GPU that a result of the core is on."},
    {"cuda_arrays_through", cuda_arrays_through, METH_VARARGS,
     "cuda_arrays_through(name) -> None\n\nThe device that arrays on a GPU are for: 'cuda', or, "
     "for tests, 'cuda-emulated'."},
    {NULL, NULL, 0, NULL},
};

/* ---- the module ---- */

static int add_type(PyObject *module, PyType_Spec *spec, PyTypeObject **type)
{
    *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    return *type ? PyModule_AddType(module, *type) : -1;
}

/* TINSMITH_ISA limits the CPU's instruction sets, for debugging. A bad value is refused when the
 * device is opened, where every refusal is a sentence. */
static int isa_init(void)
{
    PyObject *os = PyImport_ImportModule("os");
    PyObject *value = os ? PyObject_CallMethod(os, "getenv", "ss", "TINSMITH_ISA", "") : NULL;
    const char *name = value ? PyUnicode_AsUTF8AndSize(value, NULL) : NULL;
    if (name) cpu_widest(name);
    Py_XDECREF(value);
    Py_XDECREF(os);
    return name ? 0 : -1;
}

/* The strings of sys.path, joined by ':'; NULL with an exception. */
static PyObject *packages_new(void)
{
    PyObject *path = PySys_GetObject("path"), *folders = PyList_New(0), *joined = NULL;
    Py_ssize_t count = path && PyList_Check(path) ? PyList_Size(path) : 0;
    int failed = !folders;
    for (Py_ssize_t i = 0; !failed && i < count; i++) {
        PyObject *folder = PyList_GetItem(path, i);
        if (PyUnicode_Check(folder) && PyUnicode_GetLength(folder) > 0)
            failed = PyList_Append(folders, folder) < 0;
    }
    PyObject *colon = PyUnicode_FromString(":");
    if (!failed && colon) joined = PyUnicode_Join(colon, folders);
    Py_XDECREF(colon);
    Py_XDECREF(folders);
    return joined;
}

/* An environment variable as bytes; "" if it is not set. */
static PyObject *variable_new(const char *name)
{
    PyObject *os = PyImport_ImportModule("os");
    PyObject *value = os ? PyObject_CallMethod(os, "getenv", "ss", name, "") : NULL;
    PyObject *bytes = value ? PyUnicode_EncodeFSDefault(value) : NULL;
    Py_XDECREF(value);
    Py_XDECREF(os);
    return bytes;
}

/* NULL for "". */
static const char *named_in(PyObject *bytes)
{
    const char *text = PyBytes_AsString(bytes);
    return *text ? text : NULL;
}

/* TINSMITH_CUBLASLT is the path of a cuBLASLt for the CUDA device, or "none". Without it, the
 * device also searches the folders of Python's packages. TINSMITH_CUDA_LOG is the file to which its
 * choices of algorithms are logged. */
static int libraries_init(void)
{
    PyObject *packages = packages_new(), *named = variable_new("TINSMITH_CUBLASLT");
    PyObject *log = variable_new("TINSMITH_CUDA_LOG");
    PyObject *folders = packages ? PyUnicode_EncodeFSDefault(packages) : NULL;
    int status = -1;
    if (named && log && folders) {
        status = device_libraries(named_in(named), PyBytes_AsString(folders), named_in(log));
        if (status) raise_status(status);
    }
    Py_XDECREF(folders);
    Py_XDECREF(log);
    Py_XDECREF(named);
    Py_XDECREF(packages);
    return status ? -1 : 0;
}

static int core_exec(PyObject *module)
{
    ModuleState *state = PyModule_GetState(module);
    if (isa_init() < 0 || libraries_init() < 0) return -1;
    if (arrays_init() < 0) return -1;
    if (add_type(module, &model_spec, &state->model) < 0) return -1;
    if (add_type(module, &adapter_spec, &state->adapter) < 0) return -1;
    if (add_type(module, &training_call_spec, &state->training_call) < 0) return -1;
    if (add_type(module, &image_spec, &state->image) < 0) return -1;
    if (PyModule_AddIntConstant(module, "PARTS", GRADIENT_PARTS) < 0) return -1;
    if (PyModule_AddIntConstant(module, "STAGES", STAGES_MOST) < 0) return -1;
    return add_type(module, &sampler_spec, &state->sampler);
}

static int core_traverse(PyObject *module, visitproc visit, void *arg)
{
    ModuleState *state = PyModule_GetState(module);
    Py_VISIT(state->model);
    Py_VISIT(state->adapter);
    Py_VISIT(state->sampler);
    Py_VISIT(state->training_call);
    Py_VISIT(state->image);
    return 0;
}

static int core_clear(PyObject *module)
{
    ModuleState *state = PyModule_GetState(module);
    Py_CLEAR(state->model);
    Py_CLEAR(state->adapter);
    Py_CLEAR(state->sampler);
    Py_CLEAR(state->training_call);
    Py_CLEAR(state->image);
    return 0;
}

static PyModuleDef_Slot core_slots[] = {
    {Py_mod_exec, core_exec},
    {0, NULL},
};

static struct PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tinsmith._core",
    .m_doc = "The engine: base models, LoRA adapters, and the sampler. See _core.pyi.",
    .m_size = sizeof(ModuleState),
    .m_methods = core_methods,
    .m_slots = core_slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
};

PyMODINIT_FUNC PyInit__core(void)
{
    return PyModuleDef_Init(&core_module);
}
