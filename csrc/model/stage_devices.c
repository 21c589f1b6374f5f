/* model/stage_devices.c - opens the devices of a model's stages. */
#include "stage_devices.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../device/numbers.h"
#include "../registry/registry.h"
#include "stages.h"

/* Whether two devices are of one kind: cuda and cuda:1 are. */
static int same_kind(const Device *a, const Device *b)
{
    size_t length = strcspn(a->name, ":");
    return length == strcspn(b->name, ":") && strncmp(a->name, b->name, length) == 0;
}

static Status stage_check(const Model *model, int k)
{
    const Device *dev = model->stage[k].dev;
    if (!same_kind(model->stage[0].dev, dev))
        return fail(STATUS_DEVICE, "the stages of a model need devices of one kind, not %s and %s",
                    model->stage[0].dev->name, dev->name);
    for (int i = 0; i < k && !dev->map; i++)
        if (strcmp(model->stage[i].dev->name, dev->name) == 0)
            return fail(STATUS_DEVICE, "two stages of a model can't share the memory of %s",
                        dev->name);
    return STATUS_OK;
}

/* The device of the next stage; *names goes past its name. */
static Status stage_open(Model *model, const char **names, int threads)
{
    char name[64];
    size_t length = strcspn(*names, ",");
    if (length >= sizeof name) return fail(STATUS_DEVICE, "there is no device '%s'", *names);
    memcpy(name, *names, length);
    name[length] = '\0';
    *names += length + ((*names)[length] == ',');
    TRY(device_open(&model->stage[model->stages].dev, name, threads));
    model->stages++;
    return stage_check(model, model->stages - 1);
}

/* The devices' own names: the first card is cuda, not cuda:0. */
static Status names_join(Model *model)
{
    size_t bytes = 0;
    for (int k = 0; k < model->stages; k++) bytes += strlen(model->stage[k].dev->name) + 1;
    char *to = model->device = malloc(bytes);
    if (!to) return fail(STATUS_MEMORY, "no memory for a model");
    for (int k = 0; k < model->stages; k++)
        to += sprintf(to, "%s%s", k ? "," : "", model->stage[k].dev->name);
    return STATUS_OK;
}

Status stages_open(Model *model, const char *devices, int layers, int threads)
{
    int count = 1;
    for (const char *c = devices; *c; c++) count += *c == ',';
    if (count > STAGES_MOST || count > layers)
        return fail(STATUS_INVALID, "a model of %d layers can have %d stages, not %d", layers,
                    min_int(layers, STAGES_MOST), count);
    while (model->stages < count) TRY(stage_open(model, &devices, threads));
    model->dev = stage_last(model)->dev;
    return names_join(model);
}
