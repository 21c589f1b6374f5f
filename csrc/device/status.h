/* device/status.h - one list of errors for the whole engine.
 *
 * A Status is 0 when all is well. The code that knows the facts of a failure writes its sentence
 * once with fail(). The sentence stays in a thread-local buffer until the binding raises it as the
 * Python exception named in this list. Programmer errors are assert()s, never a Status. */
#ifndef TINSMITH_DEVICE_STATUS_H
#define TINSMITH_DEVICE_STATUS_H

/* Functions that the tests may call from outside the shared object; all others are hidden. */
#define TINSMITH_EXPORT __attribute__((visibility("default")))

/*        code            Python exception  when */
#define STATUS_LIST(X)                                                                          \
    X(STATUS_OK, NULL)                         /* nothing went wrong */                         \
    X(STATUS_INVALID, "ValueError")            /* the request can't be met as it is written */  \
    X(STATUS_INDEX, "IndexError")              /* a token id or a position outside its range */ \
    X(STATUS_MEMORY, "MemoryError")            /* an arena could not be placed */               \
    X(STATUS_NUMERIC, "FloatingPointError")    /* a result that is not finite */                \
    X(STATUS_INTERRUPTED, "KeyboardInterrupt") /* the caller asked the step to stop */          \
    X(STATUS_DEVICE, "RuntimeError")           /* a device is missing, or failed during work */

typedef enum Status {
#define X(code, exception) code,
    STATUS_LIST(X)
#undef X
        STATUS_COUNT
} Status;

/* Keeps the sentence for this thread and returns `code`, so that `return fail(...)` reads well. */
Status fail(Status code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* The sentence of this thread's last fail(). */
TINSMITH_EXPORT const char *status_text(void);

/* The name of the Python exception that stands for `code`. */
const char *status_exception(Status code);

#define TRY(call)                                 \
    do {                                          \
        Status status_ = (call);                  \
        if (status_ != STATUS_OK) return status_; \
    } while (0)

#endif
