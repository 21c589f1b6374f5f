/* model/stage_devices.h - the devices of a model's stages. */
#ifndef TINSMITH_MODEL_STAGE_DEVICES_H
#define TINSMITH_MODEL_STAGE_DEVICES_H

#include "model.h"

/* Opens a device for each of the names, which commas separate. */
Status stages_open(Model *model, const char *devices, int layers, int threads);

#endif
