/* binding/finite.c - finds the first number of an array that is not finite. */
#include "finite.h"

#include "../device/finite.h"
#include "arrays.h"
#include "turn.h"

PyObject *core_first_bad(PyObject *module, PyObject *array)
{
    (void)module;
    Borrowed numbers;
    int64_t bad;
    if (borrow_numbers(array, "the array", &numbers) < 0) return NULL;
    NO_GIL(bad = first_bad(numbers.data, numbers.type, numbers.length));
    Py_DECREF(numbers.owner);
    return PyLong_FromLongLong(bad);
}
