/* tools/card/smoke.c - opens the CUDA device's library without Python, runs the ops that steps are
 * made of at a real shape, and compares each with loops on the host, in double.
 *
 *     python -m tools.card.smoke            builds and runs it
 *     gpu_smoke libtinsmith_cuda.so [tiny|real [PACKAGES]] [--wrong FOLDER] [--seed N]
 *               [--only CHECK] [--from NUMBER] [--patience SECONDS]
 *
 * A line of JSON for each result of an op: its error, relative to the norm of the result, the bar,
 * and the largest error of an element in units of its own bar (smoke/judge.c). `wrong` is there
 * where one of them is above, beside where the wrong elements lie; the arrays are left in FOLDER.
 * Inputs are rounded to the device's `real` first, so a bar covers the rounding of the result and
 * sums in another order.
 *
 * Exits 1 if something was wrong, 2 if there is no device, and CHECK_FAILED + i where check number
 * i could not go on: then `--from i+1` tries those behind it, with a device that is opened anew. */
#include <dlfcn.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "smoke/smoke.h"

enum { CHECK_FAILED = 10 };

static const struct {
    const char *name;
    Check *check;
} checks[] = {
    {"rows", check_rows},
    {"types", check_types},
    {"products", check_products},
    {"lora", check_lora},
    {"lora_backward", check_lora_backward},
    {"norm", check_norm},
    {"rotate", check_rotate},
    {"swiglu", check_swiglu},
    {"attention", check_attention},
    {"window", check_window},
    {"decoding", check_decoding},
    {"head", check_head},
    {"logprob", check_logprob},
    {"experts", check_experts},
    {"optimizer", check_optimizer},
};

static const Sizes REAL_SIZES = {
    .T = 1024, .D = 2048, .H = 32, .G = 8, .E = 128, .F = 6144, .V = 32768};
static const Sizes TINY_SIZES = {
    .T = 150, .D = 64, .H = 4, .G = 2, .E = 16, .F = 96, .V = 301, .tiny = 1};

enum { CHECKS = sizeof checks / sizeof *checks };

typedef struct Options {
    const char *library, *size, *packages, *only;
    int from;
    unsigned patience; /* seconds of a check; 0: no limit */
} Options;

static int options_read(Options *options, int argc, char **argv)
{
    const char *place[3] = {NULL, "real", ""};
    int places = 0;
    for (int i = 1; i < argc; i++) {
        int has_value = i + 1 < argc;
        if (strcmp(argv[i], "--wrong") == 0 && has_value)
            wrong_folder = argv[++i];
        else if (strcmp(argv[i], "--seed") == 0 && has_value)
            block_seed = (unsigned)strtoul(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--only") == 0 && has_value)
            options->only = argv[++i];
        else if (strcmp(argv[i], "--from") == 0 && has_value)
            options->from = atoi(argv[++i]);
        else if (strcmp(argv[i], "--patience") == 0 && has_value)
            options->patience = (unsigned)atoi(argv[++i]);
        else if (places < 3)
            place[places++] = argv[i];
        else
            return 0;
    }
    options->library = place[0], options->size = place[1], options->packages = place[2];
    return places > 0 && (!strcmp(place[1], "tiny") || !strcmp(place[1], "real"));
}

/* Opens the library's device, or says why it can't. */
static int device_begin(const Options *options)
{
    void *library = dlopen(options->library, RTLD_NOW | RTLD_LOCAL);
    void *symbol = library ? dlsym(library, "cuda_open") : NULL;
    if (!symbol) {
        printf("%s can't be opened: %s\n", options->library, dlerror());
        return 0;
    }
    DeviceOpen *open;
    memcpy(&open, &symbol, sizeof open);
    DeviceLibraries libraries = {getenv("TINSMITH_CUBLASLT"), options->packages,
                                 getenv("TINSMITH_CUDA_LOG")};
    if (open(&dev, 0, DEVICE_ABI, fail, &libraries)) {
        printf("%s\n", status_text());
        return 0;
    }
    return 1;
}

/* Says which check a signal ended. */
static void crash(int number)
{
    char line[128];
    const char *how = number == SIGALRM ? "it hung" : "a signal ended it";
    int n = snprintf(line, sizeof line, "{\"op\": \"%s\", \"wrong\": \"%s (%d)\"}\n",
                     checks[stop_code - CHECK_FAILED].name, how, number);
    if (write(STDOUT_FILENO, line, (size_t)n) != n) _exit(2);
    _exit(stop_code);
}

/* Runs the checks that were asked for, in order. */
static void checks_run(const Options *options)
{
    static const int ends[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGALRM};
    stop_code = CHECK_FAILED;
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++) signal(ends[i], crash);
    for (int i = options->from; i < CHECKS; i++) {
        stop_code = CHECK_FAILED + i;
        alarm(options->patience);
        if (!options->only || strcmp(options->only, checks[i].name) == 0) checks[i].check();
    }
    alarm(0);
}

int main(int argc, char **argv)
{
    Options options = {NULL};
    if (!options_read(&options, argc, argv)) {
        printf(
            "gpu_smoke LIBRARY [tiny|real [PACKAGES]] [--wrong FOLDER] [--seed N] [--only CHECK]: "
            "the library is libtinsmith_cuda.so; the folders of Python's packages, with ':' "
            "between them, may have cuBLASLt; FOLDER gets what is wrong\n");
        return 2;
    }
    if (!device_begin(&options)) return 2;
    shape = strcmp(options.size, "tiny") ? REAL_SIZES : TINY_SIZES;
    lap();
    checks_run(&options);
    for (const char *const *note = dev->notes; note && *note; note++)
        printf("{\"op\": \"device\", \"note\": \"%s\"}\n", quoted(*note));
    release();
    dev->close(dev);
    return found;
}
