/* synth.h: a model of a given geometry with random weights made on the device, for measuring speed without
 * a checkpoint. Values are small and random: routing behaves like independent draws. */
#ifndef QX_SYNTH_H
#define QX_SYNTH_H

#include "config.h"
#include "engine.h"

/* The released geometry as the configuration's JSON text. */
extern const char qx_released_config[];

/* Layouts: bf16, fp8, mixed, nvfp4, nvfp4-ple (formats of model 11). `cfg` must outlive the model. Errors:
 * usage for an unknown layout, memory-plan, device. */
int qx_synth_create(struct qx_model **out, const struct qx_config *cfg, const char *layout,
                    const struct qx_model_opts *opts, struct qx_error *err);

#endif
