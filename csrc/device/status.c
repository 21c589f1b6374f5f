/* device/status.c - the sentence of a thread's last failure, one buffer a thread. */
#include "status.h"

#include <assert.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

static _Thread_local char text[1024];

static const char *const exceptions[STATUS_COUNT] = {
#define X(code, exception) [code] = exception,
    STATUS_LIST(X)
#undef X
};

Status fail(Status code, const char *format, ...)
{
    assert(code != STATUS_OK);
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return code;
}

const char *status_text(void)
{
    return text;
}

const char *status_exception(Status code)
{
    return exceptions[code];
}
